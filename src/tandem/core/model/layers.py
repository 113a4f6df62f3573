"""The parts of a model as plain data: what each operator computes, its sizes, the names it reads.

``tandem.models.planning.describe`` reads them off the modules of a skeleton, once; a ``ModelPlan``
carries them; serving and training build operators of them and decide nothing again. No torch here.

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
    """The function between gate, up and down: ``f(min(g, limit)) * (clamp(u, limit) + up_offset)``.

    The default is SwiGLU's. gpt-oss has ``Activation(alpha=1.702, limit=7.0, up_offset=1.0)``.
    """

    name: str = "silu"
    """``silu`` (``g * sigmoid(alpha * g)``), ``gelu`` (erf), ``gelu_tanh`` or ``relu2``, the square
    of the positive part."""
    alpha: float = 1.0
    """The factor within ``silu``'s sigmoid; positive."""
    limit: float | None = None
    """The gate is at most this, up at most this far from zero; positive, None is no limit."""
    up_offset: float = 0.0

    @property
    def bound(self) -> float:
        """The limit as a number: infinity for none."""
        return math.inf if self.limit is None else self.limit

    @property
    def is_plain(self) -> bool:
        """True if it is ``f(g) * u``, which dense MLPs run."""
        return self == Activation(self.name)


SILU = Activation()


class RoutingRule(msgspec.Struct, frozen=True):
    """From scores of all experts to the chosen ones and their weights."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = False
    """True if the weights of the chosen are scaled to sum to one."""
    num_groups: int = 1
    """Equal groups of experts, of which only the ``num_top_groups`` best count: those with the
    largest sum of their ``num_group_choices`` best choices."""
    num_top_groups: int = 1
    num_group_choices: Literal[1, 2] = 2
    weight_scale: float = 1.0
    """On the weights."""

    @property
    def native_scoring(self) -> str:
        """The native router's name of the first two."""
        return f"{self.scoring}_normalised" if self.is_normalised else self.scoring


SOFTMAX = RoutingRule()


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a rotary embedding; names as in a checkpoint's ``rope_parameters``."""

    head_dim: Annotated[int, Meta(ge=2)]
    """Items of a head that are rotated."""
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "proportional", "none"] = (
        "default"
    )
    """``none`` rotates nothing: all angles are 0. ``proportional`` has frequencies as if all of a
    head were rotated, of which the slow ones are 0."""
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
    """Frequencies of ``proportional`` that are not 0."""


class RotarySpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="rotary"):
    """The rotary embeddings of a model."""

    ropes: dict[str, RopeSpec]
    """By type of layer; one under the empty name where all layers share it. Layers that rotate
    nothing have the one under ``none``, the last."""
    is_half: bool = False
    """True if the module gives the angles of half a head, as gpt-oss's does."""


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
    """On the products of queries and keys."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    qk_norm: NormSpec | None = None
    """The norm of queries and keys, over each head, or over all together (its size is H d then)."""
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The checkpoint's projections: one for each of q, k and v, or one that holds them."""
    out_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    rope_idx: NonNegativeInt = 0
    """The RoPE of the layer, among those of the model."""
    interleaved_size: NonNegativeInt = 0
    """Items of a head that the checkpoint rotates as neighbours, from the first on."""
    window: NonNegativeInt = 0
    """Tokens that a token sees, itself included; 0 is all."""
    chunk: NonNegativeInt = 0
    """A token sees none before the last multiple of this up to its position; 0 is no border."""
    soft_cap: float = 0.0
    """A score becomes cap * tanh(score / cap); 0 is none."""
    has_sinks: bool = False
    """True if each head has a logit that takes weight and adds nothing."""
    position_scale: PositionScale | None = None
    """On queries, after they are rotated."""
    has_out_gate: bool = False
    """True if the projection of a head's queries gives as many more items, whose sigmoid multiplies
    the head's output."""
    has_value_norm: bool = False
    """True if each head's values are normed with the epsilon of ``qk_norm``, without a weight."""
    keys_are_values: bool = False
    """True if the values are the keys as they are projected, before norm and rotation."""
    shares_kv_of: Annotated[int, Meta(ge=-1)] = -1
    """Number of the layer whose keys and values it reads in place of its own; -1: it has own ones.
    Such a layer projects queries alone."""

    is_norm_plain: bool = False
    """True if the norm of queries and keys has no weight."""
    value_size: NonNegativeInt = 0
    """Items of a head's value, at most ``head_dim``; 0 is as many. Blocks hold ``head_dim``, the
    rest of which are zeros."""
    value_scale: float = 1.0
    """On values."""

    @property
    def value_dim(self) -> int:
        """Items of a head's value."""
        return self.value_size or self.head_dim

    @property
    def reach(self) -> int:
        """The most tokens that a token sees, itself included; 0 is all."""
        return self.window or self.chunk

    @property
    def is_rearranged(self) -> bool:
        """True if what is projected is not yet queries, keys and values of one size each."""
        return self.keys_are_values or self.value_dim < self.head_dim

    @property
    def num_projected(self) -> int:
        """Outputs of the projections: queries, gates of outputs, keys and values."""
        queries = self.num_heads * self.head_dim * (2 if self.has_out_gate else 1)
        if self.shares_kv_of >= 0:
            return queries
        values = 0 if self.keys_are_values else self.value_dim
        return queries + (self.head_dim + values) * self.num_kv_heads

    @property
    def is_full_norm(self) -> bool:
        """True if queries are normed over all heads together, not over each."""
        return self.qk_norm is not None and self.qk_norm.size != self.head_dim


class IndexSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The index by which attention chooses the tokens it attends to (DeepSeek Sparse Attention).

    A token's score is ``sum over heads of weight * relu(query . key)``; all heads share a key.
    """

    num_heads: PositiveInt
    dim: PositiveInt
    """Items of a query's head and of a key, of which the first are rotated."""
    norm_eps: float
    """The epsilon of the keys' LayerNorm."""
    is_interleaved: bool = False
    """True if the checkpoint's rotated items are pairs of neighbours."""

    @property
    def scale(self) -> float:
        """The factor on the scores: of the size of a head, and of their number."""
        return float(self.dim**-0.5 * self.num_heads**-0.5)


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mla"):
    """Multi-head latent attention of a layer; no key or value is expanded."""

    hidden_size: PositiveInt
    num_heads: PositiveInt
    rank: PositiveInt
    """Items of the latent that keys and values are made of."""
    rope: PositiveInt
    """Items of a query or key that are rotated; even."""
    nope: PositiveInt
    """Items of a query that are not rotated."""
    value: PositiveInt
    """Items of a head's value."""
    q_rank: NonNegativeInt = 0
    """Items of the queries' own compression; 0 is none."""
    scale: float
    """On the products, YaRN's correction included."""
    norm_eps: float
    """The epsilon of the norms of the latent and of compressed queries."""
    has_bias: bool = False
    """True if the first projections, but for uncompressed queries, and the output have biases."""
    is_interleaved: bool = True
    """True if the checkpoint's rotated items are pairs of neighbours."""
    rope_idx: NonNegativeInt = 0
    """The RoPE of the layer, among those of the model."""
    position_scale: PositionScale | None = None
    """On queries, after they are rotated."""
    top: NonNegativeInt = 0
    """Tokens that a token attends to, chosen by an index from itself and those before it; all of
    these where they are no more. 0 is all."""
    index: IndexSpec | None = None
    """The layer's own index. None with a ``top``: it attends to what the last layer with an index
    chose."""
    gives_choice: bool = False
    """True if transformers' layers return the choice beside the result."""

    @property
    def head(self) -> int:
        """Items of a query."""
        return self.nope + self.rope

    @property
    def key(self) -> int:
        """Items of a token in the cache."""
        return self.rank + self.rope

    @property
    def first_product(self) -> int:
        """Outputs of the first product for queries: compressed ones, or all heads'."""
        return self.q_rank or self.num_heads * self.head


class GatedDeltaSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gated_delta"
):
    """A gated delta rule (Gated DeltaNet) of a layer, which keeps a state in place of KV."""

    hidden_size: PositiveInt
    num_k_heads: PositiveInt
    num_v_heads: PositiveInt
    """A multiple of ``num_k_heads``: each key head serves as many consecutive value heads."""
    key_dim: PositiveInt
    """Items of a head's key."""
    value_dim: PositiveInt
    """Items of a head's value."""
    conv_width: PositiveInt
    """Inputs that an output of the short convolution sees."""
    norm_eps: float
    norm_offset: float = 0.0
    """Added to the weight of the norm of each head's output."""
    beta_scale: float = 1.0
    """The factor on the sigmoid that says how far an update goes."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """The function of z, on the normed output."""
    qkvz_names: tuple[str, ...]
    """The checkpoint's projections to queries, keys, values and z, one after the other."""
    ba_names: tuple[str, ...]
    """Those to b and a, the inputs of the gates."""
    is_by_key_head: bool = False
    """True if each of these has the rows of a key head together."""
    norm_name: str = "norm"
    out_name: str = "out_proj"

    @property
    def all_keys(self) -> int:
        """Items of the keys of all heads."""
        return self.num_k_heads * self.key_dim

    @property
    def all_values(self) -> int:
        """Items of the values of all heads."""
        return self.num_v_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.all_keys + self.all_values

    @property
    def state_sizes(self) -> StateSizes:
        """The sizes of the state."""
        return StateSizes(
            self.num_v_heads, self.key_dim, self.value_dim, self.num_channels, self.conv_width
        )


