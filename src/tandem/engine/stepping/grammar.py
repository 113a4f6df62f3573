"""Grammars of running requests: they determine which tokens may come next.

A ``GrammarState`` belongs to one sequence and follows its tokens. It depends on the grammar and the
tokens alone, so another instance can rebuild it. Masks are computed on a thread while the model
runs; llguidance releases the GIL.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tandem.models.tokenizing.grammars import Matcher, TokenTable, make_matcher

__all__ = ["GrammarState", "Grammars"]

_MAX_COMPILED = 64
"""Number of compiled grammars that are kept, because clients often repeat theirs."""


class GrammarState:
    """The position of one sequence in its grammar.

    Args:
        matcher: llguidance's matcher, at its start; owned.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._num_taken = 0

    def compute_mask(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow, as bool [vocabulary]; None if the grammar has failed.

        Args:
            token_ids: all tokens that the sequence has generated.
        """
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


class Grammars:
    """A thread that compiles grammars and computes masks while steps run.

    Args:
        make_table: loads the vocabulary; called on that thread for the first grammar.
    """

    def __init__(self, make_table: Callable[[], TokenTable]) -> None:
        self._make_table = make_table
        self._table: TokenTable | None = None
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, "grammar")

    def compile(self, grammar: str) -> "Future[GrammarState]":
        """Begin to compile a grammar; the future gives a new state at the grammar's start."""
        return self._worker.submit(self._compile, grammar)

    def begin_mask(
        self, state: "Future[GrammarState]", token_ids: Sequence[int]
    ) -> "Future[np.ndarray | None]":
        """Begin to compute the mask of the token after ``token_ids``; see
        ``GrammarState.compute_mask``.
        """
        return self._worker.submit(lambda: state.result().compute_mask(token_ids))

    def _compile(self, grammar: str) -> GrammarState:
        if self._table is None:
            self._table = self._make_table()
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = make_matcher(self._table, grammar)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarState(found.deep_copy())
