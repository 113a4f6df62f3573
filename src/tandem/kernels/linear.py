"""Linear, Embedding and LmHead: the operators that are one matrix.

Shapes: T tokens, K inputs, N outputs, V vocabulary, D hidden, R rows whose logits are wanted.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from tandem.kernels.operator import Operator, WeightReader, freeze

__all__ = ["Embedding", "Linear", "LmHead"]


class Linear(Operator):
    """``y = x W^T + b`` with W [N, K].

    Args:
        in_features: K.
        out_features: N.
        has_bias: whether the checkpoint has ``bias`` beside ``weight``.
    """

    def __init__(self, in_features: int, out_features: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        self.bias = None

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight`` and, if there is one, ``bias``."""
        rows = self.out_features
        self.weight = freeze(self._read_rows(reader, [(f"{name}.weight", rows)], self.in_features))
        if self.has_bias:
            self.bias = freeze(self._read_rows(reader, [(f"{name}.bias", rows)]))

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return [..., N], new; a NaN in a row of ``x_TK`` stays in that row."""
        return functional.linear(x_TK, self.weight, self.bias)


class Embedding(Operator):
    """Rows of W [V, D] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``."""
        rows = [(f"{name}.weight", self.vocab_size)]
        self.weight = freeze(self._read_rows(reader, rows, self.hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [..., D], new; an id outside of [0, V) raises torch's ``IndexError``."""
        return functional.embedding(token_ids, self.weight)


class LmHead(Linear):
    """The projection to the vocabulary; its weight may be the embedding's.

    Args:
        hidden_size: D.
        vocab_size: V.
        tied_to: gives the embedding whose weight this one shares, at loading; None is a head
            with a weight of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        has_bias: bool = False,
        tied_to: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, has_bias=has_bias)
        self._tied_to = tied_to

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``, or share the embedding's, which must have been loaded before."""
        if self._tied_to is None:
            super().load(reader, name)
            return
        self.weight = self._tied_to().weight
        if self.has_bias:
            self.bias = freeze(self._read_rows(reader, [(f"{name}.bias", self.out_features)]))
