"""From a module of the skeleton to our operator: one builder for each operator.

A builder looks at the parts of the module that transformers made (``roles``) and at what it
computes (``probes``), not at its name, so any family whose module has the common shape is taken;
one that has not is refused with what is missing.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from tandem._native import ThreadPool
from tandem.core.errors import ConfigError
from tandem.core.model_plan import NO_FORMAT, FormatChoice
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import DecoderLayer, LayerParts
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.linear import Embedding, Linear, LmHead
from tandem.kernels.operators.mla import MlaAttention, MlaSizes
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.operators.operator import Operator
from tandem.kernels.operators.rope import LayeredRope, Rope, RopeParameters
from tandem.kernels.torch.experts import Experts
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.kernels.weights.matrix import MatrixSettings
from tandem.models.families.deepseek import has_interleaved_latents
from tandem.models.families.gpt_oss import PAIR_BLOCK
from tandem.models.loading.packed_cache import PackedCaches
from tandem.models.planning.precision import choose_expert_parts
from tandem.models.planning.probes import (
    AttentionCall,
    UnfitModuleError,
    find_activation,
    find_expert_activation,
    find_layer_type,
    find_norm_offset,
    find_routing,
    gives_whole_angles,
    read_frequencies,
)
from tandem.models.planning.roles import (
    LAYER_NORMS,
    count_kv_heads,
    find_gate_up,
    find_projections,
    has_layered_rope,
)
from tandem.models.planning.stored import StoredModel

__all__ = [
    "FORMAT_KWARG",
    "KEEPS_CODES_KWARG",
    "BuildContext",
    "UnfitModuleError",
    "WeightSettings",
    "build_attention",
    "build_decoder_layer",
    "build_embedding",
    "build_experts",
    "build_linear",
    "build_lm_head",
    "build_mla_attention",
    "build_mlp",
    "build_moe_block",
    "build_norm",
    "build_rope",
    "build_router",
    "find_ropes",
    "list_rope_names",
    "parse_format",
]

FORMAT_KWARG = "format"
"""Weight format of an operator's matrices, by name; our own word in the grammar."""

KEEPS_CODES_KWARG = "keeps_codes"
"""What a plan, not a rule, says of a module: see ``ModulePlan.keeps_codes``."""


ANGLE_TOLERANCE = 1e-5
"""Between two orders of computing frequencies in float32, relative."""


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
    attentions: dict[str, AttentionCall | str]
    """See ``roles.observe_attentions``."""

    def choose_format(self, default: WeightFormat | None) -> WeightFormat | None:
        """Return the format that the rule asks for, that of the checkpoint, or the default."""
        wish = self.kwargs.get(FORMAT_KWARG)
        if wish is None:
            return self.settings.stored.find_format(self.name) or default
        return parse_format(wish)

    def choose_matrix(self) -> MatrixSettings:
        """Return how a linear operator stores its matrices."""
        return MatrixSettings(
            self.choose_format(self.settings.linear), self.settings.pool, self._keeps_codes()
        )

    def _keeps_codes(self) -> bool:
        """Whether each matrix of the module has a format of its own, that of its codes."""
        if FORMAT_KWARG not in self.kwargs:
            return self.settings.stored.is_mixed(self.name)
        return bool(self.kwargs.get(KEEPS_CODES_KWARG, False))

    def choose_router(self) -> MatrixSettings:
        """Return how an operator stores a matrix of scores, which choose.

        Not as the checkpoint has it: our products of codes have coded activations too.
        """
        wish = self.kwargs.get(FORMAT_KWARG)
        weight_format = self.settings.router if wish is None else parse_format(wish)
        return MatrixSettings(weight_format, self.settings.pool)


