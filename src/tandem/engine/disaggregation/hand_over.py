"""The transfer of one request's KV from a prefill instance, while that still computes the prompt.

Rules by which a late, failed or wrong read does no harm:

- Bytes are read only from blocks that an answer of the prefill instance has named.
- A block is accepted only if all its layers were read, the prefill instance confirms after the read
  that the block was not replaced in the same run of the request, and both checksums agree.
- No block is accepted after the lease, as measured here, whatever the prefill instance says.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.core.clock import Clock
from tandem.core.errors import CorruptionError, DeadlineError, NotFoundError
from tandem.core.instance_status import Statistics
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.head_slices import sum_ranges
from tandem.engine.disaggregation.messages import (
    KvAnswer,
    KvQuestion,
    Run,
    decode_answer,
    digest_prompt,
)
from tandem.engine.disaggregation.peers import OpenPeer
from tandem.engine.disaggregation.ports import PeerPort, PoolRange
from tandem.engine.groups.group import Group
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.request import Request

__all__ = ["HandOver", "ReadTarget"]

READ_BATCH_BYTES = 64 << 20
"""Bytes per read, at least one block; the blocks of one read are verified together."""
MAX_BATCH_BLOCKS = 256
READ_DEADLINE_S = 10.0
"""Time limit of one read, seconds."""
ASK_AGAIN_S = 2.0
"""Seconds after which a question to the prefill instance is asked again if no answer came."""
CALL_DEADLINE_S = 5.0
"""Time limit in seconds of a question that the prefill instance answers at once, without waiting
for its prefill.
"""


@dataclass(slots=True)
class ReadTarget:
    """The memory of this instance that blocks are read into, and the port that reads them."""

    port: PeerPort
    """Port, this instance's side of reads from other instances, which writes what it reads into
    ``memory``.
    """
    memory: npt.NDArray[np.uint8]
    """Bytes of all blocks of this instance, one after the other."""
    own: KvPeer
    clock: Clock
    counters: Statistics
    states: npt.NDArray[np.uint8] | None = None
    """Bytes of all state slots of this instance; None: the model has none."""
    windows: npt.NDArray[np.uint8] | None = None
    """Bytes of all window blocks of this instance; None: sliding-window layers have none of their
    own."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A block of the hand-over that was not read, or not verified yet."""

    load: BlockLoad
    num_layers: int = 0
    """Number of leading layers of the block that were read in the prefill's present run."""
    source_id: int = -1
    """Id of the prefill instance's block that the layers were read from."""


