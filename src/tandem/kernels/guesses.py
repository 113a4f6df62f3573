"""Guesses of a layer's experts before its router has run, so that they can be moved ahead of use.

A layer's router is run on the input of the layer before, which the residual stream changes little.
The guess does not depend on the tiers between which experts are moved.

Shapes: T tokens, D hidden, K experts per token.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tandem.placement.experts.tier import GuessGate

__all__ = ["ExpertGuess", "Routes"]

MAX_GUESSES = 4
"""Largest number of a layer's experts that a step moves into faster memory ahead of their use."""


class Routes(Protocol):
    """A layer's router, by which its experts are guessed; ``kernels.operators.moe.Router``
    implements it.
    """

    def route(self, x_TD: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts for hidden states; return (logits [T, E], weights [T, K], expert ids [T,
        K]).
        """
        ...


class ExpertGuess:
    """The experts that a layer is expected to choose, and how often such guesses were right.

    Args:
        router: the layer's own.
    """

    def __init__(self, router: Routes) -> None:
        self._router = router
        self._gate = GuessGate()
        self._guessed: list[int] = []
        """Experts that were in no fast-memory slot and that the running step is expected to choose
        in this layer.
        """

    def propose(
        self, before_TD: Tensor, list_missing: Callable[[list[int]], list[int]]
    ) -> list[int]:
        """Return the experts to move ahead of use into faster memory, likeliest first; none unless
        guesses were often right.

        Args:
            before_TD: the input of the layer before.
            list_missing: returns those of some experts that hold no slot, in the given order.
        """
        _, _, ids_TK = self._router.route(before_TD)
        # The transpose lists each token's best expert first, then each token's second best.
        likeliest = list(dict.fromkeys(ids_TK.t().flatten().tolist()))
        self._guessed = list_missing(likeliest)[:MAX_GUESSES]
        return self._guessed if self._gate.is_open else []

    def compare(self, chosen: Sequence[int]) -> None:
        """Count how many of the experts guessed for this step were chosen, whether or not they were
        moved ahead.
        """
        if self._guessed:
            self._gate.note(self._guessed, chosen)
            self._guessed = []