def _require(module: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise UnfitModuleError(f"{type(module).__name__} has no {', '.join(missing)}")


def _has_bias(module: Any) -> bool:
    if isinstance(module, Linear):
        return module.has_bias
    return getattr(module, "bias", None) is not None


def build_linear(module: Any, context: BuildContext) -> nn.Module:
    """Build ``Linear``, or ``LmHead`` for the model's head."""
    _require(module, "in_features", "out_features")
    if context.model.get_output_embeddings() is module:
        return build_lm_head(module, context)
    # One output is a score, which like a router's is not stored in less.
    is_score = module.out_features == 1
    return Linear(
        module.in_features,
        module.out_features,
        has_bias=_has_bias(module),
        settings=context.choose_router() if is_score else context.choose_matrix(),
    )


def build_lm_head(module: Any, context: BuildContext) -> LmHead:
    """Build ``LmHead``."""
    _require(module, "in_features", "out_features")
    tied = context.model.get_input_embeddings if context.config.tie_word_embeddings else None
    return LmHead(
        module.in_features,
        module.out_features,
        has_bias=_has_bias(module),
        tied_to=tied,
        soft_cap=getattr(context.config, "final_logit_softcapping", None) or 0.0,
        settings=context.choose_matrix(),
    )


def build_embedding(module: Any, context: BuildContext) -> Embedding:
    """Build ``Embedding``."""
    del context
    _require(module, "num_embeddings", "embedding_dim")
    if not isinstance(module, nn.Embedding):
        raise UnfitModuleError(f"{type(module).__name__} is no embedding")
    if module.max_norm is not None:
        raise UnfitModuleError(f"{type(module).__name__} bounds its rows")
    scale = getattr(module, "scalar_embed_scale", 1.0)
    return Embedding(module.num_embeddings, module.embedding_dim, float(scale))


def _norm_eps(module: Any) -> float:
    if isinstance(module, RmsNorm):
        return module.eps
    eps = getattr(module, "variance_epsilon", None)
    return module.eps if eps is None else eps


def _norm_offset(module: Any) -> float:
    return module.offset if isinstance(module, RmsNorm) else _probe_norm(type(module), module)


_NORM_OFFSETS: dict[type, float] = {}
"""By class, as each has many norms that differ in size alone."""


def _probe_norm(kind: type, module: nn.Module) -> float:
    if kind not in _NORM_OFFSETS:
        _NORM_OFFSETS[kind] = find_norm_offset(module)
    return _NORM_OFFSETS[kind]


def build_norm(module: Any, context: BuildContext) -> RmsNorm:
    """Build ``RmsNorm``."""
    del context
    _require(module, "weight")
    if not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        raise UnfitModuleError(f"{type(module).__name__} is not an RMSNorm")
    return RmsNorm(module.weight.shape[0], _norm_eps(module), _norm_offset(module))


def list_rope_names(config: Any) -> list[str]:
    """Return the types of layers that have a RoPE of their own; one empty name if all share it."""
    return sorted(set(config.layer_types)) if has_layered_rope(config) else [""]


def _make_rope(module: Any, config: Any, name: str, *, is_half: bool = False) -> Rope:
    """Make the RoPE of a type of layer, and see that its angles are those of the module.

    Classes differ in which fields they read: some rotate a part of a head where the configuration
    asks for it, others all of it. Therefore the module tells how many items it rotates.
    """
    inv_freq, attention_factor = read_frequencies(module, name)
    raw: dict[str, Any] = config.rope_parameters[name] if name else config.rope_parameters
    # Some published files carry keys of other scalings; only those that this type reads count.
    fields = {field.name for field in msgspec.structs.fields(RopeParameters)}
    known = {key: value for key, value in raw.items() if key in fields and value is not None}
    known["head_dim"] = 2 * len(inv_freq)
    known["max_position_embeddings"] = config.max_position_embeddings
    try:
        rope = Rope(msgspec.convert(known, RopeParameters, strict=False), is_half=is_half)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "models.check_config", f"rope_parameters: {error}", field="rope_parameters"
        ) from error
    theirs = torch.cat((inv_freq, torch.tensor([attention_factor])))
    ours = torch.cat((rope.inv_freq, torch.tensor([rope.attention_factor])))
    # Slow frequencies are small numbers, so that only their ratio tells.
    if not torch.allclose(ours, theirs, rtol=ANGLE_TOLERANCE, atol=0):
        raise UnfitModuleError(f"{type(module).__name__} has other angles than rope_parameters say")
    return rope


def build_rope(module: Any, context: BuildContext) -> Operator:
    """Build ``Rope``, or ``LayeredRope`` where it depends on the layer."""
    _require(module, "rope_type")
    names = list_rope_names(context.config)
    if names != [""]:
        return LayeredRope({name: _make_rope(module, context.config, name) for name in names})
    _require(module, "inv_freq")
    return _make_rope(module, context.config, "", is_half=not gives_whole_angles(module))