class HandOver:
    """The reader of the KV of one request from a prefill instance, while that instance computes it
    or afterwards.

    Args:
        target: memory that the KV is written to.
        peer: the prefill instance.
        request: the request, which waits until ``load.wait_until_s``.
        loads: loads of that request, in the order of its prompt.
        take: called with the loads whose blocks have arrived and are verified.
    """

    def __init__(
        self,
        target: ReadTarget,
        peer: OpenPeer,
        request: Request,
        loads: Sequence[BlockLoad],
        take: Callable[[list[BlockLoad]], None],
    ) -> None:
        assert request.prefill_kv is not None, f"{request.request_id} comes from no prefill"
        self._target = target
        self._peer = peer
        self._until_s = request.load.wait_until_s
        self._source_id = request.prefill_kv.handle.request_id
        self._digest = digest_prompt(request)
        self._pending = [_Pending(load) for load in loads if load.block.group is Group.FULL]
        self._windows = [x for x in loads if x.block.group is Group.WINDOW]
        self._state = next((x for x in loads if x.block.group is Group.STATE), None)
        self._take = take
        self._all_layers = target.own.layout.num_layers
        self._run: Run | None = None
        self._block_ids: tuple[int, ...] = ()
        self._answer = KvAnswer(run=None)

    async def run(self) -> None:
        """Read until every block has arrived and is verified.

        After this returns or raises, nothing writes into the blocks any more.

        Raises: NotFoundError (the prefill has ended and its blocks are not held); DeadlineError
            (the lease has ended); CorruptionError (checksums differ, or an answer is inconsistent);
            ConflictError (the prefill has another prompt); errors of the transfer engine.
        """
        while self._pending:
            self._note(await self._ask_until_answered())
            for batch in self._list_batches():
                await self._read(batch)
                await self._verify(batch)
                if self._answer.run is None:
                    # The prefill instance has replaced a block, or has preempted the prefill (its
                    # run has ended): ask for the present block ids before reading on.
                    break
        if self._state is not None:
            await self._read_state(self._state)
        if self._windows:
            await self._read_windows(self._windows)

    async def _read_windows(self, loads: Sequence[BlockLoad]) -> None:
        """Wait until the prefill has ended; then read and verify the window blocks (KV of the
        sliding-window layers) at the end of the prompt.
        """
        target, facts = self._target, self._peer.facts
        size, memory = target.own.window_block_bytes, target.windows
        assert memory is not None, "a window block of a model without one"
        while not self._answer.is_held:
            self._note(await self._ask_until_answered())
        before = await self._ask_windows()
        # For each window block that is read: our block id, the prefill instance's block id and the
        # checksum.
        read: list[tuple[int, int, int]] = []
        for load in loads:
            place, ours = load.position - before.window_first, load.block.number
            if not 0 <= place < len(before.windows):
                raise NotFoundError("kv_peer.ask", "the prefill holds no such window")
            block_id, checksum = before.windows[place]
            if block_id >= facts.num_window_blocks:
                raise CorruptionError("kv_peer.ask", f"{facts.name} answers nonsense")
            read.append((ours, block_id, checksum))
        ranges = [
            PoolRange(ours * size, theirs * size, size, "windows") for ours, theirs, _ in read
        ]
        begin_s = target.clock.now_s()
        deadline_s = min(READ_DEADLINE_S, self._remaining_s())
        await target.port.read(self._peer.pool, ranges, deadline_s=deadline_s)
        target.counters.peer_read_exposed_seconds += target.clock.now_s() - begin_s
        target.counters.peer_read_bytes += size * len(ranges)
        after = await self._ask_windows()
        self._remaining_s()
        if (after.window_first, after.windows) != (before.window_first, before.windows):
            raise NotFoundError("kv_peer.read", "the prefill has let its window go")
        for ours, _, checksum in read:
            own = memory[ours * size : (ours + 1) * size]
            if checksum != sum_ranges(own, [(0, size)]):
                raise CorruptionError("kv_peer.read", "the window is not what the prefill has")
        self._take(list(loads))

    async def _ask_windows(self) -> KvAnswer:
        """Ask the prefill instance for the window blocks at the end of the prompt. They must be of
        the run (of the prefill between two preemptions) whose full blocks were accepted.
        """
        deadline_s = min(CALL_DEADLINE_S, self._remaining_s())
        return await self._ask(deadline_s, wants_windows=True)

    async def _read_state(self, load: BlockLoad) -> None:
        """Wait until the prefill has ended; then read and verify the recurrent state at the end of
        the prompt.
        """
        target, facts = self._target, self._peer.facts
        slot, size = load.block.number, target.own.state_bytes
        assert target.states is not None, "a state of a model without one"
        while not self._answer.is_held:
            self._note(await self._ask_until_answered())
        before = await self._ask_state()
        if before.state is None or before.state[0] >= facts.num_state_slots:
            raise NotFoundError("kv_peer.ask", "the prefill holds no state")
        read = PoolRange(slot * size, before.state[0] * size, size, "states")
        begin_s = target.clock.now_s()
        deadline_s = min(READ_DEADLINE_S, self._remaining_s())
        await target.port.read(self._peer.pool, [read], deadline_s=deadline_s)
        target.counters.peer_read_exposed_seconds += target.clock.now_s() - begin_s
        target.counters.peer_read_bytes += size
        after = await self._ask_state()
        self._remaining_s()
        own = target.states[slot * size : (slot + 1) * size]
        if after.state != before.state or after.state is None:
            raise NotFoundError("kv_peer.read", "the prefill has let its state go")
        if after.state[1] != sum_ranges(own, [(0, size)]):
            raise CorruptionError("kv_peer.read", "the state is not what the prefill has")
        self._take([load])

    async def _ask_state(self) -> KvAnswer:
        """Ask the prefill instance for the recurrent state at the end of the prompt. It must be of
        the run (of the prefill between two preemptions) whose blocks were accepted.
        """
        deadline_s = min(CALL_DEADLINE_S, self._remaining_s())
        return await self._ask(deadline_s, wants_state=True)

    def _remaining_s(self) -> float:
        remaining_s = self._until_s - self._target.clock.now_s()
        if remaining_s <= 0:
            raise DeadlineError("kv_peer.read", "the lease of the blocks has ended")
        return remaining_s

    async def _ask_until_answered(self) -> KvAnswer:
        """Ask for the prefill's progress every ``ASK_AGAIN_S``, until an answer comes.

        Raises: DeadlineError (the lease, for which the request waits for the blocks, has ended);
            errors of the answer.
        """
        while True:
            try:
                return await self._ask(min(ASK_AGAIN_S, self._remaining_s()))
            except DeadlineError:
                self._remaining_s()

    async def _ask(
        self,
        deadline_s: float,
        verify: tuple[int, ...] = (),
        *,
        wants_state: bool = False,
        wants_windows: bool = False,
    ) -> KvAnswer:
        own = self._target.own
        question = KvQuestion(
            request_id=self._source_id,
            digest=self._digest,
            run=self._run,
            num_known=len(self._block_ids),
            seen=(self._answer.num_complete, self._answer.num_layers),
            verify=verify,
            wants_state=wants_state,
            wants_windows=wants_windows,
            wait_s=deadline_s,
            layout=own.layout,
            first_head=own.first_head,
        )
        payload = msgspec.msgpack.encode(question)
        answer = await self._target.port.call(self._peer.pool, payload, deadline_s=deadline_s)
        return decode_answer(answer)

    def _note(self, answer: KvAnswer) -> None:
        """Record the progress of the prefill that an answer reports.

        Raises: NotFoundError (the prefill is gone); CorruptionError (the answer is inconsistent).
        """
        if answer.run is None:
            raise NotFoundError("kv_peer.ask", "the prefill has ended and its blocks are not held")
        if answer.run != self._run:
            self._run, self._block_ids = answer.run, ()
            for pending in self._pending:
                pending.num_layers = 0
        block_ids = self._block_ids[: answer.first] + answer.block_ids
        is_sound = (
            len(block_ids) == answer.num_blocks >= answer.num_complete
            and answer.num_layers <= self._all_layers
            and all(block_id < self._peer.facts.num_blocks for block_id in answer.block_ids)
            and not (
                answer.is_held
                and self._pending
                and self._pending[-1].load.position >= answer.num_complete
            )
        )
        if not is_sound:
            raise CorruptionError("kv_peer.ask", f"{self._peer.facts.name} answers nonsense")
        self._block_ids, self._answer = block_ids, answer

    def _count_readable(self, pending: _Pending) -> int:
        """Return how many leading layers of a block the prefill instance has computed."""
        position = pending.load.position
        if position < self._answer.num_complete:
            return self._all_layers
        return self._answer.num_layers if position < self._answer.num_blocks else 0

    def _list_batches(self) -> Iterator[list[_Pending]]:
        """Divide the blocks that can be read or verified now into batches of limited size."""
        size = self._target.own.block_bytes
        limit = min(max(READ_BATCH_BYTES // size, 1), MAX_BATCH_BLOCKS)
        num_complete = self._answer.num_complete
        readable = [
            pending
            for pending in self._pending
            if self._count_readable(pending) > pending.num_layers
            or pending.load.position < num_complete
        ]
        for start in range(0, len(readable), limit):
            yield readable[start : start + limit]

    async def _read(self, batch: Sequence[_Pending]) -> None:
        target, peer = self._target, self._peer
        size, their_size = target.own.block_bytes, peer.facts.block_bytes
        ranges: list[PoolRange] = []
        for pending in batch:
            source_id = self._block_ids[pending.load.position]
            if source_id != pending.source_id:
                pending.source_id, pending.num_layers = source_id, 0
            ours, theirs = pending.load.block.number * size, source_id * their_size
            layers = range(pending.num_layers, self._count_readable(pending))
            ranges += [
                PoolRange(ours + each.target, theirs + each.source, each.length)
                for each in peer.list_ranges(layers)
            ]
        if not ranges:
            return
        is_hidden = not self._answer.is_held
        begin_s = target.clock.now_s()
        deadline_s = min(READ_DEADLINE_S, self._remaining_s())
        await target.port.read(peer.pool, ranges, deadline_s=deadline_s)
        seconds = target.clock.now_s() - begin_s
        target.counters.peer_read_bytes += sum(each.length for each in ranges)
        if is_hidden:
            target.counters.peer_read_hidden_seconds += seconds
        else:
            target.counters.peer_read_exposed_seconds += seconds
        for pending in batch:
            pending.num_layers = self._count_readable(pending)

    async def _verify(self, batch: Sequence[_Pending]) -> None:
        """Compare the blocks of a batch that were fully read with the prefill instance's checksums,
        and accept those that have not changed since they were read.

        Raises: CorruptionError (the checksums of an unchanged block differ).
        """
        read = [
            pending
            for pending in batch
            if pending.num_layers == self._all_layers
            and pending.load.position < self._answer.num_complete
        ]
        if not read:
            return
        deadline_s = min(CALL_DEADLINE_S, self._remaining_s())
        answer = await self._ask(deadline_s, tuple(pending.load.position for pending in read))
        self._remaining_s()
        if answer.run != self._run or len(answer.verified) != len(read):
            self._start_over()
            return
        good: list[_Pending] = []
        damaged: list[_Pending] = []
        for pending, (block_id, checksum) in zip(read, answer.verified, strict=True):
            if block_id != pending.source_id:
                self._start_over()
            elif checksum == self._sum_up(pending.load.block.number):
                good.append(pending)
            else:
                damaged.append(pending)
        self._pending = [pending for pending in self._pending if pending not in good]
        self._target.counters.peer_read_blocks += len(good)
        if good:
            self._take([pending.load for pending in good])
        if damaged:
            raise CorruptionError(
                "kv_peer.read", f"block {damaged[0].load.position} is not what the prefill has"
            )

    def _start_over(self) -> None:
        """Drop the prefill's block ids that are known, so that they are asked for again; blocks
        that turn out unchanged are not read twice.
        """
        self._block_ids, self._answer = (), KvAnswer(run=None)

    def _sum_up(self, block_id: int) -> int:
        size = self._target.own.block_bytes
        block = self._target.memory[block_id * size : (block_id + 1) * size]
        return sum_ranges(block, [(0, size)])
