"""Construction of operators, without weights, from their specs."""

from dataclasses import dataclass
from typing import Any, assert_never

from torch import nn

from tandem._native import ThreadPool
from tandem.core.model.layers import (
    DecoderLayerSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FrozenGatedDeltaSpec,
    FrozenLinearSpec,
    GatedDeltaSpec,
    GqaSpec,
    HeadSpec,
    KimiDeltaSpec,
    LayerNormSpec,
    LinearSpec,
    Mamba2Spec,
    MlaSpec,
    MlpSpec,
    MoeBlockSpec,
    NormSpec,
    RotarySpec,
    RouterSpec,
    ShortConvSpec,
)
from tandem.core.model.plan import NO_FORMAT, ModulePlan
from tandem.kernels.cpu.delta_scan import NativeScan
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.cpu.hosted_experts import ExpertStaging, HostedExperts
from tandem.kernels.cpu.tiered_experts import DiskExperts, TierShare
from tandem.kernels.mixtures.ungated import UngatedExperts
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import (
    BesideExperts,
    DecoderLayer,
    LayerInput,
    LayerParts,
)
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.frozen_delta import freeze_mixer
from tandem.kernels.operators.frozen_linear import FrozenLinear
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.operators.linear import Embedding, Linear, LmHead
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.norm import LayerNorm, RmsNorm
from tandem.kernels.operators.operator import Operator
from tandem.kernels.operators.rope import LayeredRope, Rope
from tandem.kernels.state_space.kimi_delta import KimiDelta
from tandem.kernels.state_space.mixers import Mamba2, ShortConv, StateSpace
from tandem.kernels.torch.experts import Experts
from tandem.kernels.weights.formats import find_format
from tandem.kernels.weights.matrix import MatrixSettings
from tandem.models.loading.packed_cache import PackedCaches
from tandem.models.planning.precision import choose_expert_parts
from tandem.models.planning.roles import find_projections
from tandem.models.planning.state_mixers import is_state_mixer

