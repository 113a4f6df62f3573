"""Linear, Embedding and LmHead: operators with a single matrix.

Shapes: T tokens, K inputs, N outputs, V vocabulary, D hidden, R rows whose logits are computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.interfaces import AdaptedPart, MatrixWrapper, WeightReader
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator, freeze, read_rows
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, make_matrix, read_matrix

__all__ = ["Embedding", "Linear", "LmHead"]


class Linear(Operator):
    """``y = x W^T + b`` with W [N, K].

    Args:
        in_features: K.
        out_features: N.
        has_bias: True if the checkpoint has ``bias`` beside ``weight``.
        settings: how the matrix is stored and run.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        self.settings = settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``, and ``bias`` if there is one."""
        parts, size = [(name, self.out_features)], self.in_features
        self.matrix = read_matrix(
            self, "", reader, self.settings, parts, size, has_bias=self.has_bias
        )

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the matrix take LoRA adapters; return it by name."""
        self.matrix = matrix = wrapper.wrap_matrix(self.matrix)
        return {name: AdaptedRows(matrix, self.in_features, self.out_features)}

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return ``x W^T + b`` [..., N], new; a NaN in a row of ``x_TK`` stays in that row."""
        return self.matrix.forward(x_TK, dtype=x_TK.dtype)


class Embedding(Operator):
    """Rows of W [V, D] by token id, times ``scale``, which is rounded to the dtype of W.

    Args:
        vocab_size: V.
        hidden_size: D.
        scale: factor on the rows.
        stored: with a weight format, W keeps the checkpoint's codes in that format, and rows are
            decoded from them, bitwise as from the decoded matrix. Without one, W is a tensor.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float = 1.0,
        *,
        stored: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = scale
        self.stored = stored
        self.packed: PackedLinear | None = None
        """W in codes; None: W is the tensor ``weight``."""

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``, as codes or as a tensor."""
        self.scale = torch.tensor(self.scale, dtype=reader.dtype).item()
        self._dtype = reader.dtype
        if self.stored.weight_format is not None:
            parts = [(name, self.vocab_size)]
            matrix = read_matrix(self, "", reader, self.stored, parts, self.hidden_size)
            assert isinstance(matrix, PackedLinear), "one part in one format"
            self.packed = matrix
            return
        rows = [(f"{name}.weight", self.vocab_size)]
        self.weight = freeze(read_rows(reader, rows, self.hidden_size))

    def read_weight(self) -> Tensor:
        """Return W [V, D] in the model's dtype: the tensor itself, or a new one decoded
        from codes.
        """
        return self.weight if self.packed is None else self.packed.unpack().to(self._dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the rows of the tokens, [..., D], new.

        An id outside of [0, V) raises torch's ``IndexError``, or ``ShapeError`` if W is in codes.
        """
        if self.packed is None:
            found = functional.embedding(token_ids, self.weight)
        else:
            found = self.packed.take_rows(token_ids.flatten(), dtype=self._dtype)
            found = found.view(*token_ids.shape, self.hidden_size)
        return found if self.scale == 1.0 else found.mul_(self.scale)


class LmHead(Linear):
    """Projection of hidden states to the vocabulary; it may share the embedding's weight.

    Args:
        hidden_size: D.
        vocab_size: V.
        has_bias: True if the checkpoint has ``bias`` beside ``weight``.
        tied_to: returns the embedding whose weight is shared, at loading; None: the head has a
            weight of its own.
        soft_cap: a logit becomes cap * tanh(logit / cap); 0: no cap.
        scale: factor on the logits, before the cap.
        settings: how the matrix is stored and run; a packed head copies the embedding's weight,
            unless the embedding has codes of the same format.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        has_bias: bool = False,
        tied_to: Callable[[], nn.Module] | None = None,
        soft_cap: float = 0.0,
        scale: float = 1.0,
        settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__(hidden_size, vocab_size, has_bias=has_bias, settings=settings)
        self.soft_cap = soft_cap
        self.scale = scale
        self._tied_to = tied_to

    def load(self, reader: WeightReader, name: str) -> None:
        """Read ``weight``, or share the embedding's, which must be loaded before."""
        self._execution = reader.execution
        tied = None if self._tied_to is None else self._tied_to()
        codes = tied.packed if isinstance(tied, Embedding) else None
        if (
            codes is not None
            and codes.weight_format == self.settings.weight_format
            and not self.has_bias
        ):
            self.matrix = codes
            return
        # For a tied head, a reader finds the embedding's quantized codes under the head's name too:
        # they are read as the head's own.
        is_packed = self.settings.weight_format is not None
        if tied is None or (is_packed and reader.find_format(f"{name}.weight")):
            super().load(reader, name)
            return
        weight: Any = tied.read_weight() if isinstance(tied, Embedding) else tied.weight
        rows = [(f"{name}.bias", self.out_features)]
        bias = read_rows(reader, rows) if self.has_bias else None
        self.matrix = make_matrix(self, "", self.settings, weight, bias)

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Return no adapted parts: a head computes only some rows of a step, so it takes no
        adapters.
        """
        del wrapper, name
        return {}

    def forward(self, x_TK: Tensor) -> Tensor:
        """Return logits [..., V], new, float32: sums are not rounded to the model's dtype first."""
        logits = self.matrix.forward(x_TK, dtype=torch.float32)
        if self.scale != 1.0:
            logits *= self.scale
        if self.soft_cap:
            self._execution.soft_cap_(logits, self.soft_cap)
        return logits