def find_ropes(module: Any, config: Any) -> tuple[Rope, ...]:
    """Return the RoPEs of a model, by ``rope_idx`` of its layers.

    Those of the operator, or, where a rule keeps transformers' module, new ones with its angles:
    attentions that are replaced take theirs from the step.
    """
    if isinstance(module, Rope | LayeredRope):
        return module.ropes
    return tuple(_make_rope(module, config, name) for name in list_rope_names(config))


def _find_rope_idx(module: Any, context: BuildContext) -> int:
    names = list_rope_names(context.config)
    return 0 if names == [""] else names.index(find_layer_type(module, context.config))


def build_attention(module: Any, context: BuildContext) -> Attention:
    """Build ``Attention``."""
    _require(module, "o_proj", "head_dim", "layer_idx")
    names = find_projections(module)
    if not names:
        raise UnfitModuleError(f"{type(module).__name__} has no q_proj, k_proj, v_proj")
    if getattr(context.config, "clip_qkv", None) is not None:
        raise UnfitModuleError(f"{type(module).__name__} clips q, k and v")
    if not getattr(module, "is_causal", True):
        raise UnfitModuleError(f"{type(module).__name__} sees later tokens")
    if hasattr(module, "q_norm") != hasattr(module, "k_norm"):
        raise UnfitModuleError(f"{type(module).__name__} norms only one of q and k")
    call = context.attentions.get(context.name, "it was not there before the rules")
    if isinstance(call, str):
        raise UnfitModuleError(call)
    first, output = getattr(module, names[0]), module.o_proj
    d, heads = module.head_dim, output.in_features // module.head_dim
    norm = getattr(module, "q_norm", None)
    norm_size = 0 if norm is None else norm.size if isinstance(norm, RmsNorm) else len(norm.weight)
    if norm_size not in (0, d, heads * d):
        raise UnfitModuleError(f"{type(module).__name__} norms {norm_size} items of q")
    return Attention(
        hidden_size=first.in_features,
        num_heads=heads,
        num_kv_heads=count_kv_heads(module, names),
        head_dim=d,
        layer_idx=module.layer_idx,
        scale=call.scale,
        has_qkv_bias=_has_bias(first),
        has_o_bias=_has_bias(output),
        qk_norm_eps=None if norm is None else _norm_eps(norm),
        qk_norm_offset=0.0 if norm is None else _norm_offset(norm),
        is_full_norm=norm is not None and norm_size != d,
        qkv_names=names,
        rope_idx=_find_rope_idx(module, context),
        interleaved_size=call.interleaved_size,
        window=call.rule.window,
        soft_cap=call.rule.soft_cap,
        has_sinks=call.rule.sinks is not None,
        settings=context.choose_matrix(),
    )


def build_mla_attention(module: Any, context: BuildContext) -> MlaAttention:
    """Build ``MlaAttention``."""
    _require(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "scaling")
    q_norm = getattr(module, "q_a_layernorm", None)
    norm_eps = _norm_eps(module.kv_a_layernorm)
    if q_norm is not None and _norm_eps(q_norm) != norm_eps:
        raise UnfitModuleError(f"{type(module).__name__} has norms of two epsilons")
    if _has_bias(module.kv_b_proj):
        raise UnfitModuleError(f"{type(module).__name__} has a bias on what is absorbed")
    sizes = MlaSizes(
        num_heads=module.num_heads,
        rank=module.kv_lora_rank,
        rope=module.qk_rope_head_dim,
        nope=module.qk_nope_head_dim,
        value=module.v_head_dim,
        q_rank=module.q_lora_rank or 0,
    )
    return MlaAttention(
        hidden_size=module.o_proj.out_features,
        sizes=sizes,
        layer_idx=module.layer_idx,
        scale=module.scaling,
        norm_eps=norm_eps,
        has_bias=_has_bias(module.kv_a_proj_with_mqa),
        is_interleaved=has_interleaved_latents(context.config),
        rope_idx=_find_rope_idx(module, context),
        settings=context.choose_matrix(),
    )


def build_mlp(module: Any, context: BuildContext) -> Mlp:
    """Build ``Mlp``."""
    names = find_gate_up(module)
    if not names:
        raise UnfitModuleError(f"{type(module).__name__} has no gate_proj, up_proj, down_proj")
    down = module.down_proj
    return Mlp(
        down.out_features,
        down.in_features,
        has_bias=_has_bias(down),
        activation=find_activation(module),
        gate_up_names=names,
        settings=context.choose_matrix(),
    )


