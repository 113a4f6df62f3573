"""The decoder layers of a skeleton as data, and the properties of the whole model that follow."""

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import msgspec
from torch import nn

from tandem.core.errors import UnsupportedError
from tandem.core.model.layers import (
    ExpertsSpec,
    GqaSpec,
    MixerSpec,
    MlaSpec,
    MlpSpec,
    OperatorSpec,
    RopeSpec,
    RotarySpec,
    RouterSpec,
    StateMixerSpec,
)
from tandem.core.model.plan import AdapterPlace, LayerSpec, MatrixPlan, MoeSpec
from tandem.core.spec import ModelSpec
from tandem.models.planning.describe import (
    Describe,
    Describer,
    describe_attention,
    describe_experts,
    describe_gated_delta,
    describe_kept_attention,
    describe_kimi_delta,
    describe_mamba2,
    describe_mla_attention,
    describe_mlp,
    describe_rotary,
    describe_router,
    describe_short_conv,
)
from tandem.models.planning.probes import UnfitModuleError
from tandem.models.planning.roles import (
    RawMatrix,
    count_experts,
    find_base_part,
    find_down,
    find_gate_up,
    find_projections,
    is_experts,
    is_gated,
)
from tandem.models.planning.state_mixers import is_kimi_delta, is_mamba2, is_state_mixer

__all__ = ["complete_spec", "list_layers", "place_matrices"]


def list_layers(describer: Describer) -> tuple[LayerSpec, ...]:
    """Return the decoder layers of a skeleton.

    Raises: UnsupportedError (a layer has no attention or no MLP that is known).
    """
    model = describer.model
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise UnsupportedError(
            "models.read_layers", f"{type(model).__name__} has no list of layers where it should be"
        )
    ropes = _list_ropes(describer)
    found: list[LayerSpec] = []
    for index, layer in enumerate(layers):
        mixer = _read_mixer(layer, index, describer)
        has_kv = isinstance(mixer, GqaSpec | MlaSpec)
        rope = ropes[mixer.rope_idx] if has_kv and ropes else None
        mlp = _read_mlp(layer, index, describer)
        if mixer is None and mlp is None:
            what = (
                f"layer {index}, {type(layer).__name__}, has no attention, MLP or experts we know"
            )
            raise UnsupportedError("models.read_layers", what)
        found.append(LayerSpec(index=index, mixer=mixer, rope=rope, mlp=mlp))
    return tuple(found)


def place_matrices(
    layers: tuple[LayerSpec, ...],
    matrices: Iterable[MatrixPlan],
    adapters: Iterable[AdapterPlace],
) -> tuple[tuple[LayerSpec, ...], tuple[MatrixPlan, ...]]:
    """Return the layers with their matrices and adapter places, and the matrices outside of
    layers.
    """
    own: dict[int, list[MatrixPlan]] = {layer.index: [] for layer in layers}
    places: dict[int, list[AdapterPlace]] = {layer.index: [] for layer in layers}
    others: list[MatrixPlan] = []
    for matrix in matrices:
        index = _find_index(matrix.module)
        (others if index is None else own[index]).append(matrix)
    for place in adapters:
        index = _find_index(place.module)
        if index is not None:
            places[index].append(place)
    complete = tuple(
        msgspec.structs.replace(
            layer, matrices=tuple(own[layer.index]), adapters=tuple(places[layer.index])
        )
        for layer in layers
    )
    return complete, tuple(others)


def _find_index(module: str) -> int | None:
    """Return the number of the layer that a module belongs to; None outside of the layers."""
    found = re.match(r"model\.layers\.(\d+)\.", module)
    return None if found is None else int(found[1])


def _list_ropes(describer: Describer) -> list[RopeSpec]:
    try:
        path = find_base_part(describer.model, "rotary")[0]
        found = describer.describe(path, describe_rotary)
    except (UnfitModuleError, AttributeError):
        return []
    assert isinstance(found, RotarySpec), found
    return list(found.ropes.values())


def _read_mixer(layer: nn.Module, index: int, describer: Describer) -> MixerSpec | None:
    for name, module in layer.named_children():
        if hasattr(module, "kv_b_proj"):
            describe = describe_mla_attention
        elif find_projections(module):
            describe = describe_attention
        elif is_state_mixer(module):
            describe = _choose_state_mixer(module)
        else:
            continue
        path = f"model.layers.{index}.{name}"
        try:
            found = describer.describe(path, describe)
        except UnfitModuleError as error:
            kept = None
            if describe is describe_attention:
                kept = _try(describer, path, describe_kept_attention)
            if kept is None:
                raise UnsupportedError("models.read_layers", f"layer {index}: {error}") from error
            found = kept
        assert isinstance(found, MixerSpec), found
        return found
    if len(_list_parts(layer)) == 1:
        return None
    raise UnsupportedError(
        "models.read_layers", f"layer {index}, {type(layer).__name__}, has no attention we know"
    )


