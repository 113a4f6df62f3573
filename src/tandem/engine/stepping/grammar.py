"""Grammars of running requests: they determine which tokens may come next.

A ``GrammarState`` belongs to one sequence and follows its tokens. It depends on the grammar and the
tokens alone, so another instance can rebuild it. Masks are computed on threads while the model
runs; llguidance releases the GIL.

A step waits for the masks of its sequences, and with it everybody in it. So what may take long is
done before a step needs it: a request is not planned before its grammar is compiled, with the first
mask, and one whose last mask took long is not planned before the next one is there. ``Engine`` asks
for that and tells the scheduler.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tandem.models.tokenizing.grammars import Matcher, TokenTable, make_matcher

__all__ = ["GrammarState", "Grammars", "Mask"]

_MAX_COMPILED = 64
"""Number of compiled grammars that are kept for later requests, because clients often repeat
theirs."""
_SLOW_S = 0.02
"""Seconds from which the time of a mask counts as long, a few times that of a common one."""

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

    def compute_mask(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow, as bool [vocabulary]; None if the grammar has failed.

        Args:
            token_ids: all tokens that the sequence has generated.
        """
        begin_s = time.perf_counter()
        try:
            return self._compute(token_ids)
        finally:
            self.is_slow = time.perf_counter() - begin_s > _SLOW_S

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
    """A sequence with a grammar, and its next mask if that was begun before its step."""

    def __init__(self, state: "Future[GrammarState]") -> None:
        self.state = state
        self.next_len = -1
        """Number of generated tokens that ``next`` follows; -1: none was begun."""
        self.next: Mask | None = None

    @property
    def is_slow(self) -> bool:
        state = self.state
        return state.done() and state.exception() is None and state.result().is_slow


class Grammars:
    """Two threads that compile grammars and compute masks while steps run: one for what may take
    long, one for the other masks. Called from any thread.

    Args:
        make_table: loads the vocabulary; called on a thread for the first grammar.
    """

    def __init__(self, make_table: Callable[[], TokenTable]) -> None:
        self._make_table = make_table
        self._table: TokenTable | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        """Compiled grammars, at their start, by text; the least recently used first."""
        self._num_users: dict[str, int] = {}
        """Number of live requests of each grammar; those are not dropped."""
        self._sequences: dict[int, _Sequence] = {}
        self._slow = ThreadPoolExecutor(1, "grammar-slow")
        self._quick = ThreadPoolExecutor(1, "grammar")

    # The methods below are the engine's, which asks if requests can be planned.

    def prepare(self, grammar: str, on_ready: Callable[[], None]) -> bool:
        """Begin to compile the grammar of a request, and to compute its first mask. Return True if
        that is done; otherwise ``on_ready`` is called once it is, at once or on another thread.

        Call ``release`` when the request has ended.
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
        mask = None if sequence is None else sequence.next
        if mask is None or mask.done():
            return True
        mask.add_done_callback(lambda _: on_ready())
        return False

    # The methods below are the runner's.

    def open(self, sequence_id: int, grammar: str) -> None:
        """Begin a sequence, at the start of its grammar."""
        with self._lock:
            compiled = self._find(grammar)
        state = self._quick.submit(lambda: GrammarState(compiled.result().deep_copy()))
        self._sequences[sequence_id] = _Sequence(state)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; does nothing if it has no grammar."""
        self._sequences.pop(sequence_id, None)

    def has(self, sequence_id: int) -> bool:
        """Return True if a sequence has a grammar."""
        return sequence_id in self._sequences

    def begin_mask(self, sequence_id: int, token_ids: Sequence[int]) -> Mask:
        """Begin to compute the mask of the token after ``token_ids``, if ``expect_mask`` has not;
        see ``GrammarState.compute_mask``.
        """
        sequence = self._sequences[sequence_id]
        mask, sequence.next = sequence.next, None
        if mask is not None and sequence.next_len == len(token_ids):
            return mask
        thread = self._slow if sequence.is_slow else self._quick
        return thread.submit(lambda: sequence.state.result().compute_mask(token_ids))

    def expect_mask(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Begin to compute the mask of the token after ``token_ids`` now if it may take long; the
        sequence's next step uses it.
        """
        sequence = self._sequences[sequence_id]
        if sequence.is_slow:
            sequence.next = self.begin_mask(sequence_id, [*token_ids])
            sequence.next_len = len(token_ids)

    def _find(self, grammar: str) -> "Future[Matcher]":
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._slow.submit(self._compile, grammar)
            self._drop_unused()
        self._compiled.move_to_end(grammar)
        return found

    def _drop_unused(self) -> None:
        if len(self._compiled) > _MAX_COMPILED:
            unused = [each for each in self._compiled if each not in self._num_users]
            for grammar in unused[: len(self._compiled) - _MAX_COMPILED]:
                del self._compiled[grammar]

    def _compile(self, grammar: str) -> Matcher:
        if self._table is None:
            self._table = self._make_table()
        matcher = make_matcher(self._table, grammar)
        if not matcher.is_error():
            # Copies share the states of the lexer that the first mask brings, which may take a
            # second.
            matcher.compute_bitmask()
        return matcher
