"""The registry of operators that rule files can name.

Names from the KTransformers documents resolve to the operator with the same function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.model.plan import NO_FORMAT
from tandem.core.registry import Registry
from tandem.kernels.weights.formats import find_format
from tandem.models.planning.describe import (
    Describe,
    describe_attention,
    describe_decoder_layer,
    describe_embedding,
    describe_experts,
    describe_frozen_experts,
    describe_frozen_gated_delta,
    describe_frozen_linear,
    describe_gated_delta,
    describe_kimi_delta,
    describe_layer_norm,
    describe_linear,
    describe_lm_head,
    describe_mamba2,
    describe_mla_attention,
    describe_mlp,
    describe_moe_block,
    describe_norm,
    describe_rotary,
    describe_router,
    describe_short_conv,
)
from tandem.models.planning.probes import UnfitModuleError
from tandem.models.planning.roles import find_projections
from tandem.models.planning.state_mixers import is_kimi_delta, is_mamba2, is_state_mixer
from tandem.placement.rules import DEFAULT, Rule

__all__ = ["DEVICE_KWARGS", "FORMAT_KWARG", "OPERATORS", "OperatorEntry", "resolve_operator"]

FORMAT_KWARG = "format"
"""Key of a rule's argument for the weight format of an operator's matrices; an extension of the
grammar.
"""

DEVICE_KWARGS = ("generate_device", "prefill_device", "out_device", "device")
"""Keys of arguments whose value is a device; the report notes operators that run on another one."""

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
"""Keys in published rule files, with their misspellings. They choose among kernels and devices that
this build lacks; they are accepted and reported, but have no effect.
"""


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator as placement rule files can name it: how to describe a module for it, and what
    rules may set.
    """

    name: str
    describe: Describe | None
    """Function that returns the operator's spec for a module; None: the module is kept."""
    absorbs: bool = False
    """True if the operator also replaces the module's children, whatever other rules say."""
    takes_format: bool = False
    """True if rules may give the operator a weight format."""
    is_optional: bool = False
    """True if a module that does not fit the operator is kept, unless a user's rule asks for the
    operator.
    """
    needs_format: bool = False
    """True if the operator only runs packed weights: a module whose matrices stay tensors is not
    replaced.
    """
    choose: Callable[[Any], str] | None = None
    """Function that names the operator to use instead, by the module's parts; None: this
    operator.
    """


def _choose_attention(module: Any) -> str:
    if is_kimi_delta(module):
        return "KimiDelta"
    return "MlaAttention" if hasattr(module, "kv_b_proj") else "Attention"


def _choose_feed_forward(module: Any) -> str:
    return "MoeBlock" if hasattr(module, "experts") else "Mlp"


def _choose_mixer(module: Any) -> str:
    """Return the operator of a layer's only part: attention, a state space, an MLP or experts."""
    if is_mamba2(module):
        return "Mamba2"
    return "Attention" if find_projections(module) else _choose_feed_forward(module)


def _choose_frozen(module: Any) -> str:
    """Return the operator name for a token mixer (attention or a state) while adapters are trained;
    ``default`` keeps transformers' module.
    """
    return "FrozenGatedDelta" if is_state_mixer(module) else DEFAULT


def _choose_frozen_rope(module: Any) -> str:
    """Return the operator name for a rotary embedding while adapters are trained: ours for a
    LongRoPE, which transformers' module would switch by the length of each batch.
    """
    kinds = getattr(module, "rope_type", "")
    names = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return "Rope" if "longrope" in names else DEFAULT


def _choose_latent(module: Any) -> str:
    """Return the operator name for a projection between the model's hidden size and the experts'
    smaller one: ``Linear``, or ``default`` (unchanged) for a module that is not linear.
    """
    return "Linear" if isinstance(module, nn.Linear) else DEFAULT


def _choose_norm(module: Any) -> str:
    try:
        describe_norm(module)
    except UnfitModuleError:
        return "LayerNorm"
    return "RmsNorm"


OPERATORS: Registry[OperatorEntry] = Registry("operator")
"""Operators that ``replace: {class: ...}`` may name."""

