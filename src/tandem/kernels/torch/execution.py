"""The operators' implementations in torch, on any device."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.kernels.native import Buffer
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.rope import Rope
from tandem.kernels.torch.step import TorchStep

if TYPE_CHECKING:
    from tandem.kernels.execution import Step

__all__ = ["TorchExecution"]


class TorchExecution:
    """See ``Execution``."""

    def begin_step(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        rope: Rope,
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
    ) -> "Step":
        """See ``Execution``."""
        return TorchStep(batch, cache, rope, dtype, on_layer)

    def norm(self, x_TD: Tensor, weight_D: Buffer, eps: float) -> Tensor:
        """See ``Execution``."""
        weight = weight_D.tensor
        return torch.rms_norm(x_TD, weight.shape, weight, eps)

    def route(self, logits_TE: Tensor, top_k: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
        """See ``Execution``."""
        if is_normalised:
            # The softmax over all, renormalised over K, is the softmax over the K best.
            best, ids = torch.topk(logits_TE, top_k, dim=-1)
            weights = torch.softmax(best, -1, dtype=torch.float32)
        else:
            weights = torch.softmax(logits_TE, -1, dtype=torch.float32)
            weights, ids = torch.topk(weights, top_k, dim=-1)
        return weights.to(logits_TE.dtype), ids
