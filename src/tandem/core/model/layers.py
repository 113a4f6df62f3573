"""The modules of a model as plain data: what each operator computes, its sizes, its tensors' names.

``tandem.models.planning.describe`` reads these specs once from the modules of a model skeleton. A
``ModelPlan`` carries them, and serving and training build operators from them without further
decisions. No torch here.

Shapes: D hidden, H query heads, K KV heads, d head_dim, F intermediate, E experts, N outputs.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.model.mixers import KimiDeltaSpec, Mamba2Spec, ShortConvSpec, StateSizes

__all__ = [
    "SILU",
    "SOFTMAX",
    "Activation",
    "AttentionSpec",
    "DecoderLayerSpec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "FrozenGatedDeltaSpec",
    "FrozenLinearSpec",
    "GatedDeltaSpec",
    "GqaSpec",
    "HeadSpec",
    "IndexSpec",
    "KimiDeltaSpec",
    "LayerNormSpec",
    "LinearSpec",
    "Mamba2Spec",
    "MixerSpec",
    "MlaSpec",
    "MlpSpec",
    "MoeBlockSpec",
    "NonNegativeInt",
    "NormSpec",
    "OperatorSpec",
    "PositionScale",
    "PositiveInt",
    "RopeSpec",
    "RotarySpec",
    "RouterSpec",
    "RoutingRule",
    "ShortConvSpec",
    "StateMixerSpec",
]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class Activation(msgspec.Struct, frozen=True):
    """The function of gate g and up u: ``f(min(g, limit)) * (clamp(u, limit) + up_offset)``.

    The default is SwiGLU's. gpt-oss has ``Activation(alpha=1.702, limit=7.0, up_offset=1.0)``.
    """

    name: str = "silu"
    """The function f: ``silu`` (``g * sigmoid(alpha * g)``), ``gelu`` (erf), ``gelu_tanh`` or
    ``relu2`` (the square of the positive part)."""
    alpha: float = 1.0
    """Factor inside the sigmoid of ``silu``; positive."""
    limit: float | None = None
    """Upper limit of the gate, and limit of up's absolute value; positive. None: no limit."""
    up_offset: float = 0.0

    @property
    def bound(self) -> float:
        """The limit of gate and up as a number; infinity if there is none."""
        return math.inf if self.limit is None else self.limit

    @property
    def is_plain(self) -> bool:
        """True if it is ``f(g) * u`` without limit, factor or offset, the form that dense MLPs
        support.
        """
        return self == Activation(self.name)


SILU = Activation()


