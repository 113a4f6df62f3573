"""Specs of our operators from the skeleton's modules: one function for each kind of module.

A module is recognised by its parts (``roles``) and by what it computes (``probes``), not by its
name, so any family whose module has the usual form is supported; another module is refused with
what is missing. The skeleton is read and never changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from tandem.core.errors import ConfigError
from tandem.core.model.layers import (
    SILU,
    Activation,
    DecoderLayerSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FrozenGatedDeltaSpec,
    FrozenLinearSpec,
    GatedDeltaSpec,
    GqaSpec,
    HeadSpec,
    IndexSpec,
    KimiDeltaSpec,
    LayerNormSpec,
    LinearSpec,
    Mamba2Spec,
    MixerSpec,
    MlaSpec,
    MlpSpec,
    MoeBlockSpec,
    NormSpec,
    OperatorSpec,
    PositionScale,
    RopeSpec,
    RotarySpec,
    RouterSpec,
    RoutingRule,
    ShortConvSpec,
    StateMixerSpec,
)
from tandem.kernels.operators.rope import Rope
from tandem.models.families.deepseek import has_interleaved_index, has_interleaved_latents
from tandem.models.families.gpt_oss import PAIR_BLOCKS
from tandem.models.families.registry import classifies
from tandem.models.planning.probes import (
    AttentionCall,
    UnfitModuleError,
    find_activation,
    find_expert_activation,
    find_layer_norm,
    find_layer_type,
    find_mlp_activation,
    find_norm_offset,
    find_routing,
    gives_whole_angles,
    observe_frequencies,
    read_frequencies,
    takes_choices,
    takes_positions,
)
from tandem.models.planning.roles import (
    FEED_FORWARD_NAMES,
    LAYER_NORMS,
    MIXER_NAMES,
    count_kv_heads,
    find_down,
    find_gate_up,
    find_kv_source,
    find_output,
    find_projections,
    find_qk_norms,
    has_layered_rope,
    is_experts,
    is_gated,
    is_gated_experts,
    observe_attentions,
)
from tandem.models.planning.state_mixers import observe_state_mixers

__all__ = [
    "Describe",
    "Describer",
    "ModuleView",
    "describe_attention",
    "describe_decoder_layer",
    "describe_embedding",
    "describe_experts",
    "describe_frozen_experts",
    "describe_frozen_gated_delta",
    "describe_frozen_linear",
    "describe_gated_delta",
    "describe_kimi_delta",
    "describe_layer_norm",
    "describe_linear",
    "describe_lm_head",
    "describe_mamba2",
    "describe_mla_attention",
    "describe_mlp",
    "describe_moe_block",
    "describe_norm",
    "describe_rotary",
    "describe_router",
    "describe_short_conv",
    "list_rope_names",
]

GATED_NATIVELY = tuple(Activation(name) for name in ("silu", "gelu", "gelu_tanh"))
ANGLE_TOLERANCE = 1e-5
"""Relative tolerance for frequencies computed in float32 in two orders."""
NO_ROPE: Literal["none"] = "none"
CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")
"""Checkpoint names of a bias that only affects the router's choice; the router or its block
has it.
"""
LAYER_SCALE = "layer_scalar"
"""Checkpoint name of a factor on a decoder layer's output."""


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module's place in its model, with all that a ``describe_...`` function may ask about its
    surroundings.
    """

    name: str
    """Dotted path of the module."""
    model: Any
    config: Any
    attentions: Mapping[str, AttentionCall | str]
    """The calls of attention by each attention module, as found by ``roles.observe_attentions``."""
    state_mixers: Mapping[str, StateMixerSpec | str] = field(default_factory=dict)
    """The specs of mixers with a state, as found by ``state_mixers.observe_state_mixers``."""
    operators: Mapping[str, OperatorSpec] = field(default_factory=dict)
    """Specs of the modules below this one that become operators, by dotted path."""


Describe = Callable[[Any, ModuleView], OperatorSpec]
"""Function that returns the spec of a module. Raises: UnfitModuleError."""


class Describer:
    """Specs of a skeleton's modules, each computed once.

    Args:
        model: the skeleton, on the meta device; borrowed, not changed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._attentions: dict[str, AttentionCall | str] | None = None
        self._state_mixers: dict[str, StateMixerSpec | str] = {}
        self._found: dict[tuple[str, Describe], OperatorSpec | str] = {}

    def describe(self, name: str, describe: Describe) -> OperatorSpec:
        """Return the spec that a ``describe_...`` function returns for a module; cached.

        Raises: UnfitModuleError (the module does not fit the operator; the text says what is
            missing).
        """
        key = (name, describe)
        if key not in self._found:
            try:
                self._found[key] = self.describe_above(name, describe, {})
            except UnfitModuleError as error:
                self._found[key] = str(error)
        found = self._found[key]
        if isinstance(found, str):
            raise UnfitModuleError(found)
        return found

    def describe_above(
        self, name: str, describe: Describe, operators: Mapping[str, OperatorSpec]
    ) -> OperatorSpec:
        """Return the spec of a module that depends on which modules below it become operators.

        Raises: UnfitModuleError, as ``describe``.
        """
        if self._attentions is None:
            self._attentions = observe_attentions(self.model)
            self._state_mixers = observe_state_mixers(self.model)
        view = ModuleView(
            name, self.model, self.model.config, self._attentions, self._state_mixers, operators
        )
        return describe(self.model.get_submodule(name), view)


