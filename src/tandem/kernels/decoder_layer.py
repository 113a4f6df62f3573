"""A whole decoder layer as one short list of calls. Shapes: T tokens, D hidden."""

from torch import Tensor

from tandem.kernels.attention import Attention
from tandem.kernels.mlp import Mlp
from tandem.kernels.moe import MoeBlock
from tandem.kernels.norm import RmsNorm
from tandem.kernels.operator import Operator, WeightReader
from tandem.kernels.step import PagedStep

__all__ = ["DecoderLayer"]


class DecoderLayer(Operator):
    """norm, attention, residual, norm, MLP or MoE, residual; the parts keep their names.

    Module calls, keyword handling and temporaries between the parts are what a layer of the
    skeleton spends most of its time on when the batch is small; here the parts are called
    directly and add into the residual stream in place. On the CPU all but the matrix products are
    native calls on buffers that the step keeps.
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
        self._parts = (input_layernorm, self_attn, post_attention_layernorm, mlp)

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the parts, being modules of their own, are loaded by name."""

    def run_(self, x_TD: Tensor, step: PagedStep) -> None:
        """Run the layer on the residual stream ``x_TD``, in place; writes the step's KV.

        Natively what it adds last may be left to the next layer's norm: ``complete_`` says the end.
        """
        first_norm, attention, second_norm, mlp = self._parts
        native = step.native
        if native is None:
            attention.project_into_(x_TD, attention.mix(first_norm(x_TD), step))
            mlp.add_into_(x_TD, second_norm(x_TD))
            return
        x, h = native.view_residual(x_TD), native.buffer("normed", first_norm.size)
        pending = native.take_pending()
        if pending is None:
            first_norm.run(x.view, h.view, native.pool)
        else:
            first_norm.run(pending.view, h.view, native.pool, x.view)
        attention.add_natively(x, h, native)
        second_norm.run(x.view, h.view, native.pool)
        mlp.add_natively(x, h, native)

    @staticmethod
    def complete_(x_TD: Tensor, step: PagedStep) -> None:
        """Add what the last layer left to a next one, if it did, to the residual stream."""
        pending = None if step.native is None else step.native.take_pending()
        if pending is not None:
            x_TD += pending.tensor

    def forward(self, hidden_states: Tensor, *, tandem_step: PagedStep, **_: object) -> Tensor:
        """The face of transformers' decoder layers: [1, T, D] in, [1, T, D] out, new."""
        x_TD = hidden_states[0].clone()
        self.run_(x_TD, tandem_step)
        self.complete_(x_TD, tandem_step)
        return x_TD[None]
