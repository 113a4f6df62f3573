"""A decoder layer as one operator that calls its parts directly. Shapes: T tokens, D hidden."""

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
    """The parts of a decoder layer in order; each of the two branches may be normed.

    x += norm(attention(norm(x))), then x += norm(mlp(norm(x))).
    """

    attention_norm: RmsNorm | None
    attention: Attention | MlaAttention | GatedDelta | StateSpace
    attention_out_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: Mlp | MoeBlock
    mlp_out_norm: RmsNorm | None


class BesideExperts(NamedTuple):
    """Routed experts parallel to a layer's MLP: x += out_norm(mlp_norm(mlp) +
    experts_norm(experts)).
    """

    mlp_norm: RmsNorm
    router: Router
    norm: RmsNorm
    experts: RoutedExperts
    experts_norm: RmsNorm


class LayerInput(NamedTuple):
    """Parts that add a layer's additional input: x += norm(projection(f(gate(x)) * input))."""

    gate: Linear
    projection: Linear
    norm: RmsNorm
    activation: str


class DecoderLayer(Operator):
    """Decoder layer: norm, attention, norm, residual, norm, MLP or MoE, norm, residual.

    For small batches transformers' layers spend most of their time on module calls, keyword
    handling and temporaries. Here the parts are called directly and add to the residual stream in
    place; the ``Step`` decides how.

    Args:
        parts: the operators; the family decides which norms there are.
        names: the operators by their checkpoint names.
        scale_name: checkpoint name of the factor on the layer's output; empty: none.
        beside: routed experts parallel to the MLP.
        own_input: parts that add the layer's additional input.
        layer_idx: layer number, by which that input is selected.
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
        """Factor on the layer's output; None: 1."""
        self._scale_name = scale_name
        for name, module in names.items():
            self.add_module(name, module)
        # A plain attribute beside the registered modules: a look-up through nn.Module takes longer
        # than some of the operators.
        self.parts = parts

    @property
    def routed(self) -> tuple[Router, RoutedExperts] | None:
        """Router and routed experts of the layer, in its MLP's place or beside it; None: none."""
        if self.beside is not None:
            return self.beside.router, self.beside.experts
        return self.parts.mlp.operators if isinstance(self.parts.mlp, MoeBlock) else None

    @property
    def has_shared(self) -> bool:
        """True if ``Step.run_shared_`` has work in this layer: shared experts, or an MLP beside
        routed ones.
        """
        mlp = self.parts.mlp
        return self.beside is not None or (isinstance(mlp, MoeBlock) and mlp.shared is not None)

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the factor on the output, if there is one; the parts load themselves as modules."""
        if self._scale_name:
            # The factor stays a tensor on the device, so that no step waits for a copy to the host.
            self.scale_1 = torch.empty(1, dtype=reader.dtype, device=reader.device)
            reader.read_into(f"{name}.{self._scale_name}", self.scale_1)

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor | tuple[Tensor, None]:
        """Run the layer with transformers' interface: [1, T, D] in, [1, T, D] out, new.

        If transformers' layer also returns the tokens that an index chose, None is returned for
        them.
        """
        step, x_TD = current_step(), hidden_states[0].clone()
        step.run_layer_(self, x_TD)
        step.complete_(x_TD)
        mixer = self.parts.attention
        if isinstance(mixer, MlaAttention) and mixer.spec.gives_choice:
            return x_TD[None], None
        return x_TD[None]
