"""From a module of the skeleton to our operator: the registry that rule files name.

A builder looks at the module that transformers made, not at the model's name, so any family whose
module has the common shape is taken; one that has not is refused with what is missing. Names that
the KTransformers documents use resolve to the operator here that does the same job.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tandem._native import ThreadPool
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.model_plan import NO_FORMAT, FormatChoice
from tandem.core.registry import Registry
from tandem.kernels.activation import SILU, Activation
from tandem.kernels.attention import Attention
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.decoder_layer import DecoderLayer
from tandem.kernels.experts import RoutedExperts
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.linear import Embedding, Linear, LmHead
from tandem.kernels.matrix import MatrixSettings
from tandem.kernels.mlp import Mlp
from tandem.kernels.moe import MoeBlock, Router
from tandem.kernels.norm import RmsNorm
from tandem.kernels.rope import Rope, RopeParameters
from tandem.kernels.torch.experts import Experts
from tandem.models.families import head_dim_of
from tandem.models.packed_cache import PackedCaches
from tandem.models.precision import choose_expert_parts
from tandem.models.stored import StoredModel
from tandem.placement.rules import DEFAULT, Rule

__all__ = [
    "OPERATORS",
    "BuildContext",
    "OperatorEntry",
    "WeightSettings",
    "make_rope_parameters",
    "parse_format",
    "resolve_operator",
]

DEVICE_KWARGS = ("generate_device", "prefill_device", "out_device", "device")
"""Keys whose value is a device; what runs on another device than asked is said in the report."""

FORMAT_KWARG = "format"
"""Weight format of an operator's matrices, by name; our own word in the grammar."""

KTRANSFORMERS_KWARGS = (
    *DEVICE_KWARGS,
    "generate_op",
    "prefill_op",
    "backend",
    "absorb_for_prefill",
    "chunck_size",
    "per_layer_prefill_intput_threshold",
    "transfer_map",
)
"""The keys of published rule files, misspelt as they are there. They choose among kernels and
devices that this build does not have; they are accepted and reported, not obeyed."""


class UnfitModuleError(Exception):
    """A module does not have the shape an operator needs; the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """How weights are stored and run where no rule says otherwise; None is as tensors."""

    pool: ThreadPool
    experts: WeightFormat | None = None
    linear: WeightFormat | None = None
    router: WeightFormat | None = None
    """Of the routers' scores, which choose: a format that loses nothing."""
    caches: PackedCaches | None = None
    """Where packed experts are kept between runs."""
    expert_parts: int = 0
    """Shares of packed experts; 0 is one for each NUMA node of the pool."""
    stored: StoredModel = field(default_factory=StoredModel)
    """What of the checkpoint may keep the format that it is stored in."""

    @classmethod
    def of_choices(
        cls,
        pool: ThreadPool,
        experts: FormatChoice,
        linear: FormatChoice,
        router: FormatChoice,
        *,
        caches: PackedCaches | None = None,
        expert_parts: int = 0,
        stored: StoredModel | None = None,
    ) -> "WeightSettings":
        """Return the settings that a plan's choices come to."""
        return cls(
            pool=pool,
            experts=parse_format(experts.weight_format),
            linear=parse_format(linear.weight_format),
            router=parse_format(router.weight_format),
            caches=caches,
            expert_parts=expert_parts,
            stored=stored or StoredModel(),
        )


def parse_format(name: str) -> WeightFormat | None:
    """Return the format of this name; None for tensors.

    Raises: NotFoundError.
    """
    return None if name == NO_FORMAT else find_format(name)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a builder may look at beside the module."""

    name: str
    """Dotted path of the module."""
    model: Any
    config: Any
    kwargs: dict[str, Any]
    """Of the rule."""
    settings: WeightSettings

    def choose_format(self, default: WeightFormat | None) -> WeightFormat | None:
        """Return the format that the rule asks for, that of the checkpoint, or the default."""
        wish = self.kwargs.get(FORMAT_KWARG)
        if wish is None:
            return self.settings.stored.find_format(self.name) or default
        return parse_format(wish)

    def choose_router_format(self) -> WeightFormat | None:
        """Return the format of a router's scores: never the checkpoint's, which may lose some."""
        wish = self.kwargs.get(FORMAT_KWARG)
        return self.settings.router if wish is None else parse_format(wish)

    def choose_matrix(self) -> MatrixSettings:
        """Return how a linear operator stores its matrices."""
        return MatrixSettings(self.choose_format(self.settings.linear), self.settings.pool)


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator as rule files see it."""

    name: str
    build: Callable[[Any, BuildContext], nn.Module]
    absorbs: bool = False
    """The operator replaces the module's children too, whatever other rules made of them."""
    takes_format: bool = False
    """Rules may give it a weight format."""
    is_optional: bool = False
    """A module it cannot take is left to the skeleton instead of being refused."""


