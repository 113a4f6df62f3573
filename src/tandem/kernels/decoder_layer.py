"""A whole decoder layer as one short list of calls. Shapes: T tokens, D hidden."""

from torch import Tensor

from tandem.kernels.attention import Attention
from tandem.kernels.execution import Step
from tandem.kernels.mlp import Mlp
from tandem.kernels.moe import MoeBlock
from tandem.kernels.norm import RmsNorm
from tandem.kernels.operator import Operator, WeightReader

__all__ = ["DecoderLayer"]


class DecoderLayer(Operator):
    """norm, attention, residual, norm, MLP or MoE, residual; the parts keep their names.

    Module calls, keyword handling and temporaries between the parts are what a layer of the
    skeleton spends most of its time on when the batch is small; here the parts are called
    directly and add into the residual stream in place. How, is the business of the ``Step``.
    """

    def __init__(
        self,
        *,
        input_layernorm: RmsNorm,
        self_attn: Attention,
        post_attention_layernorm: RmsNorm,
        mlp: Mlp | MoeBlock,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        # Where no module has to search for them: that takes longer than some of the calls.
        self.parts = (input_layernorm, self_attn, post_attention_layernorm, mlp)

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts, being modules of their own, are loaded by name."""

    def forward(self, hidden_states: Tensor, *, tandem_step: Step, **_: object) -> Tensor:
        """The face of transformers' decoder layers: [1, T, D] in, [1, T, D] out, new."""
        x_TD = hidden_states[0].clone()
        tandem_step.run_layer_(self, x_TD)
        tandem_step.complete_(x_TD)
        return x_TD[None]
