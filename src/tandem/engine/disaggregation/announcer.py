"""The prefill side of disaggregation: tells decode instances which KV blocks they may read.

Owns the questions of decode instances that wait until a prefill has made progress. Each answer is
made from the engine's current state (``Engine.find_prefill``), so an answer can be late but not
wrong.

Threads: questions arrive on the transfer engine's thread; progress is reported on any thread,
mostly the one that runs steps.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.core.clock import Clock
from tandem.core.errors import ConflictError, TandemError, UnsupportedError
from tandem.core.state_layout import NO_SLOT
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.head_slices import (
    ByteRange,
    HeldHeads,
    have_same_rows,
    map_blocks,
    sum_ranges,
)
from tandem.engine.disaggregation.messages import (
    KvAnswer,
    KvQuestion,
    Run,
    decode_question,
    digest_prompt,
)
from tandem.engine.disaggregation.ports import IncomingCall
from tandem.engine.engine import Engine, PrefillView
from tandem.engine.scheduling.request import Request

__all__ = ["PrefillAnnouncer"]

MAX_WAITING = 4096
"""Largest number of questions about prefills that wait for an answer. For one more, the oldest is
answered with ConflictError, so the instance that asked stops reading and computes those blocks
itself.
"""


@dataclass(slots=True)
class _Waiting:
    call: IncomingCall
    question: KvQuestion
    until_s: float


class PrefillAnnouncer:
    """Answers decode instances' questions about prefills; a ``PrefillListener`` of its engine.

    Args:
        engine: the engine whose prefills are asked about; not owned.
        own: description of this instance's KV.
        memory: bytes of all blocks, in the order of their ids; not owned.
        clock: the engine's clock.
        states: bytes of all state slots; None: the model has no state.
        windows: bytes of all window blocks; None: sliding-window layers have no blocks of their
            own.
    """

    def __init__(
        self,
        engine: Engine,
        own: KvPeer,
        memory: npt.NDArray[np.uint8],
        clock: Clock,
        states: npt.NDArray[np.uint8] | None = None,
        windows: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self._states = states
        self._windows = windows
        self._engine = engine
        self._own = own
        self._memory = memory
        self._clock = clock
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Number of decode instances' questions that wait for progress of a prefill."""
        return len(self._waiting)

    def handle_calls(self, calls: Sequence[IncomingCall]) -> list[bytes | TandemError | None]:
        """Answer decode instances' questions: an answer or an error for each call.

        None stands for a question that is kept until the prefill makes progress.
        """
        answers: list[bytes | TandemError | None] = []
        for call in calls:
            try:
                answers.append(self._handle(call))
            except TandemError as error:
                answers.append(error)
        return answers

    def note_progress(self) -> None:
        """Answer the waiting questions of decode instances whose prefill has made progress."""
        if not self._waiting:
            return
        now_s = self._clock.now_s()
        with self._lock:
            for key, waiting in list(self._waiting.items()):
                if waiting.until_s <= now_s:
                    del self._waiting[key]
                    continue
                try:
                    answer = self._answer(waiting.question)
                except TandemError as error:
                    waiting.call.fail(error)
                    del self._waiting[key]
                    continue
                if answer is not None:
                    waiting.call.reply(msgspec.msgpack.encode(answer))
                    del self._waiting[key]

    def _handle(self, call: IncomingCall) -> bytes | None:
        question = decode_question(call.payload)
        if question.wants_state:
            return msgspec.msgpack.encode(self._tell_state(question))
        if question.wants_windows:
            return msgspec.msgpack.encode(self._tell_windows(question))
        if question.verify:
            # Verify without the lock: reading blocks takes long, and progress must not wait for it.
            return msgspec.msgpack.encode(self._verify(question))
        key = (call.peer, question.request_id)
        until_s = self._clock.now_s() + question.wait_s
        with self._lock:
            older = self._waiting.pop(key, None)
            if older is None and len(self._waiting) >= MAX_WAITING:
                older = self._waiting.pop(next(iter(self._waiting)))
            # Register the question before it is answered, so that progress in between finds it.
            self._waiting[key] = _Waiting(call, question, until_s)
            try:
                answer = self._answer(question)
            except TandemError:
                del self._waiting[key]
                raise
            if answer is not None:
                del self._waiting[key]
        if older is not None:
            older.call.fail(ConflictError("kv_peer.ask", "asked again"))
        return None if answer is None else msgspec.msgpack.encode(answer)

    def _answer(self, question: KvQuestion) -> KvAnswer | None:
        """Return the progress of the prefill that a decode instance asks about; None if there is
        none since the last answer to that question.

        Raises: ConflictError (the request with this id has another prompt).
        """
        view = self._engine.find_prefill(question.request_id)
        if view is None:
            # This prefill is unknown. If the asker has read no blocks of it and it has not ended
            # here, its request may still be on the way to this instance. Otherwise it is gone.
            is_to_come = question.run is None and not self._engine.has_ended_prefill(
                question.request_id
            )
            return None if is_to_come else KvAnswer(run=None)
        run = _get_run(view.request)
        is_same = run == question.run
        if not is_same and digest_prompt(view.request) != question.digest:
            raise ConflictError(
                "kv_peer.ask", f"request {question.request_id!r} has other tokens or another salt"
            )
        if is_same and not view.is_held:
            if (view.num_complete, view.num_layers) <= question.seen:
                return None
        elif not view.num_blocks and question.run is None:
            return None
        first = min(question.num_known, view.num_blocks) if is_same else 0
        return KvAnswer(
            run=run,
            is_held=view.is_held,
            first=first,
            block_ids=view.block_ids[first:],
            num_complete=view.num_complete,
            num_blocks=view.num_blocks,
            num_layers=view.num_layers,
        )

    def _verify(self, question: KvQuestion) -> KvAnswer:
        """Return checksums of blocks, by which the decode instance verifies the bytes that it has
        read.

        Raises: ConflictError (a block is not complete); UnsupportedError (the asker's block layout
            differs in more than the number of heads).
        """
        own = HeldHeads(self._own.layout, self._own.first_head)
        theirs = HeldHeads(question.layout, question.first_head)
        if not have_same_rows(own.layout, theirs.layout):
            raise UnsupportedError("kv_peer.verify", "blocks of another layout")
        ranges = map_blocks(own, theirs, range(own.layout.num_layers))
        before = self._find_run(question)
        if before is None:
            return KvAnswer(run=None)
        if max(question.verify) >= before.num_complete:
            raise ConflictError("kv_peer.verify", f"{max(question.verify)} is not complete")
        block_ids = [before.block_ids[position] for position in question.verify]
        checksums = [self._sum_up(block_id, ranges) for block_id in block_ids]
        after = self._find_run(question)
        if after is None:
            return KvAnswer(run=None)
        # If blocks have moved, leave out the checksums: the prefix index has replaced a block by an
        # equal one, and the old one may have been overwritten while its checksum was computed.
        is_moved = [after.block_ids[position] for position in question.verify] != block_ids
        verified = () if is_moved else tuple(zip(block_ids, checksums, strict=True))
        return KvAnswer(run=question.run, is_held=after.is_held, verified=verified)

    def _tell_state(self, question: KvQuestion) -> KvAnswer:
        """Return the slot and the CRC-32C of the recurrent state at the end of the prompt.

        The answer has no state if the prefill has not ended, and no run if its blocks are no longer
        held.
        """
        view = self._find_run(question)
        if view is None:
            return KvAnswer(run=None)
        slot = view.request.state_notes.slot
        if not view.is_held or self._states is None or slot == NO_SLOT:
            return KvAnswer(run=question.run, is_held=view.is_held)
        size = self._own.state_bytes
        checksum = sum_ranges(self._states[slot * size : (slot + 1) * size], [(0, size)])
        after = self._find_run(question)
        if after is None or not after.is_held:
            return KvAnswer(run=None)
        return KvAnswer(run=question.run, is_held=True, state=(slot, checksum))

    def _tell_windows(self, question: KvQuestion) -> KvAnswer:
        """Return the ids and CRC-32C of the window blocks (KV of the sliding-window layers) at the
        end of the prompt.

        The answer has none if the prefill has not ended, and no run if its blocks are no longer
        held.
        """
        view = self._find_run(question)
        if view is None:
            return KvAnswer(run=None)
        if not view.is_held or self._windows is None:
            return KvAnswer(run=question.run, is_held=view.is_held)
        size, memory = self._own.window_block_bytes, self._windows
        window = view.request.held_window
        told = [
            (block_id, sum_ranges(memory[block_id * size : (block_id + 1) * size], [(0, size)]))
            for block_id in window.blocks
        ]
        after = self._find_run(question)
        if after is None or not after.is_held:
            return KvAnswer(run=None)
        return KvAnswer(
            run=question.run, is_held=True, window_first=window.first, windows=tuple(told)
        )

    def _find_run(self, question: KvQuestion) -> PrefillView | None:
        view = self._engine.find_prefill(question.request_id)
        return view if view is not None and _get_run(view.request) == question.run else None

    def _sum_up(self, block_id: int, ranges: list[ByteRange]) -> int:
        size = self._own.block_bytes
        block = self._memory[block_id * size : (block_id + 1) * size]
        return sum_ranges(block, [(each.source, each.length) for each in ranges])


def _get_run(request: Request) -> Run:
    return request.sequence_id, request.queue.num_preemptions