class RoutingRule(msgspec.Struct, frozen=True):
    """The rule by which a router's scores give the chosen experts and their weights."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = False
    """True if the weights of the chosen experts are scaled to a sum of one."""
    num_groups: int = 1
    """Number of equal groups of experts. Only experts of the ``num_top_groups`` best groups can be
    chosen; a group's score is the sum of its ``num_group_choices`` best experts' scores."""
    num_top_groups: int = 1
    num_group_choices: Literal[1, 2] = 2
    weight_scale: float = 1.0
    """Factor on the weights of the chosen experts."""

    @property
    def native_scoring(self) -> str:
        """Name of ``scoring`` with ``is_normalised`` in the native router."""
        return f"{self.scoring}_normalised" if self.is_normalised else self.scoring


SOFTMAX = RoutingRule()


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a rotary embedding; names as in a checkpoint's ``rope_parameters``."""

    head_dim: Annotated[int, Meta(ge=2)]
    """Number of elements of a head that are rotated."""
    rope_type: Literal[
        "default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "none"
    ] = "default"
    """``none``: nothing is rotated; all angles are 0. ``proportional``: frequencies as if the whole
    head were rotated, with the slow ones replaced by 0. ``longrope``: each frequency has a divisor
    of its own."""
    rope_theta: Annotated[float, Meta(gt=0)] = 10000.0
    max_position_embeddings: PositiveInt = 2048
    factor: Annotated[float, Meta(gt=0)] = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: Annotated[float, Meta(ge=0)] | None = None
    beta_fast: Annotated[float, Meta(gt=0)] = 32.0
    beta_slow: Annotated[float, Meta(gt=0)] = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: Annotated[float, Meta(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Meta(gt=0)] = 4.0
    num_angles: NonNegativeInt = 0
    """Number of frequencies of ``proportional`` that are not 0."""
    short_factor: tuple[float, ...] = ()
    """Divisors of ``longrope``'s frequencies if all sequences end within
    ``original_max_position_embeddings``."""
    long_factor: tuple[float, ...] = ()
    """Divisors of ``longrope``'s frequencies, at all positions, if sequences may be longer."""
    is_long: bool = False
    """True if ``longrope`` divides by ``long_factor``: decided once, by the longest sequence that
    is served or trained, so that cached keys stay valid whatever the length of a sequence."""

    def serve(self, context: int) -> "RopeSpec":
        """Return the RoPE for sequences of up to ``context`` tokens."""
        if self.rope_type != "longrope":
            return self
        assert self.original_max_position_embeddings is not None, "described without it"
        is_long = context > self.original_max_position_embeddings
        return msgspec.structs.replace(self, is_long=is_long)


class RotarySpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="rotary"):
    """The rotary embeddings of a model, by type of layer."""

    ropes: dict[str, RopeSpec]
    """RoPE parameters by type of layer; under the empty name if all layers share them. If some
    layers rotate nothing, the last entry is ``none``."""
    is_half: bool = False
    """True if the module returns the angles of half a head only, as in gpt-oss."""


class NormSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="norm"):
    """An RMSNorm: ``x / rms(x) * (offset + weight)``."""

    size: PositiveInt
    eps: float
    offset: float = 0.0


class LayerNormSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="layer_norm"):
    """A LayerNorm: ``(x - mean(x)) / std(x) * (offset + weight) + bias``."""

    size: PositiveInt
    eps: float
    offset: float = 0.0
    has_bias: bool = False


class PositionScale(msgspec.Struct, frozen=True):
    """A factor on the queries of position p: ``1 + beta * log(1 + (p + offset) // length)``.

    Llama 4's temperature, which Ministral 3 has too.
    """

    beta: float
    length: PositiveInt
    offset: NonNegativeInt = 0


class GqaSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gqa"):
    """Grouped-query attention of a layer."""

    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    scale: float
    """Factor on the products of queries and keys."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    qk_norm: NormSpec | None = None
    """Norm of queries and of keys: over each head, or, if its size is H d, over all heads
    together."""
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of the checkpoint's projections: three, for q, k and v; or one that gives all three."""
    out_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    rope_idx: NonNegativeInt = 0
    """Index of the layer's RoPE among those of the model."""
    interleaved_size: NonNegativeInt = 0
    """Number of leading elements of a head that the checkpoint rotates as pairs of neighbours."""
    window: NonNegativeInt = 0
    """Number of tokens that a token attends to (sliding window), itself included; 0: all."""
    chunk: NonNegativeInt = 0
    """Length of chunked attention: a token attends to no token before the last multiple of it; 0:
    to all."""
    soft_cap: float = 0.0
    """Soft cap of scores: cap * tanh(score / cap); 0: none."""
    has_sinks: bool = False
    """True if each head has an attention sink: a logit in the softmax's sum that adds no value."""
    position_scale: PositionScale | None = None
    """Factor on queries that depends on the token's position, applied after RoPE; None: no factor.
    """
    has_out_gate: bool = False
    """True if the query projection gives twice as many outputs, the second half of which are gates:
    their sigmoid multiplies each head's output."""
    has_value_norm: bool = False
    """True if each head's values get an RMSNorm without weight, with the epsilon of ``qk_norm``."""
    keys_are_values: bool = False
    """True if the values are the projected keys, before norm and rotation."""
    shares_kv_of: Annotated[int, Meta(ge=-1)] = -1
    """Index of the layer whose keys and values this layer uses; it then projects queries only. -1:
    it has its own."""

    is_norm_plain: bool = False
    """True if the norm of queries and keys has no weight."""
    value_size: NonNegativeInt = 0
    """Number of elements of a head's value, if smaller than ``head_dim``; 0: ``head_dim``. Blocks
    store ``head_dim`` elements, filled up with zeros."""
    value_scale: float = 1.0
    """Factor on values."""

    @property
    def value_dim(self) -> int:
        """Number of elements of a head's value."""
        return self.value_size or self.head_dim

    @property
    def reach(self) -> int:
        """Largest number of tokens that a token attends to, itself included; 0: all."""
        return self.window or self.chunk

    @property
    def is_rearranged(self) -> bool:
        """True if the projections' outputs must be rearranged to queries, keys and values of one
        size.
        """
        return self.keys_are_values or self.value_dim < self.head_dim

    @property
    def num_projected(self) -> int:
        """Number of outputs of the layer's projections together: queries, output gates, keys and
        values.
        """
        queries = self.num_heads * self.head_dim * (2 if self.has_out_gate else 1)
        if self.shares_kv_of >= 0:
            return queries
        values = 0 if self.keys_are_values else self.value_dim
        return queries + (self.head_dim + values) * self.num_kv_heads

    @property
    def is_full_norm(self) -> bool:
        """True if queries are normalized over all heads together, not head by head."""
        return self.qk_norm is not None and self.qk_norm.size != self.head_dim


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The index of sparse attention, which chooses the tokens to attend to (DeepSeek Sparse
    Attention).

    A token's score is ``sum over heads of weight * relu(query . key)``; all heads share a key.
    """

    num_heads: PositiveInt
    dim: PositiveInt
    """Number of elements of a key, and of one head's query; the leading ones are rotated."""
    norm_eps: float
    """Epsilon of the keys' LayerNorm."""
    is_interleaved: bool = False
    """True if the checkpoint rotates pairs of neighbouring elements."""

    @property
    def scale(self) -> float:
        """Factor on the index's scores of tokens: 1 / sqrt(dim * num_heads)."""
        return float(self.dim**-0.5 * self.num_heads**-0.5)


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mla"):
    """Multi-head latent attention of a layer, computed on latents without expanding keys and
    values.
    """

    hidden_size: PositiveInt
    num_heads: PositiveInt
    rank: PositiveInt
    """Number of elements of the latent from which keys and values are made."""
    rope: PositiveInt
    """Number of elements of a query or key that are rotated; even."""
    nope: PositiveInt
    """Number of elements of a query that are not rotated."""
    value: PositiveInt
    """Number of elements of a head's value."""
    q_rank: NonNegativeInt = 0
    """Number of elements of the compressed query; 0: queries are not compressed."""
    scale: float
    """Factor on the products of queries and keys, YaRN's correction included."""
    norm_eps: float
    """Epsilon of the norms of the latent and of the compressed query."""
    has_bias: bool = False
    """True if the output projection and the first projections have biases; a query projection
    without compression has none."""
    is_interleaved: bool = True
    """True if the checkpoint rotates pairs of neighbouring elements."""
    rope_idx: NonNegativeInt = 0
    """Index of the layer's RoPE among those of the model."""
    position_scale: PositionScale | None = None
    """Factor on queries that depends on the token's position, applied after RoPE; None: no factor.
    """
    top: NonNegativeInt = 0
    """Number of tokens that a token attends to, chosen by an index among itself and earlier tokens;
    all of them if there are fewer. 0: always all."""
    index: IndexSpec | None = None
    """Index of this layer. None although ``top`` is not 0: the layer uses the choice of the last
    layer with an index."""
    gives_choice: bool = False
    """True if transformers' layer returns the chosen tokens beside its output."""

    @property
    def head(self) -> int:
        """Number of elements of one head's query."""
        return self.nope + self.rope

    @property
    def key(self) -> int:
        """Number of elements that one token has in the KV cache: the latent and the rotated
        part.
        """
        return self.rank + self.rope

    @property
    def first_product(self) -> int:
        """Number of outputs of the first query projection: the compressed query, or all heads'
        queries.
        """
        return self.q_rank or self.num_heads * self.head


class GatedDeltaSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gated_delta"
):
    """A gated delta rule (Gated DeltaNet) of a layer, which keeps a recurrent state instead of
    KV.
    """

    hidden_size: PositiveInt
    num_k_heads: PositiveInt
    num_v_heads: PositiveInt
    """Number of value heads, a multiple of ``num_k_heads``: each key head serves consecutive value
    heads."""
    key_dim: PositiveInt
    """Number of elements of a head's key."""
    value_dim: PositiveInt
    """Number of elements of a head's value."""
    conv_width: PositiveInt
    """Width of the short convolution: number of inputs per output."""
    norm_eps: float
    norm_offset: float = 0.0
    """Constant added to the weight of the norm of each head's output."""
    beta_scale: float = 1.0
    """Factor on the sigmoid of b, which is the strength of an update of the state."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Function of z, which multiplies the normed output."""
    qkvz_names: tuple[str, ...]
    """Names of the checkpoint's projections whose outputs are queries, keys, values and z, in this
    order."""
    ba_names: tuple[str, ...]
    """Names of the checkpoint's projections whose outputs are b and a, the inputs of the gates."""
    is_by_key_head: bool = False
    """True if the checkpoint's projections have the rows of one key head together."""
    norm_name: str = "norm"
    out_name: str = "out_proj"

    @property
    def all_keys(self) -> int:
        """Number of elements of all heads' keys."""
        return self.num_k_heads * self.key_dim

    @property
    def all_values(self) -> int:
        """Number of elements of all heads' values."""
        return self.num_v_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: all queries, keys and values."""
        return 2 * self.all_keys + self.all_values

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the layer's recurrent state."""
        return StateSizes(
            self.num_v_heads, self.key_dim, self.value_dim, self.num_channels, self.conv_width
        )


AttentionSpec = GqaSpec | MlaSpec
"""A token mixer that keeps KV."""

StateMixerSpec = GatedDeltaSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec
"""A token mixer that keeps a recurrent state instead of KV."""

MixerSpec = GqaSpec | MlaSpec | GatedDeltaSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec
"""The token mixer of a layer: attention or a recurrence."""


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """A linear layer: one matrix [N, K], and perhaps a bias."""

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False


class FrozenLinearSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frozen_linear"
):
    """A linear layer in training whose matrix [N, K] is packed and stays as it is, while LoRA
    adapters on it are trained; perhaps with bias.
    """

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False


class FrozenGatedDeltaSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frozen_gated_delta"
):
    """A gated delta rule in training that runs by transformers' module, whose recurrence has a
    native gradient.
    """

    rule: GatedDeltaSpec | KimiDeltaSpec


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="head"):
    """The projection of hidden states to logits."""

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False
    is_tied: bool = False
    """True if the head's weight matrix is the embedding table (tied weights)."""
    soft_cap: float = 0.0
    """Soft cap of logits: cap * tanh(logit / cap); 0: none."""
    scale: float = 1.0
    """Factor on the logits."""


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="embedding"):
    """A table of embeddings, one row for each token id."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    scale: float = 1.0


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mlp"):
    """A dense MLP, or the shared experts, which every token uses."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    has_bias: bool = False
    activation: Activation | None = SILU
    """Activation; None if no operator of ours implements the model's."""
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names of the checkpoint's projections: gate and up; one matrix for both; or, without a gate,
    up alone."""
    down_name: str = "down_proj"
    is_gated: bool = True
    """False if the MLP is ``down(f(up(x)))``."""

    @property
    def num_up_rows(self) -> int:
        """Number of rows of the gate and up matrices together."""
        return (1 + self.is_gated) * self.intermediate_size


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="router"):
    """A router: a linear score of each expert, and the rule that chooses by it."""

    hidden_size: PositiveInt
    num_experts: PositiveInt
    top_k: PositiveInt
    rule: RoutingRule = SOFTMAX
    has_bias: bool = False
    """True if the scores have a bias, which affects both choice and weights."""
    norm_eps: float | None = None
    """Epsilon of an RMSNorm on the router's input, whose weight is named ``scale``; None: no norm.
    With a norm, the scores are those of ``proj``, divided by the square root of the hidden size."""
    has_expert_scale: bool = False
    """True if each expert has a factor on its weight, named ``per_expert_scale``."""
    choice_bias: str = ""
    """The checkpoint's name, below the router's parent module, of a bias that affects the choice
    only; empty: none."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="experts"):
    """The routed experts of a layer."""

    num_experts: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """Intermediate size (F) of one expert."""
    activation: Activation = SILU
    has_bias: bool = False
    is_transposed: bool = False
    """True if the checkpoint stores matrices as [inputs, outputs]: gate_up [E, D, 2 F], down [E, F,
    D]. The outputs of gate and up then alternate, unless ``has_halves``."""
    has_halves: bool = False
    """True if, in a checkpoint with ``is_transposed``, all outputs of gate come before those of
    up."""
    scales_input: bool = False
    """True if a router's weight multiplies the expert's input and not its output."""
    is_gated: bool = True
    """False if an expert is ``down(f(up(x)))``."""

    @property
    def gate_up_rows(self) -> tuple[slice, slice]:
        """Positions of the gate's and of the up projection's outputs in the checkpoint's joint
        matrix.
        """
        if self.is_transposed and not self.has_halves:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, self.intermediate_size), slice(self.intermediate_size, None)


class MoeBlockSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="moe_block"):
    """The parts of a mixture-of-experts block, by their names in the checkpoint."""

    gate_name: str
    shared_name: str = ""
    """Name of the shared experts, which every token uses; empty: there are none."""
    shared_gate_name: str = ""
    """Name of a projection to one score, whose sigmoid multiplies the shared experts' output;
    empty: none."""
    is_pair: bool = False
    """True if the module returns a pair, its output and the router's weights, as the layers of
    gpt-oss expect.
    """


class DecoderLayerSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="decoder_layer"
):
    """A decoder layer all of whose parts run by operators of ours (not by transformers'
    modules).
    """

    norms: tuple[str, str, str, str]
    """Names of four norms: before and after attention, before and after the MLP; empty: no such
    norm."""
    mixer_name: str = "self_attn"
    """Name of the layer's attribute that holds the token mixer (attention or a recurrence)."""
    mlp_name: str = "mlp"
    scale_name: str = ""
    """Name of a scalar factor on the layer's output; empty: none."""
    beside_norms: tuple[str, ...] = ()
    """For experts that run beside the MLP on the same residual: names of the norms after the MLP,
    before the experts and after the experts. The sum of both goes through the last of ``norms``.
    Empty: none."""
    input_norm: str = ""
    """Name of the norm after the contribution of a per-layer input; empty: the layer has no such
    input."""
    input_activation: str = "silu"
    """Activation of the gate on the per-layer input."""


OperatorSpec = (
    RotarySpec
    | NormSpec
    | LayerNormSpec
    | GqaSpec
    | MlaSpec
    | GatedDeltaSpec
    | KimiDeltaSpec
    | ShortConvSpec
    | Mamba2Spec
    | LinearSpec
    | FrozenLinearSpec
    | FrozenGatedDeltaSpec
    | HeadSpec
    | EmbeddingSpec
    | MlpSpec
    | RouterSpec
    | ExpertsSpec
    | MoeBlockSpec
    | DecoderLayerSpec
)
"""Everything from which an operator is built, except the format of its weights."""