def _require(module: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise UnfitModuleError(f"{type(module).__name__} has no {', '.join(missing)}")


def _has_bias(module: Any) -> bool:
    return getattr(module, "bias", None) is not None


def describe_linear(module: Any, view: ModuleView) -> LinearSpec | HeadSpec:
    """Return the spec (sizes and options, from which our operator is built) of a linear module, or
    of the model's head.
    """
    _require(module, "in_features", "out_features")
    if view.model.get_output_embeddings() is module:
        return describe_lm_head(module, view)
    return LinearSpec(
        in_features=module.in_features,
        out_features=module.out_features,
        has_bias=_has_bias(module),
    )


def describe_frozen_linear(module: Any, view: ModuleView) -> FrozenLinearSpec:
    """Return the spec of a frozen linear module; a head tied to the embedding is refused."""
    _require(module, "in_features", "out_features")
    is_head = view.model.get_output_embeddings() is module
    if is_head and view.config.get_text_config().tie_word_embeddings:
        raise UnfitModuleError("its matrix is the embedding's")
    return FrozenLinearSpec(
        in_features=module.in_features,
        out_features=module.out_features,
        has_bias=_has_bias(module),
    )


def describe_lm_head(module: Any, view: ModuleView) -> HeadSpec:
    """Return the spec of the projection to the vocabulary, or to a classifier's labels."""
    _require(module, "in_features", "out_features")
    soft_cap = getattr(view.config, "final_logit_softcapping", None) or 0.0
    is_score = classifies(view.config)
    return HeadSpec(
        in_features=module.in_features,
        out_features=module.out_features,
        has_bias=_has_bias(module),
        is_tied=bool(view.config.tie_word_embeddings),
        soft_cap=0.0 if is_score else soft_cap,
        scale=1.0 if is_score else _find_logit_scale(view.config),
    )


def _find_logit_scale(config: Any) -> float:
    """Return the factor on logits: Cohere's factor, divided by Granite's divisor.

    Raises: UnfitModuleError (a divisor of 0).
    """
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if divisor == 0:
        raise UnfitModuleError("logits_scaling is 0")
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)


def describe_embedding(module: Any, view: ModuleView) -> EmbeddingSpec:
    """Return the spec (sizes and options, from which our operator is built) of a token embedding.
    Raises: UnfitModuleError (it does not fit).
    """
    del view
    _require(module, "num_embeddings", "embedding_dim")
    if not isinstance(module, nn.Embedding):
        raise UnfitModuleError(f"{type(module).__name__} is no embedding")
    if module.max_norm is not None:
        raise UnfitModuleError(f"{type(module).__name__} bounds its rows")
    return EmbeddingSpec(
        vocab_size=module.num_embeddings,
        hidden_size=module.embedding_dim,
        scale=float(getattr(module, "scalar_embed_scale", 1.0)),
    )


_NORM_OFFSETS: dict[type, float] = {}
"""Norm offset by class, cached because a class has many norms that differ only in size."""


