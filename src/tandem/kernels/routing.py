"""A step's choices of experts in all layers, and the experts whose output is deferred.

Deferral is a recurrence over the layers, for each token separately: of the experts that a layer
chose, those with the least weight are added one layer later,

    y_L = shared_L + immediate_L + deferred_{L-1},

with no ``deferred`` before the first layer and none from the last one. Only output tokens defer, so
prompts are computed as without deferral.

Shapes: T tokens, K experts per token, E experts, M layers that have experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.native import Buffer
from tandem.kernels.paged import PagedBatch, PagedKvCache

__all__ = ["MoeLayers", "StepRouting", "split_deferred"]


class MoeLayers(NamedTuple):
    """The layers of a model that have routed experts, all with equally many."""

    places: dict[int, int]
    """Index among the layers with experts, 0 to M - 1, by layer number."""
    num_layers: int
    """Layers of the model, those without experts included."""
    num_experts: int
    top_k: int
    num_deferred: int = 0
    """Number of an output token's experts whose sum is added one layer later."""


class StepRouting:
    """The experts chosen in one step, by layer, and which of them are deferred.

    Args:
        moe: the layers with experts.
        batch: the tokens; borrowed.
        cache: keeps the memory of choices for the next step with as many tokens.
        dtype: the model's dtype, by which the cache distinguishes its buffers.
    """

    def __init__(
        self, moe: MoeLayers, batch: PagedBatch, cache: PagedKvCache, dtype: torch.dtype
    ) -> None:
        buffers = cache.step_buffers(batch.num_tokens, dtype)
        key = ("choices", len(moe.places), moe.top_k)
        found: tuple[Tensor, list[Buffer]] | None = buffers.get(key)
        if found is None:
            shape = (len(moe.places), batch.num_tokens, moe.top_k)
            made = torch.empty(shape, dtype=torch.int64, device=batch.token_ids.device)
            found = buffers[key] = (made, [Buffer(layer_TK) for layer_TK in made])
        self._moe = moe
        self.choices, self._by_layer = found
        """Experts that each layer's router chose, int64 [M, T, K]; complete after the step."""
        self.layer_idx = -1
        """Number of the layer that is running."""
        self._late: Tensor | None = None
        self._output_T: Tensor | None = None
        if moe.num_deferred:
            output_T = batch.find_output_rows()
            device = batch.token_ids.device
            self._output_T = torch.from_numpy(output_T).to(device) if output_T.any() else None
        self.defers = self._output_T is not None
        """True if any token of the step defers experts."""

    def restart(self) -> None:
        """Prepare for the next step in the same memory: it begins with the first layer, and no
        expert's output is deferred.
        """
        self.layer_idx = -1
        self._late = None

    def set_outputs(self, rows_T: Tensor) -> None:
        """Set in place which tokens are of an answer and so defer experts; rows beyond ``rows_T``
        defer, too.
        """
        assert self._output_T is not None, "a step that defers nothing"
        self._output_T.fill_(True)
        self._output_T[: len(rows_T)] = rows_T

    def enter_layer(self) -> None:
        """Advance to the next layer of the model; call it before each, with or without experts."""
        self.layer_idx += 1

    def find_choices(self) -> Buffer:
        """Return the buffer into which the running layer's router writes its choice of experts, [T,
        K].
        """
        return self._by_layer[self._moe.places[self.layer_idx]]

    def split(self, ids_TK: Tensor, w_TK: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the layer's immediate and deferred choices, each with -1 in place of the others.

        The second is None if nothing is deferred: in the last layer, and in a step of prompts.
        """
        if self._output_T is None or self.layer_idx == self._moe.num_layers - 1:
            return ids_TK, None
        return split_deferred(ids_TK, w_TK, self._moe.num_deferred, self._output_T)

    def add_into_(
        self,
        residual_TD: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor], Tensor],
        x_TD: Tensor,
        immediate_TK: Tensor,
        late_TK: Tensor | None,
        w_TK: Tensor,
    ) -> None:
        """Add the immediate experts and the previous layer's deferred ones; defer this layer's late
        ones.
        """
        out = experts(x_TD, immediate_TK, w_TK)
        carried = self.take_carried()
        residual_TD += out if carried is None else out + carried
        if late_TK is not None:
            self.carry(experts(x_TD, late_TK, w_TK))

    def carry(self, late_TD: Tensor | None) -> None:
        """Keep the outputs' sum of a layer's deferred experts, which the next layer adds; None:
        nothing was deferred.
        """
        self._late = late_TD

    def take_carried(self) -> Tensor | None:
        """Return the sum of the experts that the previous layer deferred, once; None if there is
        none.
        """
        late, self._late = self._late, None
        return late


def split_deferred(
    ids_TK: Tensor, w_TK: Tensor, num_deferred: int, rows_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Split each token's choices into immediate ones and those with the least weight, added later.

    Args:
        ids_TK: expert ids, int64.
        w_TK: router weights; of equal ones the first in the row counts as larger.
        num_deferred: deferred experts of a token; K or more defers all.
        rows_T: bool, the tokens that defer at all.

    Returns: (immediate, deferred), both int64 [T, K], with -1 where a choice is in the other. A
        token's split depends on its own row alone.
    """
    num_kept = max(ids_TK.shape[1] - num_deferred, 0)
    order_TK = torch.argsort(w_TK, dim=1, descending=True, stable=True)
    is_late = torch.zeros(ids_TK.shape, dtype=torch.bool, device=ids_TK.device)
    is_late.scatter_(1, order_TK[:, num_kept:], value=True)
    is_late &= rows_T[:, None]
    return ids_TK.masked_fill(is_late, -1), ids_TK.masked_fill(~is_late, -1)