def _require(module: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise UnfitModuleError(f"{type(module).__name__} has no {', '.join(missing)}")


def _has_bias(module: Any) -> bool:
    if isinstance(module, Linear):
        return module.has_bias
    return getattr(module, "bias", None) is not None


def _build_linear(module: Any, context: BuildContext) -> nn.Module:
    _require(module, "in_features", "out_features")
    if context.model.get_output_embeddings() is module:
        return _build_lm_head(module, context)
    return Linear(
        module.in_features,
        module.out_features,
        has_bias=_has_bias(module),
        settings=context.choose_matrix(),
    )


def _build_lm_head(module: Any, context: BuildContext) -> LmHead:
    _require(module, "in_features", "out_features")
    tied = context.model.get_input_embeddings if context.config.tie_word_embeddings else None
    return LmHead(
        module.in_features,
        module.out_features,
        has_bias=_has_bias(module),
        tied_to=tied,
        settings=context.choose_matrix(),
    )


def _build_embedding(module: Any, context: BuildContext) -> Embedding:
    del context
    _require(module, "num_embeddings", "embedding_dim")
    return Embedding(module.num_embeddings, module.embedding_dim)


def _norm_eps(module: Any) -> float:
    eps = getattr(module, "variance_epsilon", None)
    return module.eps if eps is None else eps


def _build_norm(module: Any, context: BuildContext) -> RmsNorm:
    del context
    _require(module, "weight", "variance_epsilon")
    # Gemma's norms multiply by 1 + weight under the same attributes.
    if "Gemma" in type(module).__name__:
        raise UnfitModuleError(f"{type(module).__name__} adds 1 to its weight")
    return RmsNorm(module.weight.shape[0], _norm_eps(module))


def make_rope_parameters(config: Any) -> RopeParameters:
    """Return the RoPE of a configuration that ``families`` accepted.

    Raises:
        ConfigError: a parameter is missing or out of bounds.
    """
    import msgspec

    raw = dict(config.rope_parameters)
    raw.pop("partial_rotary_factor", None)
    # Some published files carry keys of other scalings; only those that this type reads count.
    fields = {field.name for field in msgspec.structs.fields(RopeParameters)}
    known = {key: value for key, value in raw.items() if key in fields and value is not None}
    known["head_dim"] = head_dim_of(config)
    known["max_position_embeddings"] = config.max_position_embeddings
    try:
        return msgspec.convert(known, RopeParameters, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "models.check_config", f"rope_parameters: {error}", field="rope_parameters"
        ) from error


def _build_rope(module: Any, context: BuildContext) -> Rope:
    _require(module, "inv_freq", "rope_type")
    is_half = type(module).__name__ == "GptOssRotaryEmbedding"
    return Rope(make_rope_parameters(context.config), is_half=is_half)


def _build_attention(module: Any, context: BuildContext) -> Attention:
    _require(module, "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx", "scaling")
    q, k, o = module.q_proj, module.k_proj, module.o_proj
    if hasattr(module, "q_norm") != hasattr(module, "k_norm"):
        raise UnfitModuleError(f"{type(module).__name__} norms only one of q and k")
    return Attention(
        hidden_size=q.in_features,
        num_heads=q.out_features // module.head_dim,
        num_kv_heads=k.out_features // module.head_dim,
        head_dim=module.head_dim,
        layer_idx=module.layer_idx,
        scale=module.scaling,
        has_qkv_bias=_has_bias(q),
        has_o_bias=_has_bias(o),
        qk_norm_eps=_norm_eps(module.q_norm) if hasattr(module, "q_norm") else None,
        window=getattr(module, "sliding_window", None) or 0,
        has_sinks=hasattr(module, "sinks"),
        settings=context.choose_matrix(),
    )


def _build_mlp(module: Any, context: BuildContext) -> Mlp:
    _require(module, "gate_proj", "up_proj", "down_proj")
    if context.config.hidden_act not in ("silu", "swish"):
        raise UnfitModuleError(f"its activation is {context.config.hidden_act}")
    gate = module.gate_proj
    return Mlp(
        gate.in_features,
        gate.out_features,
        has_bias=_has_bias(gate),
        settings=context.choose_matrix(),
    )


def _build_router(module: Any, context: BuildContext) -> Router:
    _require(module, "weight", "top_k", "num_experts")
    is_gpt_oss = type(module).__name__ == "GptOssTopKRouter"
    if not is_gpt_oss:
        _require(module, "norm_topk_prob")
    if hasattr(module, "e_score_correction_bias") or hasattr(module, "n_group"):
        raise UnfitModuleError(f"{type(module).__name__} chooses by groups or with a bias")
    return Router(
        module.weight.shape[1],
        module.num_experts,
        module.top_k,
        # gpt-oss's softmax is over the chosen.
        is_normalised=is_gpt_oss or bool(module.norm_topk_prob),
        has_bias=_has_bias(module),
        settings=MatrixSettings(context.choose_router_format(), context.settings.pool),
    )


def _build_experts(module: Any, context: BuildContext) -> RoutedExperts:
    _require(module, "gate_up_proj", "down_proj")
    if context.config.hidden_act not in ("silu", "swish"):
        raise UnfitModuleError(f"its activation is {context.config.hidden_act}")
    count, *sizes = module.down_proj.shape
    hidden, inner = sizes
    activation, is_transposed = SILU, type(module).__name__ == "GptOssExperts"
    if is_transposed:
        inner, hidden = sizes
        activation = Activation(alpha=module.alpha, limit=module.limit, up_offset=1.0)
    has_bias = hasattr(module, "down_proj_bias")
    settings = context.settings
    weight_format = context.choose_format(settings.experts)
    if weight_format is None:
        return Experts(
            count,
            hidden,
            inner,
            activation=activation,
            has_bias=has_bias,
            is_transposed=is_transposed,
        )
    cache = None if settings.caches is None else settings.caches.open(weight_format.name)
    return NativeExperts(
        count,
        hidden,
        inner,
        weight_format=weight_format,
        pool=settings.pool,
        activation=activation,
        has_bias=has_bias,
        is_transposed=is_transposed,
        cache=cache,
        num_parts=choose_expert_parts(settings.expert_parts, len(settings.pool.node_ids), inner),
    )


def _build_moe_block(module: Any, context: BuildContext) -> MoeBlock:
    del context
    is_gpt_oss = type(module).__name__ == "GptOssMLP"
    gate = "router" if is_gpt_oss else "gate"
    _require(module, gate, "experts")
    extra = [name for name, _ in module.named_children() if name not in (gate, "experts")]
    if extra:
        raise UnfitModuleError(f"{type(module).__name__} also has {', '.join(extra)}")
    router = getattr(module, gate)
    return MoeBlock(router, module.experts, gate_name=gate, is_pair=is_gpt_oss)


def _build_decoder_layer(module: Any, context: BuildContext) -> DecoderLayer:
    del context
    parts = {
        "input_layernorm": RmsNorm,
        "self_attn": Attention,
        "post_attention_layernorm": RmsNorm,
        "mlp": (Mlp, MoeBlock),
    }
    _require(module, *parts)
    extra = [name for name, _ in module.named_children() if name not in parts]
    if extra:
        raise UnfitModuleError(f"{type(module).__name__} also has {', '.join(extra)}")
    for name, kind in parts.items():
        part = getattr(module, name)
        if not isinstance(part, kind) or (isinstance(part, MoeBlock) and not part.is_fusable):
            raise UnfitModuleError(f"{name} is not all operators of ours")
    return DecoderLayer(**{name: getattr(module, name) for name in parts})


def _keep(module: Any, context: BuildContext) -> nn.Module:
    del context
    return module


OPERATORS: Registry[OperatorEntry] = Registry("operator")
"""What ``replace: {class: ...}`` may name."""

_ALIASES = {
    "Linear": ("KTransformersLinear",),
    "Experts": ("KTransformersExperts", "KTransformersExpertsV2"),
    "MoeBlock": (
        "KQwen3MoeSparseMoeBlock",
        "KQwen3MoeSparseMoeBlockV2",
        "KQwen2MoeSparseMoeBlock",
        "KMistralSparseMoEBlock",
    ),
    "Router": ("KMoEGateQwen2Moe",),
    "Attention": ("KQwen3MoeAttention", "KQwen2MoeAttention", "KLlamaAttention"),
    "RmsNorm": ("KQwen3MoeRMSNorm", "KQwen2MoeRMSNorm", "RMSNorm"),
    "Mlp": ("KQwen2MoeMLP",),
    "Rope": (
        "RotaryEmbedding",
        "RotaryEmbeddingV2",
        "YarnRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "KQwen3MoeRotaryEmbedding",
    ),
    DEFAULT: ("KQwen2MoeModel", "KQwen3MoeModel", "KLlamaModel"),
}
"""Names of the KTransformers documents. Its model classes move hidden states between devices and
prefill layer by layer; here the step does that, so the module itself is kept."""

ABSENT = frozenset(
    {
        "KDeepseekV2Attention",
        "KDeepseekV2Model",
        "KDeepseekV2MoE",
        "KDeepseekV3MoE",
        "KDeepseekV3MoEV2",
        "kDeepseekV3MLP",
        "DeepseekV3RMSNormTorch",
        "KDeepseekRMSNormIPEXLLM",
        "flashinfer_attn",
        "deepseek_torch_attn",
        "KMoEGate",
        "KMoEGateIPEXLLM",
        "RotaryEmbeddingV3",
        "RotaryEmbeddingV4",
        "YarnRotaryEmbeddingV3",
        "KGlm4MoeMoE",
        "KGlm4Experts",
        "KGlm4MoeAttention",
        "KGlm4MoeRMSNorm",
        "KGlm4MoeMLP",
        "KGlm4MoeRotaryEmbedding",
        "KQwen3NextSparseMoeBlockV2",
        "KQwen3NextAttention",
        "KQwen3NextGatedDeltaNet",
        "KQwen3NextRMSNorm",
        "KSmallthinkerMoeBlock",
        "KSmallthinkerExperts",
        "KSmallthinkerAttention",
        "KSmallthinkerRMSNorm",
        "KSmallthinkerDenseMlpBlock",
        "KSmallthinkerRotaryEmbedding",
        "KQwen3MoeAttentionIPEXLLM",
    }
)
"""Names of the KTransformers documents for model families that have no operator here."""

for _entry in (
    OperatorEntry("Linear", _build_linear, takes_format=True),
    OperatorEntry("Embedding", _build_embedding),
    OperatorEntry("LmHead", _build_lm_head, takes_format=True),
    OperatorEntry("RmsNorm", _build_norm),
    OperatorEntry("Rope", _build_rope),
    OperatorEntry("Attention", _build_attention, absorbs=True, takes_format=True),
    OperatorEntry("Mlp", _build_mlp, absorbs=True, takes_format=True),
    OperatorEntry("Router", _build_router),
    OperatorEntry("Experts", _build_experts, absorbs=True, takes_format=True),
    OperatorEntry("MoeBlock", _build_moe_block),
    OperatorEntry("DecoderLayer", _build_decoder_layer, is_optional=True),
    OperatorEntry(DEFAULT, _keep),
):
    OPERATORS.add(_entry.name, _entry, aliases=_ALIASES.get(_entry.name, ()))


def resolve_operator(rule: Rule) -> OperatorEntry | None:
    """Return the operator that a rule names; None for a known name without operator here.

    Raises:
        ConfigError: an unknown operator, or an argument that operators do not take.
    """
    known = {*KTRANSFORMERS_KWARGS, FORMAT_KWARG}
    unknown = sorted(rule.kwargs.keys() - known)
    if unknown:
        raise ConfigError(
            "models.resolve_rules",
            f"{rule.place}: unknown kwargs {', '.join(unknown)}: known are "
            f"{', '.join(sorted(known))}",
            field="replace.kwargs",
        )
    name = rule.operator
    if name.startswith("ktransformers."):
        name = name.rpartition(".")[2]
    if name in ABSENT:
        return None
    entry = OPERATORS.resolve(name, where=f"{rule.place}", field="replace.class")
    if FORMAT_KWARG in rule.kwargs:
        _check_format(rule, entry)
    return entry


def _check_format(rule: Rule, entry: OperatorEntry) -> None:
    wish, field = str(rule.kwargs[FORMAT_KWARG]), f"replace.kwargs.{FORMAT_KWARG}"
    where = "models.resolve_rules"
    if not entry.takes_format:
        what = f"{rule.place}: {entry.name} takes no weight format"
        raise ConfigError(where, what, field=field)
    if wish != NO_FORMAT:
        try:
            find_format(wish)
        except NotFoundError as error:
            raise ConfigError(where, f"{rule.place}: {error.what}", field=field) from None