_ALIASES = {
    "Linear": ("KTransformersLinear",),
    "Experts": ("KTransformersExperts", "KTransformersExpertsV2"),
    "MoeBlock": (
        "KQwen3MoeSparseMoeBlock",
        "KQwen3MoeSparseMoeBlockV2",
        "KQwen2MoeSparseMoeBlock",
        "KMistralSparseMoEBlock",
        "KDeepseekV2MoE",
        "KDeepseekV3MoE",
        "KDeepseekV3MoEV2",
    ),
    "Router": ("KMoEGate", "KMoEGateQwen2Moe"),
    "MlaAttention": ("KDeepseekV2Attention", "deepseek_torch_attn", "flashinfer_attn"),
    "Attention": ("KQwen3MoeAttention", "KQwen2MoeAttention", "KLlamaAttention"),
    "RmsNorm": (
        "KQwen3MoeRMSNorm",
        "KQwen2MoeRMSNorm",
        "RMSNorm",
        "DeepseekV3RMSNormTorch",
    ),
    "GatedDelta": ("KQwen3NextGatedDeltaNet",),
    "Mlp": ("KQwen2MoeMLP", "kDeepseekV3MLP"),
    "Rope": (
        "RotaryEmbedding",
        "RotaryEmbeddingV2",
        "RotaryEmbeddingV3",
        "RotaryEmbeddingV4",
        "YarnRotaryEmbedding",
        "YarnRotaryEmbeddingV3",
        "DynamicNTKScalingRotaryEmbedding",
        "KQwen3MoeRotaryEmbedding",
    ),
    DEFAULT: ("KQwen2MoeModel", "KQwen3MoeModel", "KLlamaModel", "KDeepseekV2Model"),
}
"""Operator names from the KTransformers documents, by our operator. Its model classes move hidden
states between devices and prefill layer by layer; here the step does that, so the module is kept.
"""

ABSENT = frozenset(
    {
        "KDeepseekRMSNormIPEXLLM",
        "KMoEGateIPEXLLM",
        "KGlm4MoeMoE",
        "KGlm4Experts",
        "KGlm4MoeAttention",
        "KGlm4MoeRMSNorm",
        "KGlm4MoeMLP",
        "KGlm4MoeRotaryEmbedding",
        "KQwen3NextSparseMoeBlockV2",
        "KQwen3NextAttention",
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
"""Operator names from the KTransformers documents for model families without an operator here."""

for _entry in (
    OperatorEntry("Linear", describe_linear, takes_format=True),
    OperatorEntry("Embedding", describe_embedding),
    OperatorEntry("LmHead", describe_lm_head, takes_format=True),
    OperatorEntry("RmsNorm", describe_norm),
    OperatorEntry("LayerNorm", describe_layer_norm, is_optional=True),
    OperatorEntry("Norm", None, choose=_choose_norm),
    OperatorEntry("Rope", describe_rotary),
    OperatorEntry(
        "Attention", describe_attention, absorbs=True, takes_format=True, is_optional=True
    ),
    OperatorEntry("MlaAttention", describe_mla_attention, absorbs=True, takes_format=True),
    OperatorEntry("GatedDelta", describe_gated_delta, absorbs=True, takes_format=True),
    OperatorEntry("KimiDelta", describe_kimi_delta, absorbs=True, takes_format=True),
    OperatorEntry("ShortConv", describe_short_conv, absorbs=True, takes_format=True),
    OperatorEntry("Mamba2", describe_mamba2, absorbs=True, takes_format=True),
    OperatorEntry("Mlp", describe_mlp, absorbs=True, takes_format=True, is_optional=True),
    OperatorEntry("Router", describe_router, absorbs=True, is_optional=True),
    OperatorEntry("Experts", describe_experts, absorbs=True, takes_format=True, is_optional=True),
    OperatorEntry("FrozenGatedDelta", describe_frozen_gated_delta, is_optional=True),
    OperatorEntry(
        "FrozenLinear",
        describe_frozen_linear,
        takes_format=True,
        is_optional=True,
        needs_format=True,
    ),
    OperatorEntry(
        "FrozenExperts",
        describe_frozen_experts,
        absorbs=True,
        takes_format=True,
        needs_format=True,
    ),
    OperatorEntry("MoeBlock", describe_moe_block, is_optional=True),
    OperatorEntry("DecoderLayer", describe_decoder_layer, is_optional=True),
    OperatorEntry("SelfAttention", None, choose=_choose_attention),
    OperatorEntry("FrozenAttention", None, choose=_choose_frozen),
    OperatorEntry("FrozenRope", None, choose=_choose_frozen_rope),
    OperatorEntry("Mixer", None, choose=_choose_mixer),
    OperatorEntry("LatentLinear", None, choose=_choose_latent),
    OperatorEntry("FeedForward", None, choose=_choose_feed_forward),
    OperatorEntry(DEFAULT, None),
):
    OPERATORS.add(_entry.name, _entry, aliases=_ALIASES.get(_entry.name, ()))


def resolve_operator(rule: Rule) -> OperatorEntry | None:
    """Return the operator that a rule names; None for a known name without an operator here.

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