def describe_norm(module: Any, view: ModuleView | None = None) -> NormSpec:
    """Return the spec (sizes and options, from which our operator is built) of an RMSNorm. Raises:
    UnfitModuleError (it does not fit).
    """
    del view
    _require(module, "weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None:
        raise UnfitModuleError(f"{type(module).__name__} is not an RMSNorm")
    kind = type(module)
    if kind not in _NORM_OFFSETS:
        _NORM_OFFSETS[kind] = find_norm_offset(module)
    return NormSpec(size=module.weight.shape[0], eps=eps, offset=_NORM_OFFSETS[kind])


def describe_layer_norm(module: Any, view: ModuleView | None = None) -> LayerNormSpec:
    """Return the spec (sizes and options, from which our operator is built) of a LayerNorm. Raises:
    UnfitModuleError (it does not fit).
    """
    del view
    _require(module, "weight")
    offset, eps = find_layer_norm(module)
    return LayerNormSpec(
        size=module.weight.shape[0], eps=eps, offset=offset, has_bias=_has_bias(module)
    )


def list_rope_names(config: Any) -> list[str]:
    """Return the layer types with a RoPE of their own; one empty name if all layers share one."""
    return sorted(set(config.layer_types)) if has_layered_rope(config) else [""]


def describe_rotary(module: Any, view: ModuleView) -> RotarySpec:
    """Return the spec of a model's rotary embedding, or of those of its layer types."""
    _require(module, "rope_type")
    names = list_rope_names(view.config)
    is_layered = names != [""]
    if not is_layered:
        _require(module, "inv_freq")
    ropes = {name: _describe_rope(module, view.config, name) for name in names}
    calls = view.attentions.values()
    if any(isinstance(call, AttentionCall) and not call.rotates for call in calls):
        ropes[NO_ROPE] = msgspec.structs.replace(ropes[names[0]], rope_type=NO_ROPE)
    return RotarySpec(
        ropes=ropes,
        is_half=not is_layered and not gives_whole_angles(module),
    )


def _describe_rope(module: Any, config: Any, name: str) -> RopeSpec:
    """Return the spec of a layer type's RoPE, after checking that it gives the module's angles.

    Classes read different fields: some rotate a part of a head if the configuration says so, others
    always the whole head. So the number of rotated items is taken from the module.
    """
    inv_freq, attention_factor = read_frequencies(module, name)
    raw: dict[str, Any] = config.rope_parameters[name] if name else config.rope_parameters
    # Some published configs hold keys of other RoPE types; only keys that RopeSpec has are read.
    fields = {field.name for field in msgspec.structs.fields(RopeSpec)}
    known = {key: value for key, value in raw.items() if key in fields and value is not None}
    known["head_dim"] = 2 * len(inv_freq)
    known["max_position_embeddings"] = config.max_position_embeddings
    if raw.get("rope_type") == "proportional":
        known["num_angles"] = int(inv_freq.count_nonzero())
    if raw.get("rope_type") == "longrope":
        return _describe_longrope(module, config, name, known)
    spec = _convert_rope(known)
    _require_angles(module, spec, inv_freq, attention_factor)
    return spec


def _convert_rope(known: Mapping[str, object]) -> RopeSpec:
    try:
        return msgspec.convert(known, RopeSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "models.check_config", f"rope_parameters: {error}", field="rope_parameters"
        ) from error


def _require_angles(module: Any, spec: RopeSpec, inv_freq: Tensor, factor: float) -> None:
    rope = Rope(spec)
    theirs = torch.cat((inv_freq, torch.tensor([factor])))
    ours = torch.cat((rope.inv_freq, torch.tensor([rope.attention_factor])))
    # Slow frequencies are tiny, so only a relative tolerance detects a difference.
    if not torch.allclose(ours, theirs, rtol=ANGLE_TOLERANCE, atol=0):
        raise UnfitModuleError(f"{type(module).__name__} has other angles than rope_parameters say")


def _describe_longrope(module: Any, config: Any, name: str, known: dict[str, Any]) -> RopeSpec:
    """Return the spec of a LongRoPE, for the model's own context, after checking that the module
    has its angles both up to the original length and beyond it.
    """
    longest, pairs = config.max_position_embeddings, known["head_dim"] // 2
    original: int = known["original_max_position_embeddings"]
    known.setdefault("factor", longest / original)
    spec = _convert_rope(known)
    for context in (original, original + 1):
        served = spec.serve(context)
        _require_angles(module, served, *observe_frequencies(module, name, context, pairs))
    return spec.serve(longest)


def _find_rope_idx(module: Any, config: Any, *, rotates: bool = True) -> int:
    names = list_rope_names(config)
    if not rotates:
        return len(names)
    return 0 if names == [""] else names.index(find_layer_type(module, config))


def describe_attention(module: Any, view: ModuleView) -> GqaSpec:
    """Return the spec (sizes and options, from which our operator is built) of grouped-query
    attention. Raises: UnfitModuleError (it does not fit).
    """
    _require(module, "head_dim", "layer_idx")
    names, out_name = find_projections(module), find_output(module)
    if not names:
        raise UnfitModuleError(f"{type(module).__name__} has no q_proj, k_proj, v_proj, o_proj")
    if getattr(view.config, "clip_qkv", None) is not None:
        raise UnfitModuleError(f"{type(module).__name__} clips q, k and v")
    if not getattr(module, "is_causal", True):
        raise UnfitModuleError(f"{type(module).__name__} sees later tokens")
    source = find_kv_source(view.model, module)
    norm_names = find_qk_norms(module)
    q_norm, k_norm = (getattr(module, name, None) for name in norm_names)
    if (q_norm is None) != (k_norm is None) and source < 0:
        raise UnfitModuleError(f"{type(module).__name__} norms only one of q and k")
    others = {n for n, m in module.named_children() if list(m.parameters())}
    others |= {name for name, _ in module.named_parameters(recurse=False)}
    _refuse_others(module, others - {*names, out_name, *norm_names, "sinks"})
    call = view.attentions.get(view.name, "it was not there before the rules")
    if isinstance(call, str):
        raise UnfitModuleError(call)
    first, output = getattr(module, names[0]), getattr(module, out_name)
    owner, kept = module, names
    if source >= 0:
        owner = view.model.model.layers[source].self_attn
        kept = find_projections(owner)
    d, value_dim = module.head_dim, getattr(module, "v_head_dim", module.head_dim)
    heads = output.in_features // value_dim
    if value_dim > d or (value_dim < d and len(names) < 3):
        raise UnfitModuleError(f"{type(module).__name__} has values of {value_dim} items")
    has_out_gate = len(names) > 1 and first.out_features == 2 * heads * d
    if has_out_gate and (value_dim < d or names == ("q_proj", "k_proj")):
        raise UnfitModuleError(f"{type(module).__name__} gates values that it takes elsewhere")
    if has_out_gate and call.interleaved_size:
        raise UnfitModuleError(f"{type(module).__name__} rotates neighbours and gates its output")
    norm = None if q_norm is None else describe_norm(q_norm)
    plain = getattr(module, "qk_norm", None)
    if plain is not None:
        # This norm follows the rotation of queries and keys; a rotation does not change the norm,
        # so the order does not matter.
        norm = NormSpec(size=d, eps=plain.eps)
    value_norm = getattr(module, "v_norm", None)
    if value_norm is not None and (norm is None or value_norm.eps != norm.eps):
        raise UnfitModuleError(f"{type(module).__name__} norms values as it norms nothing else")
    if norm is not None and norm.size not in (d, heads * d):
        raise UnfitModuleError(f"{type(module).__name__} norms {norm.size} items of q")
    return GqaSpec(
        hidden_size=first.in_features,
        num_heads=heads,
        num_kv_heads=count_kv_heads(owner, kept),
        head_dim=d,
        scale=call.scale,
        has_qkv_bias=_has_bias(first),
        has_o_bias=_has_bias(output),
        qk_norm=norm,
        has_value_norm=value_norm is not None,
        keys_are_values=names == ("q_proj", "k_proj"),
        shares_kv_of=source,
        value_size=0 if value_dim == d else value_dim,
        value_scale=float(getattr(module, "v_scale", 1.0)),
        qkv_names=names,
        out_name=out_name,
        norm_names=norm_names,
        rope_idx=_find_rope_idx(module, view.config, rotates=call.rotates),
        interleaved_size=call.interleaved_size,
        window=call.rule.window,
        chunk=_find_chunk(module, view.config),
        is_norm_plain=plain is not None,
        soft_cap=call.rule.soft_cap,
        has_sinks=call.rule.sinks is not None,
        has_out_gate=has_out_gate,
        position_scale=_find_position_scale(module, view.config, rotates=call.rotates),
    )


def describe_kept_attention(module: Any, view: ModuleView) -> GqaSpec:
    """Return the spec of attention that remains transformers' module, as far as its KV and cost are
    concerned.
    """
    _require(module, "head_dim", "layer_idx")
    names, out_name = find_projections(module), find_output(module)
    call = view.attentions.get(view.name, "it was not there before the rules")
    if isinstance(call, str):
        raise UnfitModuleError(call)
    if not names or not getattr(module, "is_causal", True):
        raise UnfitModuleError(f"{type(module).__name__} is no attention to earlier tokens")
    first, output = getattr(module, names[0]), getattr(module, out_name)
    return GqaSpec(
        hidden_size=first.in_features,
        num_heads=output.in_features // getattr(module, "v_head_dim", module.head_dim),
        num_kv_heads=count_kv_heads(module, names),
        head_dim=module.head_dim,
        scale=call.scale,
        has_qkv_bias=_has_bias(first),
        has_o_bias=_has_bias(output),
        qkv_names=names,
        rope_idx=_find_rope_idx(module, view.config, rotates=call.rotates),
        window=call.rule.window,
        soft_cap=call.rule.soft_cap,
        has_sinks=call.rule.sinks is not None,
    )


def _find_chunk(module: Any, config: Any) -> int:
    """Return the size of the chunks within which a layer attends; 0: no chunks."""
    kinds = getattr(config, "layer_types", None) or ()
    is_chunked = bool(kinds) and kinds[module.layer_idx] == "chunked_attention"
    return int(config.attention_chunk_size) if is_chunked else 0


def _find_position_scale(module: Any, config: Any, *, rotates: bool = True) -> PositionScale | None:
    """Return the scaling of queries by position, from the fields that the attention reads; None:
    none.
    """
    if getattr(module, "attn_temperature_tuning", False) and not rotates:
        return PositionScale(float(module.attn_scale), int(module.floor_scale), offset=1)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    beta, length = (
        rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if not takes_positions(module) or beta is None or length is None:
        return None
    return PositionScale(float(beta), int(length))


def describe_mla_attention(module: Any, view: ModuleView) -> MlaSpec:
    """Return the spec (sizes and options, from which our operator is built) of multi-head latent
    attention. Raises: UnfitModuleError (it does not fit).
    """
    _require(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "scaling")
    q_norm = getattr(module, "q_a_layernorm", None)
    norms = [describe_norm(n) for n in (module.kv_a_layernorm, q_norm) if n is not None]
    if len({norm.eps for norm in norms}) > 1:
        raise UnfitModuleError(f"{type(module).__name__} has norms of two epsilons")
    if any(norm.offset for norm in norms):
        raise UnfitModuleError(f"{type(module).__name__} has norms that add to their weight")
    if _has_bias(module.kv_b_proj):
        raise UnfitModuleError(f"{type(module).__name__} has a bias on what is absorbed")
    index = _describe_index(module, view)
    return MlaSpec(
        hidden_size=module.o_proj.out_features,
        num_heads=module.num_heads,
        rank=module.kv_lora_rank,
        rope=module.qk_rope_head_dim,
        nope=module.qk_nope_head_dim,
        value=module.v_head_dim,
        q_rank=module.q_lora_rank or 0,
        scale=module.scaling,
        norm_eps=norms[0].eps,
        has_bias=_has_bias(module.kv_a_proj_with_mqa),
        is_interleaved=has_interleaved_latents(view.config),
        rope_idx=_find_rope_idx(module, view.config),
        position_scale=_find_position_scale(module, view.config),
        top=view.config.index_topk if hasattr(module, INDEX) else 0,
        index=index,
        gives_choice=hasattr(module, SHARES_CHOICE),
    )


INDEX, SHARES_CHOICE = "indexer", "skip_topk"
"""Attributes of an attention: its index, and the flag that it uses an earlier layer's choice
instead.
"""
INDEX_PARTS = {"wq_b", "wk", "k_norm", "weights_proj"}


def _describe_index(module: Any, view: ModuleView) -> IndexSpec | None:
    """Return the spec of the index by which attention chooses tokens; None: it has none of
    its own.
    """
    index = getattr(module, INDEX, None)
    if index is None:
        if getattr(module, SHARES_CHOICE, False) and not _find_chooser(module, view):
            raise UnfitModuleError(f"{type(module).__name__} shares a choice that no layer made")
        return None
    _require(index, *INDEX_PARTS, "n_heads", "head_dim", "index_topk")
    parts = {name for name, part in index.named_children() if list(part.parameters())}
    _refuse_others(index, parts - INDEX_PARTS)
    if not module.q_lora_rank:
        raise UnfitModuleError(f"{type(module).__name__} has an index without compressed queries")
    offset, eps = find_layer_norm(index.k_norm)
    if offset or not _has_bias(index.k_norm):
        raise UnfitModuleError(f"{type(index).__name__} norms its keys in another way")
    if any(_has_bias(getattr(index, name)) for name in INDEX_PARTS - {"k_norm"}):
        raise UnfitModuleError(f"{type(index).__name__} has a bias on a projection")
    return IndexSpec(
        num_heads=index.n_heads,
        dim=index.head_dim,
        norm_eps=eps,
        is_interleaved=has_interleaved_index(view.config),
    )


def _find_chooser(module: Any, view: ModuleView) -> bool:
    """Return True if a layer before this module's layer has an index of its own, which chooses the
    tokens that sparse attention sees.
    """
    earlier = list(view.model.model.layers)[: module.layer_idx]
    return any(getattr(layer.self_attn, INDEX, None) is not None for layer in earlier)


def describe_gated_delta(module: Any, view: ModuleView) -> GatedDeltaSpec:
    """Return the spec (sizes and options, from which our operator is built) of a gated delta rule,
    whose layer keeps a recurrent state instead of KV.
    """
    found = _find_state_mixer(view)
    if not isinstance(found, GatedDeltaSpec):
        raise UnfitModuleError(f"{type(module).__name__} is no gated delta rule")
    return found


def describe_kimi_delta(module: Any, view: ModuleView) -> KimiDeltaSpec:
    """Return the spec (sizes and options, from which our operator is built) of Kimi delta
    attention. Raises: UnfitModuleError (it does not fit).
    """
    found = _find_state_mixer(view)
    if not isinstance(found, KimiDeltaSpec):
        raise UnfitModuleError(f"{type(module).__name__} is no Kimi delta attention")
    return found


def describe_short_conv(module: Any, view: ModuleView) -> ShortConvSpec:
    """Return the spec (sizes and options, from which our operator is built) of a short convolution
    over tokens that takes the place of attention in its layer.
    """
    found = _find_state_mixer(view)
    if not isinstance(found, ShortConvSpec):
        raise UnfitModuleError(f"{type(module).__name__} is no short convolution")
    return found


def describe_mamba2(module: Any, view: ModuleView) -> Mamba2Spec:
    """Return the spec (sizes and options, from which our operator is built) of Mamba2's state
    space. Raises: UnfitModuleError (it does not fit).
    """
    found = _find_state_mixer(view)
    if not isinstance(found, Mamba2Spec):
        raise UnfitModuleError(f"{type(module).__name__} is no state space of Mamba2")
    return found


def _find_state_mixer(view: ModuleView) -> StateMixerSpec:
    found = view.state_mixers.get(view.name, "it was not there before the rules")
    if isinstance(found, str):
        raise UnfitModuleError(found)
    return found


def describe_frozen_gated_delta(module: Any, view: ModuleView) -> FrozenGatedDeltaSpec:
    """Return the spec of a gated delta rule that remains transformers' module, with our forward
    pass, while adapters are trained.
    """
    found = _find_state_mixer(view)
    if not isinstance(found, GatedDeltaSpec | KimiDeltaSpec):
        raise UnfitModuleError(f"{type(module).__name__} is no gated delta rule")
    return FrozenGatedDeltaSpec(rule=found)


def describe_mlp(module: Any, view: ModuleView) -> MlpSpec:
    """Return the spec (sizes and options, from which our operator is built) of a dense MLP. Raises:
    UnfitModuleError (it does not fit).
    """
    del view
    names = find_gate_up(module)
    if not names:
        raise UnfitModuleError(f"{type(module).__name__} has no gate_proj, up_proj, down_proj")
    down_name = find_down(module)
    others = {n for n, m in module.named_children() if list(m.parameters())}
    _refuse_others(module, others - {*names, down_name})
    down = getattr(module, down_name)
    return MlpSpec(
        hidden_size=down.out_features,
        intermediate_size=down.in_features,
        has_bias=_has_bias(down),
        activation=find_mlp_activation(module, names[0], names[-1], down_name),
        gate_up_names=names,
        down_name=down_name,
        is_gated=is_gated(names),
    )


def _refuse_others(module: Any, others: set[str]) -> None:
    if others:
        raise UnfitModuleError(f"{type(module).__name__} also has {', '.join(sorted(others))}")


def describe_router(module: Any, view: ModuleView) -> RouterSpec:
    """Return the spec (sizes and options, from which our operator is built) of a router, which
    chooses experts. Raises: UnfitModuleError (it does not fit).
    """
    if hasattr(module, "per_expert_scale"):
        return _describe_scaling_router(module)
    _require(module, "weight", "top_k")
    above, _, own = view.name.rpartition(".")
    block = view.model.get_submodule(above)
    choice_bias = next((n for n in CHOICE_BIASES if getattr(block, n, None) is not None), "")
    bias: Tensor | None = getattr(block, choice_bias) if choice_bias else None
    if hasattr(module, CHOICE_BIASES[0]):
        choice_bias = f"{own}.{CHOICE_BIASES[0]}"
    count, hidden = module.weight.shape
    return RouterSpec(
        hidden_size=hidden,
        num_experts=count,
        top_k=module.top_k,
        rule=find_routing(module, bias),
        has_bias=_has_bias(module),
        choice_bias=choice_bias,
    )


def _describe_scaling_router(module: Any) -> RouterSpec:
    """Return the spec of a router that norms its input and has a factor for each expert, as Gemma
    4's.
    """
    _require(module, "proj", "scale", "norm", "per_expert_scale")
    return RouterSpec(
        hidden_size=module.proj.in_features,
        num_experts=module.proj.out_features,
        top_k=module.config.top_k_experts,
        rule=RoutingRule("softmax", is_normalised=True),
        has_bias=_has_bias(module.proj),
        norm_eps=module.norm.eps,
        has_expert_scale=True,
    )


def describe_experts(module: Any, view: ModuleView) -> ExpertsSpec:
    """Return the spec of routed experts whose weights are one parameter for the whole layer."""
    del view
    return describe_routed_experts(module)


def describe_routed_experts(module: Any) -> ExpertsSpec:
    """Return the spec of routed experts in a module that need not belong to a skeleton.

    Raises: UnfitModuleError (the experts have another shape or activation).
    """
    if is_experts(module) and not is_gated_experts(module):
        return _describe_ungated_experts(module)
    _require(module, "gate_up_proj", "down_proj")
    count, hidden, inner = module.down_proj.shape
    is_transposed = module.gate_up_proj.shape[1:] == (inner, 2 * hidden)
    if is_transposed:
        hidden, inner = inner, hidden
    is_concatenated = bool(getattr(module, "is_concatenated", True))
    if not is_transposed and not is_concatenated:
        raise UnfitModuleError(f"{type(module).__name__} stores gate and up in another order")
    return ExpertsSpec(
        num_experts=count,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=find_expert_activation(module),
        has_bias=hasattr(module, "down_proj_bias"),
        is_transposed=is_transposed,
        has_halves=is_transposed and is_concatenated,
        scales_input=not takes_choices(module),
    )


def describe_frozen_experts(module: Any, view: ModuleView) -> ExpertsSpec:
    """Return the spec of routed experts that are packed while adapters are trained."""
    spec = describe_experts(module, view)
    if spec.scales_input:
        raise UnfitModuleError(f"{type(module).__name__} takes inputs that its router has scaled")
    if not spec.is_gated:
        raise UnfitModuleError(
            "experts without a gate have no gradient here, so that it is served and not trained"
        )
    return spec


def _describe_ungated_experts(module: Any) -> ExpertsSpec:
    count, inner, hidden = module.up_proj.shape
    if tuple(module.down_proj.shape) != (count, hidden, inner) or hasattr(module, "up_proj_bias"):
        raise UnfitModuleError(f"{type(module).__name__} has experts of another shape")
    return ExpertsSpec(
        num_experts=count,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=find_activation(module),
        is_gated=False,
    )


def describe_moe_block(module: Any, view: ModuleView) -> MoeBlockSpec:
    """Return the spec of a block of experts: a router, its routed experts and shared experts."""
    children = {name for name, _ in module.named_children()}
    gate = next((name for name in ("gate", "router") if name in children), "gate")
    _require(module, gate, "experts")
    shared = next((n for n in ("shared_expert", "shared_experts") if n in children), "")
    shared_gate = "shared_expert_gate" if "shared_expert_gate" in children else ""
    known = {gate, "experts", shared, shared_gate}
    # Only our router operator takes the block's choice bias over. With transformers' router the
    # bias counts as an unknown parameter, and the block is refused.
    is_ours = isinstance(view.operators.get(f"{view.name}.{gate}"), RouterSpec)
    own = {name for name, _ in module.named_parameters(recurse=False)}
    own -= {*CHOICE_BIASES} if is_ours else set()
    _refuse_others(module, own | {n for n, _ in module.named_children() if n not in known})
    return MoeBlockSpec(
        gate_name=gate,
        shared_name=shared,
        shared_gate_name=shared_gate,
        is_pair=type(module).__name__ in PAIR_BLOCKS,
    )


def describe_decoder_layer(module: Any, view: ModuleView) -> DecoderLayerSpec:
    """Return the spec (sizes and options, from which our operator is built) of a decoder layer
    whose parts all become operators.
    """
    mixer, mlp_name = (
        next((n for n in names if getattr(module, n, None) is not None), names[0])
        for names in (MIXER_NAMES, FEED_FORWARD_NAMES)
    )
    _require(module, mixer, mlp_name)
    # Dropout is inactive in inference, so Dropout modules are ignored.
    names = [n for n, m in module.named_children() if not isinstance(m, nn.Dropout)]
    has_input = hasattr(module, INPUT_GATE)
    if has_input and "act_fn" in names:
        names.remove("act_fn")
    parts = {n: view.operators.get(f"{view.name}.{n}") for n in names}
    strange = [name for name, spec in parts.items() if spec is None]
    if strange:
        raise UnfitModuleError(f"{', '.join(strange)}: no operators of ours")
    mlp = parts[mlp_name]
    if not isinstance(parts[mixer], MixerSpec) or not isinstance(mlp, MlpSpec | MoeBlockSpec):
        raise UnfitModuleError(f"{mixer} or mlp is not an operator of ours")
    if isinstance(mlp, MoeBlockSpec) and not _is_fusable(mlp, f"{view.name}.{mlp_name}", view):
        raise UnfitModuleError("mlp is not all operators of ours")
    if isinstance(mlp, MlpSpec) and not (mlp.is_gated and mlp.activation in GATED_NATIVELY):
        raise UnfitModuleError("the native gate is of another activation")
    if any(
        getattr(where, name, None) not in (None, 1, 1.0)
        for where, name in ((module, "residual_multiplier"), (view.config, "embedding_multiplier"))
    ):
        raise UnfitModuleError("branches or embeddings are multiplied")
    own = parts.keys() - {mixer, mlp_name}
    beside = _describe_beside(parts)
    own -= {*beside, *BESIDE} if beside else set()
    own -= {INPUT_GATE, INPUT_PROJECTION, INPUT_NORM} if has_input else set()
    norms = next((norms for norms in LAYER_NORMS if own == {n for n in norms if n}), None)
    if norms is None:
        raise UnfitModuleError(f"the norms {', '.join(sorted(own))} are of no known layer")
    for name in (*own, *beside, *([INPUT_NORM] if has_input else ())):
        if not isinstance(parts[name], NormSpec):
            raise UnfitModuleError(f"{name} is not a norm of ours")
    if isinstance(mlp, MoeBlockSpec) and (not norms[2] or norms[3]):
        raise UnfitModuleError("experts need one norm, before them")
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    _refuse_others(module, buffers - {LAYER_SCALE})
    scale = LAYER_SCALE if LAYER_SCALE in buffers else ""
    if scale and isinstance(mlp, MoeBlockSpec):
        raise UnfitModuleError("a layer with experts has a factor on its result")
    if beside and not (norms[2] and norms[3] and isinstance(mlp, MlpSpec)):
        raise UnfitModuleError("experts beside no MLP that is normed before and after")
    activation = find_activation(module) if has_input else SILU
    if activation not in GATED_NATIVELY:
        raise UnfitModuleError("the native gate is of another activation")
    return DecoderLayerSpec(
        norms=norms,
        mixer_name=mixer,
        mlp_name=mlp_name,
        scale_name=scale,
        beside_norms=beside,
        input_norm=INPUT_NORM if has_input else "",
        input_activation=activation.name,
    )


BESIDE = ("router", "experts")
"""Attributes of a layer with experts in parallel with its MLP."""
BESIDE_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
INPUT_GATE, INPUT_PROJECTION = "per_layer_input_gate", "per_layer_projection"
INPUT_NORM = "post_per_layer_input_norm"


def _describe_beside(parts: Mapping[str, OperatorSpec | None]) -> tuple[str, ...]:
    """Return the norms of experts that run in parallel with a layer's MLP; empty: there are
    none.
    """
    if not {*BESIDE, *BESIDE_NORMS} <= parts.keys():
        return ()
    if not isinstance(parts["router"], RouterSpec) or not isinstance(parts["experts"], ExpertsSpec):
        raise UnfitModuleError("router or experts are not operators of ours")
    return BESIDE_NORMS


def _is_fusable(block: MoeBlockSpec, name: str, view: ModuleView) -> bool:
    """Return True if all parts of a block are operators, so that it can add into the residual."""
    parts = (
        (block.gate_name, RouterSpec),
        ("experts", ExpertsSpec),
        (block.shared_name, MlpSpec),
        (block.shared_gate_name, LinearSpec),
    )
    return all(
        isinstance(view.operators.get(f"{name}.{part}"), kind) for part, kind in parts if part
    )