__all__ = ["Resources", "build_operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Objects of which a process has one each, shared by all operators that are built."""

    pool: ThreadPool
    """Threads that run the kernels; borrowed for the life of the operators."""
    caches: PackedCaches | None = None
    """Cache of packed experts between runs; None: no cache."""
    expert_parts: int = 0
    """Number of parts of packed experts; 0: one for each NUMA node of the pool."""
    share: TierShare | None = None
    """Each layer's share of the memory for experts on disk; None: all experts are in memory."""
    staging: ExpertStaging | None = None
    """Copies data between the model's device and packed experts; None: the device is the host."""


def build_operator(planned: ModulePlan, model: Any, resources: Resources) -> nn.Module:
    """Build the operator of a module.

    Args:
        planned: spec of the operator and format of its matrices.
        model: the skeleton, in which operators below the module are already in place.
        resources: shared objects of the process.
    """
    spec, name = planned.spec, planned.module
    settings = _make_settings(planned, resources.pool)
    match spec:
        case GqaSpec():
            # A layer that shares another layer's KV reads the cache slice of the layer that owns
            # it.
            owner = name if spec.shares_kv_of < 0 else f"model.layers.{spec.shares_kv_of}.self_attn"
            layer_idx = _count_before(model, owner, has_state=False)
            return Attention(spec, layer_idx=layer_idx, settings=settings)
        case MlaSpec():
            layer_idx = _count_before(model, name, has_state=False)
            score_settings = _make_gate_settings(planned, resources.pool)
            return MlaAttention(
                spec, layer_idx=layer_idx, settings=settings, score_settings=score_settings
            )
        case GatedDeltaSpec():
            return GatedDelta(
                spec,
                state_idx=_count_before(model, name, has_state=True),
                settings=settings,
                gate_settings=_make_gate_settings(planned, resources.pool),
            )
        case KimiDeltaSpec():
            return KimiDelta(
                spec,
                state_idx=_count_before(model, name, has_state=True),
                settings=settings,
                decay_settings=_make_gate_settings(planned, resources.pool),
            )
        case ShortConvSpec():
            state_idx = _count_before(model, name, has_state=True)
            return ShortConv(spec, state_idx=state_idx, settings=settings)
        case Mamba2Spec():
            return Mamba2(
                spec,
                state_idx=_count_before(model, name, has_state=True),
                settings=settings,
                step_settings=_make_gate_settings(planned, resources.pool),
            )
        case MlpSpec():
            return Mlp(spec, settings=settings)
        case RouterSpec():
            return Router(spec, settings=settings)
        case ExpertsSpec():
            return _build_experts(spec, planned, resources)
        case MoeBlockSpec():
            return MoeBlock(spec, dict(model.get_submodule(name).named_children()))
        case DecoderLayerSpec():
            return _build_layer(spec, model.get_submodule(name), name)
        case NormSpec():
            return RmsNorm(spec.size, spec.eps, spec.offset)
        case LayerNormSpec():
            return LayerNorm(spec)
        case RotarySpec():
            return build_rotary(spec)
        case EmbeddingSpec():
            return Embedding(spec.vocab_size, spec.hidden_size, spec.scale, stored=settings)
        case HeadSpec():
            return LmHead(
                spec.in_features,
                spec.out_features,
                has_bias=spec.has_bias,
                tied_to=model.get_input_embeddings if spec.is_tied else None,
                soft_cap=spec.soft_cap,
                scale=spec.scale,
                settings=settings,
            )
        case LinearSpec():
            return Linear(
                spec.in_features, spec.out_features, has_bias=spec.has_bias, settings=settings
            )
        case FrozenGatedDeltaSpec():
            return freeze_mixer(model.get_submodule(name), spec.rule, NativeScan(resources.pool))
        case FrozenLinearSpec():
            assert settings.weight_format is not None, "a frozen matrix is packed"
            return FrozenLinear(spec, settings=settings)
        case None:
            raise AssertionError(f"{name} stays a module of the skeleton")
        case _:
            assert_never(spec)


def _count_before(model: Any, name: str, *, has_state: bool) -> int:
    """Return how many layers before a mixer's own layer keep a state, or else KV."""
    layers = list(model.model.layers)[: model.get_submodule(name).layer_idx]
    is_one = _keeps_state if has_state else _keeps_kv
    return sum(any(map(is_one, layer.children())) for layer in layers)


def _keeps_state(module: Any) -> bool:
    return isinstance(module, GatedDelta | StateSpace) or is_state_mixer(module)


def _keeps_kv(module: Any) -> bool:
    if _shares_kv(module):
        return False
    if isinstance(module, Attention | MlaAttention) or hasattr(module, "kv_b_proj"):
        return True
    return not _keeps_state(module) and bool(find_projections(module))


def _shares_kv(module: Any) -> bool:
    if isinstance(module, Attention):
        return module.spec.shares_kv_of >= 0
    return bool(getattr(module, "is_kv_shared_layer", False))


def _make_gate_settings(planned: ModulePlan, pool: ThreadPool) -> MatrixSettings:
    name = planned.score_format
    return MatrixSettings(None if name == NO_FORMAT else find_format(name), pool)


def _make_settings(planned: ModulePlan, pool: ThreadPool) -> MatrixSettings:
    name = planned.weight_format
    weight_format = None if name == NO_FORMAT else find_format(name)
    return MatrixSettings(weight_format, pool, planned.keeps_codes)


def _build_experts(spec: ExpertsSpec, planned: ModulePlan, resources: Resources) -> RoutedExperts:
    if not spec.is_gated:
        return UngatedExperts(spec, _make_settings(planned, resources.pool))
    if planned.weight_format == NO_FORMAT:
        return Experts(spec)
    weight_format, caches = find_format(planned.weight_format), resources.caches
    if resources.share is not None:
        assert caches is not None, "experts on disk without a place"
        native: NativeExperts = DiskExperts(
            spec,
            weight_format=weight_format,
            pool=resources.pool,
            cache=caches.open(weight_format.name),
            share=resources.share,
        )
    else:
        nodes = len(resources.pool.node_ids)
        native = NativeExperts(
            spec,
            weight_format=weight_format,
            pool=resources.pool,
            cache=None if caches is None else caches.open(weight_format.name),
            num_parts=choose_expert_parts(resources.expert_parts, nodes, spec.intermediate_size),
        )
    return native if resources.staging is None else HostedExperts(native, resources.staging)


def build_rotary(spec: RotarySpec) -> Operator:
    """Build ``Rope``, or ``LayeredRope`` if the RoPE depends on the layer."""
    ropes = {name: Rope(rope, is_half=spec.is_half) for name, rope in spec.ropes.items()}
    return ropes[""] if len(ropes) == 1 and "" in ropes else LayeredRope(ropes)


def _build_layer(spec: DecoderLayerSpec, module: nn.Module, name: str) -> DecoderLayer:
    """Build a decoder layer from the operators that have replaced the module's children."""
    operators = {n: m for n, m in module.named_children() if isinstance(m, Operator)}
    norms = [operators[name] if name else None for name in spec.norms]
    first, attention_out, second, mlp_out = norms
    attention, mlp = operators[spec.mixer_name], operators[spec.mlp_name]
    assert isinstance(attention, Attention | MlaAttention | GatedDelta | StateSpace), attention
    assert isinstance(mlp, Mlp | MoeBlock), mlp
    for norm in norms:
        assert norm is None or isinstance(norm, RmsNorm), norm
    parts = LayerParts(first, attention, attention_out, second, mlp, mlp_out)  # type: ignore[arg-type]
    return DecoderLayer(
        parts,
        operators,
        spec.scale_name,
        beside=_take_beside(spec, operators),
        own_input=_take_input(spec, operators),
        layer_idx=int(name.rpartition(".")[2]),
    )


def _take_beside(spec: DecoderLayerSpec, operators: dict[str, Operator]) -> BesideExperts | None:
    if not spec.beside_norms:
        return None
    mlp_norm, norm, experts_norm = (operators[name] for name in spec.beside_norms)
    router, experts = operators["router"], operators["experts"]
    assert isinstance(mlp_norm, RmsNorm) and isinstance(norm, RmsNorm), spec
    assert isinstance(experts_norm, RmsNorm) and isinstance(router, Router), spec
    assert isinstance(experts, RoutedExperts), experts
    return BesideExperts(mlp_norm, router, norm, experts, experts_norm)


def _take_input(spec: DecoderLayerSpec, operators: dict[str, Operator]) -> LayerInput | None:
    if not spec.input_norm:
        return None
    gate, projection = operators["per_layer_input_gate"], operators["per_layer_projection"]
    norm = operators[spec.input_norm]
    assert isinstance(gate, Linear) and isinstance(projection, Linear), spec
    assert isinstance(norm, RmsNorm), norm
    return LayerInput(gate, projection, norm, spec.input_activation)