def _find_parent(name: str, context: BuildContext) -> Any:
    return context.model.get_submodule(name.rpartition(".")[0])


def build_router(module: Any, context: BuildContext) -> Router:
    """Build ``Router``."""
    _require(module, "weight", "top_k")
    parent, own = _find_parent(context.name, context), context.name.rpartition(".")[2]
    bias: Tensor | None = getattr(parent, CHOICE_BIAS, None)
    choice_bias = CHOICE_BIAS if bias is not None else ""
    if hasattr(module, CHOICE_BIAS):
        choice_bias = f"{own}.{CHOICE_BIAS}"
    count, hidden = module.weight.shape
    return Router(
        hidden,
        count,
        module.top_k,
        rule=find_routing(module, bias),
        has_bias=_has_bias(module),
        choice_bias=choice_bias,
        settings=context.choose_router(),
    )


CHOICE_BIAS = "e_score_correction_bias"
"""What checkpoints call a bias of the choice alone; the router has it, or its block."""


def build_experts(module: Any, context: BuildContext) -> RoutedExperts:
    """Build ``Experts``, or ``NativeExperts`` where there is a weight format."""
    _require(module, "gate_up_proj", "down_proj")
    count, hidden, inner = module.down_proj.shape
    is_transposed = bool(getattr(module, "is_transposed", False))
    if is_transposed:
        hidden, inner = inner, hidden
    if is_transposed == bool(getattr(module, "is_concatenated", True)):
        raise UnfitModuleError(f"{type(module).__name__} stores gate and up in another order")
    activation = find_expert_activation(module)
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


def build_moe_block(module: Any, context: BuildContext) -> MoeBlock:
    """Build ``MoeBlock``."""
    del context
    children = dict(module.named_children())
    gate = next((name for name in ("gate", "router") if name in children), "gate")
    _require(module, gate, "experts")
    shared = _pop_shared(children)
    shared_gate = children.pop("shared_expert_gate", None)
    extra = [name for name in children if name not in (gate, "experts")]
    if extra:
        raise UnfitModuleError(f"{type(module).__name__} also has {', '.join(extra)}")
    return MoeBlock(
        getattr(module, gate),
        module.experts,
        gate_name=gate,
        shared=shared,
        shared_gate=None if shared_gate is None else ("shared_expert_gate", shared_gate),
        is_pair=type(module).__name__ == PAIR_BLOCK,
    )


def _pop_shared(children: dict[str, nn.Module]) -> tuple[str, nn.Module] | None:
    for name in ("shared_expert", "shared_experts"):
        if name in children:
            return name, children.pop(name)
    return None


def build_decoder_layer(module: Any, context: BuildContext) -> DecoderLayer:
    """Build ``DecoderLayer``."""
    del context
    _require(module, "self_attn", "mlp")
    # Dropout is of training.
    children = {n: m for n, m in module.named_children() if not isinstance(m, nn.Dropout)}
    operators = {n: m for n, m in children.items() if isinstance(m, Operator)}
    strange = [name for name in children if name not in operators]
    if strange:
        raise UnfitModuleError(f"{', '.join(strange)}: no operators of ours")
    attention, mlp = operators["self_attn"], operators["mlp"]
    if not isinstance(attention, (Attention, MlaAttention)) or not isinstance(mlp, (Mlp, MoeBlock)):
        raise UnfitModuleError("self_attn or mlp is not an operator of ours")
    if isinstance(mlp, MoeBlock) and not mlp.is_fusable:
        raise UnfitModuleError("mlp is not all operators of ours")
    norms = children.keys() - {"self_attn", "mlp"}
    names = next((names for names in LAYER_NORMS if norms == {n for n in names if n}), None)
    if names is None:
        raise UnfitModuleError(f"the norms {', '.join(sorted(norms))} are of no known layer")
    found = [operators[name] if name else None for name in names]
    if isinstance(mlp, MoeBlock) and (found[2] is None or found[3] is not None):
        raise UnfitModuleError("experts need one norm, before them")
    first, attention_out, second, mlp_out = (_as_norm(norm) for norm in found)
    parts = LayerParts(first, attention, attention_out, second, mlp, mlp_out)
    return DecoderLayer(parts, operators)


def _as_norm(module: nn.Module | None) -> RmsNorm | None:
    if module is not None and not isinstance(module, RmsNorm):
        raise UnfitModuleError(f"{type(module).__name__} is not a norm of ours")
    return module