def _list_parts(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a layer that hold matrices: a mixer and an MLP, or one of them."""
    return [m for m in layer.children() if any(p.dim() > 1 for p in m.parameters())]


def _choose_state_mixer(module: Any) -> Describe:
    if is_mamba2(module):
        return describe_mamba2
    if is_kimi_delta(module):
        return describe_kimi_delta
    return describe_gated_delta if hasattr(module, "A_log") else describe_short_conv


def _read_mlp(layer: nn.Module, index: int, describer: Describer) -> MlpSpec | MoeSpec | None:
    own: Any = getattr(layer, "experts", None)
    if own is not None and is_experts(own):
        # The layer has routed experts in parallel with an MLP that every token uses.
        return _read_experts(layer, f"model.layers.{index}", describer)
    for name, module in layer.named_children():
        part: Any = module
        path = f"model.layers.{index}.{name}"
        if find_gate_up(part):
            found = _try(describer, path, describe_mlp)
            if isinstance(found, MlpSpec):
                return found
            names, down_name = find_gate_up(part), find_down(part)
            down = getattr(part, down_name)
            return MlpSpec(
                hidden_size=down.out_features,
                intermediate_size=down.in_features,
                has_bias=down.bias is not None,
                activation=None,
                gate_up_names=names,
                down_name=down_name,
                is_gated=is_gated(names),
            )
        experts = getattr(part, "experts", None)
        if experts is not None and is_experts(experts):
            return _read_experts(part, path, describer)
    if len(_list_parts(layer)) == 1:
        return None
    raise UnsupportedError(
        "models.read_layers",
        f"layer {index}, {type(layer).__name__}, has no MLP or experts we know",
    )


def _read_experts(block: Any, path: str, describer: Describer) -> MoeSpec:
    count, _, inner = count_experts(block.experts, describer.model.config.hidden_size)
    children: list[Any] = [child for child in block.children() if find_gate_up(child)]
    gate = "gate" if hasattr(block, "gate") else "router"
    router = _try(describer, f"{path}.{gate}", describe_router) if hasattr(block, gate) else None
    experts = _try(describer, f"{path}.experts", describe_experts)
    return MoeSpec(
        num_experts=count,
        top_k=_find_top_k(block),
        intermediate_size=inner,
        shared_intermediate_size=sum(
            getattr(child, find_down(child)).in_features for child in children
        ),
        has_bias=hasattr(block.experts, "down_proj_bias"),
        router=router if isinstance(router, RouterSpec) else None,
        experts=experts if isinstance(experts, ExpertsSpec) else None,
    )


def _try(describer: Describer, path: str, describe: Describe) -> OperatorSpec | None:
    """Return the spec that ``describe`` gives for the module at a path; None if no operator
    computes the module.
    """
    try:
        return describer.describe(path, describe)
    except UnfitModuleError:
        return None


def _find_top_k(block: nn.Module) -> int:
    for part in (block, *block.children()):
        top_k = getattr(part, "top_k", None)
        if isinstance(top_k, int):
            return top_k
        stated = getattr(getattr(part, "config", None), "top_k_experts", None)
        if isinstance(stated, int):
            return stated
    raise UnsupportedError(
        "models.read_layers", f"{type(block).__name__} does not say how many experts a token uses"
    )


def complete_spec(
    spec: ModelSpec, layers: tuple[LayerSpec, ...], matrices: list[RawMatrix], num_vectors: int
) -> ModelSpec:
    """Return ``spec`` completed with facts that only the modules tell: experts, windows, counts."""
    moe = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeSpec)]
    first = moe[0] if moe else None
    total = num_vectors + sum(prod(m.shape) for m in matrices if not m.is_shared)
    mixers = [layer.mixer for layer in layers]
    with_kv = [mixer for mixer in mixers if isinstance(mixer, GqaSpec | MlaSpec)]
    mixer = next(iter(with_kv), None)
    if mixer is None:
        what = "no layer has attention over all earlier tokens: give it one, as its KV is counted"
        raise UnsupportedError("models.read_layers", what)
    if isinstance(mixer, MlaSpec):
        spec = msgspec.structs.replace(
            spec,
            num_kv_heads=1,
            head_dim=mixer.head,
            kv_lora_rank=mixer.rank,
            rope_dim=mixer.rope,
        )
        spec = _add_index(spec, with_kv)
    spec = msgspec.structs.replace(spec, num_plain_layers=mixers.count(None))
    spec = _add_states(spec, [mixer for mixer in mixers if isinstance(mixer, StateMixerSpec)])
    attentions = [mixer for mixer in mixers if isinstance(mixer, GqaSpec | MlaSpec)]
    grouped = [mixer for mixer in attentions if isinstance(mixer, GqaSpec)]
    with_kv = [m for m in attentions if not isinstance(m, GqaSpec) or m.shares_kv_of < 0]
    spec = _add_sizes(spec, grouped)
    return msgspec.structs.replace(
        spec,
        num_experts=first.num_experts if first else 0,
        top_k=first.top_k if first else 0,
        moe_intermediate_size=first.intermediate_size if first else 0,
        num_moe_layers=len(moe),
        has_qk_norm=any(mixer.qk_norm is not None for mixer in grouped),
        has_sinks=any(mixer.has_sinks for mixer in grouped),
        sliding_window=max((mixer.reach for mixer in grouped), default=0),
        window_layers=tuple(
            i for i, mixer in enumerate(with_kv) if isinstance(mixer, GqaSpec) and mixer.reach
        ),
        num_shared_kv_layers=len(attentions) - len(with_kv),
        num_parameters=total,
        num_active_parameters=total - _count_idle(moe, spec.hidden_size),
    )


def _add_index(spec: ModelSpec, mixers: list[GqaSpec | MlaSpec]) -> ModelSpec:
    """Return ``spec`` with the size of index keys, by which sparse attention chooses tokens, and
    the layers that have them.
    """
    found = {
        i: mixer.index
        for i, mixer in enumerate(mixers)
        if isinstance(mixer, MlaSpec) and mixer.index is not None
    }
    dims = {index.dim for index in found.values()}
    if len(dims) > 1:
        what = f"layers have index keys of {len(dims)} sizes: all need one"
        raise UnsupportedError("models.read_layers", what)
    return msgspec.structs.replace(
        spec, index_dim=next(iter(dims), 0), index_layers=tuple(sorted(found))
    )


def _add_sizes(spec: ModelSpec, mixers: list[GqaSpec]) -> ModelSpec:
    """Return ``spec`` with the KV sizes of layers with and without a window.

    Raises: UnsupportedError (layers that see the same tokens have KV of several sizes).
    """
    if not mixers:
        return spec
    kinds: list[set[tuple[int, int]]] = [set(), set()]
    for mixer in mixers:
        kinds[bool(mixer.reach)].add((mixer.num_kv_heads, mixer.head_dim))
    for sizes in kinds:
        if len(sizes) > 1:
            what = f"layers that see the same tokens have KV of {len(sizes)} sizes: all need one"
            raise UnsupportedError("models.read_layers", what)
    whole, windows = (next(iter(sizes), None) for sizes in kinds)
    heads, head_dim = whole or windows or (spec.num_kv_heads, spec.head_dim)
    is_uneven = whole is not None and windows is not None and whole != windows
    return msgspec.structs.replace(
        spec,
        num_kv_heads=heads,
        head_dim=head_dim,
        window_sizes=windows if is_uneven else None,
    )


def _add_states(spec: ModelSpec, mixers: list[StateMixerSpec]) -> ModelSpec:
    """Return ``spec`` with the state layout of its layers.

    Raises: UnsupportedError (states of several sizes).
    """
    if not mixers:
        return spec
    first = mixers[0].state_sizes
    sizes = {mixer.state_sizes for mixer in mixers}
    if len(sizes) > 1:
        what = f"layers have states of {len(sizes)} sizes: all must have one"
        raise UnsupportedError("models.read_layers", what)
    return msgspec.structs.replace(
        spec,
        num_state_layers=len(mixers),
        state_heads=first.num_heads,
        state_key_dim=first.key_dim,
        state_value_dim=first.value_dim,
        conv_channels=first.num_channels,
        conv_width=first.conv_width,
    )


def _count_idle(moe: list[MoeSpec], hidden_size: int) -> int:
    """Return the number of weights of experts that a token is not routed to, biases included."""
    return sum(
        (layer.num_experts - layer.top_k)
        * (
            _count_matrices(layer) * layer.intermediate_size * _find_width(layer, hidden_size)
            + (2 * layer.intermediate_size + hidden_size) * layer.has_bias
        )
        for layer in moe
    )


def _count_matrices(layer: MoeSpec) -> int:
    return 2 if layer.experts is not None and not layer.experts.is_gated else 3


def _find_width(layer: MoeSpec, hidden_size: int) -> int:
    """Return the number of inputs of an expert: the hidden size, or a smaller latent size that the
    layer projects to before its experts.
    """
    return hidden_size if layer.experts is None else layer.experts.hidden_size