AttentionSpec = GqaSpec | MlaSpec
"""A mixer that keeps KV."""

StateMixerSpec = GatedDeltaSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec
"""A mixer that keeps a state in place of KV."""

MixerSpec = GqaSpec | MlaSpec | GatedDeltaSpec | KimiDeltaSpec | ShortConvSpec | Mamba2Spec
"""The part of a layer that mixes tokens."""


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """One matrix [N, K] and its bias."""

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False


class FrozenLinearSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frozen_linear"
):
    """One matrix [N, K] that is packed while adapters are trained, and its bias."""

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False


class FrozenGatedDeltaSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frozen_gated_delta"
):
    """A gated delta rule of transformers whose recurrence has a native gradient."""

    rule: GatedDeltaSpec | KimiDeltaSpec


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="head"):
    """The projection to the vocabulary."""

    in_features: PositiveInt
    out_features: PositiveInt
    has_bias: bool = False
    is_tied: bool = False
    """True if its weight is the embedding's."""
    soft_cap: float = 0.0
    """A logit becomes cap * tanh(logit / cap); 0 is none."""
    scale: float = 1.0
    """On the logits."""


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="embedding"):
    """Rows by token id."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    scale: float = 1.0


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mlp"):
    """A dense MLP, or the experts that every token uses."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    has_bias: bool = False
    activation: Activation | None = SILU
    """None where no operator of ours has the model's."""
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")
    """The checkpoint's: gate and up, or one matrix that holds both; up alone without a gate."""
    down_name: str = "down_proj"
    is_gated: bool = True
    """False if it is ``down(f(up(x)))``."""

    @property
    def num_up_rows(self) -> int:
        """Rows of gate and up together."""
        return (1 + self.is_gated) * self.intermediate_size


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="router"):
    """A linear score of each expert, and the rule that chooses by it."""

    hidden_size: PositiveInt
    num_experts: PositiveInt
    top_k: PositiveInt
    rule: RoutingRule = SOFTMAX
    has_bias: bool = False
    """True if the score has a bias, which counts for choice and weights."""
    norm_eps: float | None = None
    """Epsilon of an RMSNorm of the router's own input, whose weight is called ``scale``; None is no
    norm. The scores are of ``proj`` then, and are divided by the root of the hidden size."""
    has_expert_scale: bool = False
    """True if each expert has a factor on its weights, called ``per_expert_scale``."""
    choice_bias: str = ""
    """The checkpoint's name, below the router's parent, of a bias that counts for the choice alone;
    empty is none."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="experts"):
    """The routed experts of a layer."""

    num_experts: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """F of one expert."""
    activation: Activation = SILU
    has_bias: bool = False
    is_transposed: bool = False
    """True if the checkpoint holds inputs first: gate_up [E, D, 2 F], down [E, F, D], where the
    outputs of gate and up take turns."""
    has_halves: bool = False
    """True if, of such a checkpoint, those of gate come before those of up."""
    scales_input: bool = False
    """True if a router's weight multiplies an expert's input, not its output."""
    is_gated: bool = True
    """False if an expert is ``down(f(up(x)))``."""

    @property
    def gate_up_rows(self) -> tuple[slice, slice]:
        """The outputs of gate and of up among those of both in the checkpoint."""
        if self.is_transposed and not self.has_halves:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, self.intermediate_size), slice(self.intermediate_size, None)


class MoeBlockSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="moe_block"):
    """The parts of a block of experts, by the checkpoint's names."""

    gate_name: str
    shared_name: str = ""
    """The name of the experts that every token uses; empty is none."""
    shared_gate_name: str = ""
    """The name of a score whose sigmoid multiplies their output; empty is none."""
    is_pair: bool = False
    """True if the block returns its weights as well, as gpt-oss's layers want it."""


class DecoderLayerSpec(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="decoder_layer"
):
    """A whole layer, whose parts are operators of ours."""

    norms: tuple[str, str, str, str]
    """Names of the norms before and after attention, before and after the MLP; empty is none."""
    mixer_name: str = "self_attn"
    """The part that mixes tokens."""
    mlp_name: str = "mlp"
    scale_name: str = ""
    """The name of a factor on what the layer returns, one number; empty is none."""
    beside_norms: tuple[str, ...] = ()
    """Names of the norms after the MLP, before the experts and after them, where experts run beside
    the MLP on the same residual; their sum goes through the last of ``norms``. Empty is none."""
    input_norm: str = ""
    """The name of the norm after what the layer adds of an input of its own; empty is none."""
    input_activation: str = "silu"
    """On the gate of that input."""


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
"""Everything that an operator is built of, but the format of its weights."""
