"""The layers with routed experts, and whether a model can defer some experts."""

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.model.layers import DecoderLayerSpec, ExpertsSpec
from tandem.core.model.plan import LayerSpec, ModelPlan, ModulePlan, MoeSpec
from tandem.kernels.routing import MoeLayers

__all__ = ["check_deferral", "find_moe_layers"]

FUSED = "DecoderLayer"


def check_deferral(
    num_deferred: int, layers: tuple[LayerSpec, ...], modules: tuple[ModulePlan, ...]
) -> None:
    """Refuse to defer experts if the model has too few, or layers that are not fused.

    Raises:
        ConfigError: more experts than a token has, or a model without experts.
        UnsupportedError: layers run as transformers' modules.
    """
    if not num_deferred:
        return
    where, field = "models.plan_deferral", "model.deferred_experts"
    top_k = {layer.mlp.top_k for layer in layers if isinstance(layer.mlp, MoeSpec)}
    if not top_k:
        what = f"{num_deferred} experts are to be deferred, but the model has no routed experts"
        raise ConfigError(where, f"{what}: leave it out", field=field)
    if num_deferred > min(top_k):
        what = f"{num_deferred} experts are to be deferred, but a token has {min(top_k)}"
        raise ConfigError(where, f"{what}: give at most as many", field=field)
    if _count_kinds(layers) > 1:
        what = "layers with different numbers of experts defer none: leave it out"
        raise UnsupportedError(where, what, field=field)
    if any(isinstance(m.spec, ExpertsSpec) and m.spec.scales_input for m in modules):
        what = "experts whose inputs the router scales are not deferred: leave it out"
        raise UnsupportedError(where, what, field=field)
    if any(isinstance(m.spec, DecoderLayerSpec) and m.spec.beside_norms for m in modules):
        what = "experts beside an MLP, whose sum is normed, are not deferred: leave it out"
        raise UnsupportedError(where, what, field=field)
    if sum(module.operator == FUSED for module in modules) < len(layers):
        what = "experts are deferred between layers that run as one operator; this model's do not"
        raise UnsupportedError(where, f"{what}: leave it out", field=field)


def _count_kinds(layers: tuple[LayerSpec, ...]) -> int:
    specs = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeSpec)]
    return len({(spec.num_experts, spec.top_k) for spec in specs})


def find_moe_layers(plan: ModelPlan) -> MoeLayers | None:
    """Return the layers with routed experts; None if there are none, or they differ in size."""
    specs = {layer.index: layer.mlp for layer in plan.layers if isinstance(layer.mlp, MoeSpec)}
    if _count_kinds(plan.layers) != 1:
        return None
    first = next(iter(specs.values()))
    return MoeLayers(
        places={layer_idx: place for place, layer_idx in enumerate(specs)},
        num_layers=len(plan.layers),
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_deferred=plan.num_deferred_experts,
    )
