"""Grammars of running requests: they determine which tokens may come next.

A ``GrammarState`` belongs to one sequence and follows its tokens. It depends on the grammar and the
tokens alone, so another instance can rebuild it. Masks are computed on threads while the model
runs; llguidance releases the GIL.

A step waits for the masks of its sequences, and with it everybody in it. So what may take long is
done before a step needs it: a request is not planned before its grammar is compiled, with the first
mask, and one whose last mask took long is not planned before the next one is there. ``Engine`` asks
for that and tells the scheduler. The first slow mask of a sequence comes unannounced: the step
waits a moment for it and goes on without the sequence, which is planned again when the mask is
there.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress

import numpy as np

from tandem.models.tokenizing.grammars import Matcher, TokenTable, make_matcher

__all__ = ["GrammarState", "Grammars", "Mask"]

_MAX_COMPILED = 64
"""Number of compiled grammars that are kept for later requests, because clients often repeat
theirs."""
_SLOW_S = 0.02
"""Seconds from which the time of a mask counts as long, a few times that of a common one. A step
waits so long for its masks when the model has run."""
_MAX_MASK_S = 10.0
"""Seconds of processor time from which a mask counts as the failure of its grammar. Each further
one might take as long."""
_NUM_COMPILING = 2
_NUM_SLOW = 4
_NICE, _SLOW_NICE = 5, 10
"""Nice values of the threads that compile, and of those for slow masks: what clients' grammars take
long for must not slow down the steps."""

Mask = Future[np.ndarray | None]
"""Future of the mask of a grammar's allowed tokens; its result is None if the grammar has
failed."""


class GrammarState:
    """The position of one sequence in its grammar.

    Args:
        matcher: llguidance's matcher, at its start; owned.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._num_taken = 0
        self.is_slow = False
        """True if the last mask took long to compute."""
        self._is_failed = False
        """True if a mask took so long that no further one is computed."""

    def compute_mask(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow, as bool [vocabulary]; None if the grammar has failed.

        Args:
            token_ids: all tokens that the sequence has generated.
        """
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        try:
            mask = None if self._is_failed else self._compute(token_ids)
        finally:
            self.is_slow = time.perf_counter() - begin_s > _SLOW_S
        self._is_failed |= time.thread_time() - begin_cpu_s > _MAX_MASK_S
        return None if self._is_failed else mask

    def _compute(self, token_ids: Sequence[int]) -> np.ndarray | None:
        matcher = self._matcher
        if self._num_taken > len(token_ids):
            matcher.rollback(self._num_taken - len(token_ids))
            self._num_taken = len(token_ids)
        for token_id in token_ids[self._num_taken :]:
            # A grammar that is complete accepts no further token except end of text.
            if not matcher.is_stopped() and not matcher.consume_token(token_id):
                return None
            self._num_taken += 1
        if matcher.is_error():
            return None
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return None if matcher.is_error() else np.unpackbits(packed, bitorder="little")


class _Sequence:
    """A sequence with a grammar, and the mask that was begun last for it.

    Args:
        compiled: its grammar, at the start.
    """

    def __init__(self, compiled: "Future[Matcher]") -> None:
        self._compiled = compiled
        self._state: GrammarState | None = None
        self.mask: Mask | None = None
        self.thread: ThreadPoolExecutor | None = None
        """The thread, or threads, of ``mask``."""
        self.token_ids: Sequence[int] = ()
        """Generated tokens that ``mask`` follows."""
        self.is_late = False
        """True if a step has not waited for ``mask`` to its end."""

    @property
    def is_slow(self) -> bool:
        return self.is_late or (self._state is not None and self._state.is_slow)

    def begin(self, thread: ThreadPoolExecutor) -> Mask:
        self.thread = thread
        self.mask = thread.submit(self._compute, self.token_ids)
        return self.mask

    def _compute(self, token_ids: Sequence[int]) -> np.ndarray | None:
        if self._state is None:
            self._state = GrammarState(self._compiled.result().deep_copy())
        return self._state.compute_mask(token_ids)


class Grammars:
    """Threads that compile grammars and compute masks while steps run: some that compile, some for
    masks that may take long, one for the other masks. Called from any thread.

    Nothing can interrupt a mask. So a thread on which one turns out to take long is left alone with
    it, and another one takes its place.

    Args:
        make_table: loads the vocabulary; called on a thread for the first grammar.
    """

    def __init__(self, make_table: Callable[[], TokenTable]) -> None:
        self._make_table = make_table
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        """Compiled grammars, at their start, by text; the least recently used first."""
        self._num_users: dict[str, int] = {}
        """Number of live requests of each grammar; those are not dropped."""
        self._sequences: dict[int, _Sequence] = {}
        nice = os.nice  # On Linux it is the calling thread's.
        self._compiling = ThreadPoolExecutor(_NUM_COMPILING, "grammar-compile", nice, (_NICE,))
        self._slow = ThreadPoolExecutor(_NUM_SLOW, "grammar-slow", nice, (_SLOW_NICE,))
        self._quick = ThreadPoolExecutor(1, "grammar", self._note_quick)
        self._quick_id = 0
        """Id of the thread for quick masks, by the operating system; 0 before it has begun."""

    # The methods below are the engine's, which asks if requests can be planned.

    def prepare(self, grammar: str, on_ready: Callable[[], None]) -> bool:
        """Begin to compile the grammar of a request, and to compute its first mask. Return True if
        that is done; otherwise ``on_ready`` is called once it is, at once or on another thread.

        Call ``release`` when the request has ended. A grammar without requests is not compiled.
        """
        with self._lock:
            self._num_users[grammar] = self._num_users.get(grammar, 0) + 1
            compiled = self._find(grammar)
        if compiled.done():
            return True
        compiled.add_done_callback(lambda _: on_ready())
        return False

    def release(self, grammar: str) -> None:
        """Note that a request of this grammar has ended."""
        with self._lock:
            self._num_users[grammar] -= 1
            if not self._num_users[grammar]:
                del self._num_users[grammar]
            self._drop_unused()

    def is_slow(self, sequence_id: int) -> bool:
        """Return True if the last mask of a sequence took long: its next step should not be planned
        before ``await_mask`` allows it.
        """
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.is_slow

    def await_mask(self, sequence_id: int, on_ready: Callable[[], None]) -> bool:
        """Return True if no mask of a sequence is being computed; otherwise ``on_ready`` is called
        when it is done, at once or on another thread.
        """
        sequence = self._sequences.get(sequence_id)
        mask = None if sequence is None else sequence.mask
        if mask is None or mask.done():
            return True
        mask.add_done_callback(lambda _: on_ready())
        return False

    # The methods below are the runner's.

    def open(self, sequence_id: int, grammar: str) -> None:
        """Begin a sequence of a live request, at the start of its grammar."""
        with self._lock:
            self._sequences[sequence_id] = _Sequence(self._find(grammar))

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; does nothing if it has no grammar."""
        self._sequences.pop(sequence_id, None)

    def has(self, sequence_id: int) -> bool:
        """Return True if a sequence has a grammar."""
        return sequence_id in self._sequences

    def begin_mask(self, sequence_id: int, token_ids: Sequence[int]) -> Mask:
        """Begin to compute the mask of the token after ``token_ids``, unless that was begun before;
        see ``GrammarState.compute_mask``.
        """
        sequence = self._sequences[sequence_id]
        if sequence.mask is not None and len(sequence.token_ids) == len(token_ids):
            return sequence.mask
        is_slow, sequence.is_late = sequence.is_slow, False
        sequence.token_ids = [*token_ids]
        return sequence.begin(self._slow if is_slow else self._quick)

    def expect_mask(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Begin to compute the mask of the token after ``token_ids`` now if it may take long; the
        sequence's next step uses it.
        """
        if self._sequences[sequence_id].is_slow:
            self.begin_mask(sequence_id, token_ids)

    def find_late(self, masks: Mapping[int, Mask]) -> set[int]:
        """Wait a moment for the masks of a step; return the ids of the sequences whose mask is not
        there. It is computed nevertheless, for their next step.

        Args:
            masks: results of ``begin_mask`` by sequence id.
        """
        waiting = wait_for(masks.values(), _SLOW_S).not_done if masks else ()
        late = {sequence_id for sequence_id, mask in masks.items() if mask in waiting}
        quick = [i for i in late if self._sequences[i].thread is self._quick]
        if quick:
            moved = [self._sequences[i] for i in quick if masks[i].cancel()]
            self._quick.shutdown(wait=False)
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._quick_id, _SLOW_NICE)
            self._quick = ThreadPoolExecutor(1, "grammar", self._note_quick)
            for sequence in moved:
                sequence.begin(self._quick)
        for sequence_id in late:
            self._sequences[sequence_id].is_late = True
        return late

    def _note_quick(self) -> None:
        self._quick_id = threading.get_native_id()

    def _find(self, grammar: str) -> "Future[Matcher]":
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._compiling.submit(self._compile, grammar)
            self._drop_unused()
        self._compiled.move_to_end(grammar)
        return found

    def _drop_unused(self) -> None:
        if len(self._compiled) > _MAX_COMPILED:
            unused = [each for each in self._compiled if each not in self._num_users]
            for grammar in unused[: len(self._compiled) - _MAX_COMPILED]:
                del self._compiled[grammar]

    def _compile(self, grammar: str) -> Matcher:
        with self._lock:
            if grammar not in self._num_users:
                # All its requests have ended. A later one has it compiled.
                self._compiled.pop(grammar, None)
                raise CancelledError
        with self._table_lock:
            if self._table is None:
                self._table = self._make_table()
        matcher = make_matcher(self._table, grammar)
        if not matcher.is_error():
            # Copies share the states of the lexer that the first mask brings, which may take a
            # second.
            matcher.compute_bitmask()
        return matcher
