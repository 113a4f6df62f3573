"""A whole decoder layer as one short list of calls. Shapes: T tokens, D hidden."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.operators.linear import Linear
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.operators.operator import Operator, current_step
from tandem.kernels.state_space.mixers import StateSpace

__all__ = ["BesideExperts", "DecoderLayer", "LayerInput", "LayerParts"]


class LayerParts(NamedTuple):
    """The parts that a layer runs, in order: two branches of the residual stream, each normed or
    not.

    x += norm(attention(norm(x))), then x += norm(mlp(norm(x))).
    """

    attention_norm: RmsNorm | None
    attention: Attention | MlaAttention | GatedDelta | StateSpace
    attention_out_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: Mlp | MoeBlock
    mlp_out_norm: RmsNorm | None


class BesideExperts(NamedTuple):
    """The experts that a layer runs beside its MLP: x += out(mlp_norm(mlp) + norm(experts))."""

    mlp_norm: RmsNorm
    router: Router
    norm: RmsNorm
    experts: RoutedExperts
    experts_norm: RmsNorm


class LayerInput(NamedTuple):
    """The parts that add an input of the layer's own: x += norm(projection(f(gate(x)) * input))."""

    gate: Linear
    projection: Linear
    norm: RmsNorm
    activation: str


class DecoderLayer(Operator):
    """norm, attention, norm, residual, norm, MLP or MoE, norm, residual.

    Module calls, keyword handling and temporaries between the parts are what a layer of the
    skeleton spends most of its time on when the batch is small; here the parts are called
    directly and add into the residual stream in place. How, is the business of the ``Step``.

    Args:
        parts: the operators; which norms there are depends on the family.
        names: what the checkpoint calls each of them.
        scale_name: what it calls the factor on the result; empty is none.
        beside: experts beside the MLP.
        own_input: what adds an input of the layer's own.
        layer_idx: number of the layer, whose input that is.
    """

    def __init__(
        self,
        parts: LayerParts,
        names: dict[str, Operator],
        scale_name: str = "",
        *,
        beside: BesideExperts | None = None,
        own_input: LayerInput | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__()
        self.beside = beside
        self.own_input = own_input
        self.layer_idx = layer_idx
        self.scale_1: Tensor | None = None
        """The factor on the layer's output; None: 1."""
        self._scale_name = scale_name
        for name, module in names.items():
            self.add_module(name, module)
        # A plain attribute beside the registered modules: a look-up through nn.Module takes longer
        # than some of the operators.
        self.parts = parts

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the factor, if there is one: the parts, being modules of their own, are loaded by
        name.
        """
        if self._scale_name:
            # The factor stays a tensor on the device, so that no step waits for a copy to the host.
            self.scale_1 = torch.empty(1, dtype=reader.dtype, device=reader.device)
            reader.read_into(f"{name}.{self._scale_name}", self.scale_1)

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor | tuple[Tensor, None]:
        """Run as transformers' decoder layers do: [1, T, D] in, [1, T, D] out, new.

        None stands for what an index chose, where transformers' layers return it.
        """
        step, x_TD = current_step(), hidden_states[0].clone()
        step.run_layer_(self, x_TD)
        step.complete_(x_TD)
        mixer = self.parts.attention
        if isinstance(mixer, MlaAttention) and mixer.spec.gives_choice:
            return x_TD[None], None
        return x_TD[None]
