"""A plan as text for people: the rule for each module, the layers, and memory use."""

import re
from collections.abc import Iterator, Sequence

from tandem.core.model.layers import (
    GatedDeltaSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    MixerSpec,
    MlaSpec,
    ShortConvSpec,
)
from tandem.core.model.plan import NO_FORMAT, LayerSpec, MatrixPlan, ModelPlan, MoeSpec
from tandem.kernels.weights.formats import find_format
from tandem.placement.rules import DEFAULT

__all__ = ["list_formats", "render_plan"]

MIB = 1 << 20
BUILT_IN = "built-in:"


def list_formats(plan: ModelPlan) -> list[tuple[str, str, str]]:
    """Return rows (item, value, reason) of the formats in which a model's matrices are held: which,
    how many MiB of each, why, and in what they are multiplied.
    """
    experts = [m for m in plan.matrices if m.role == "experts"]
    others = [m for m in plan.matrices if m.role not in ("experts", "router", "embedding")]
    rows = [("experts", *_tell_formats(experts))] if experts else []
    return [*rows, ("linear", *_tell_formats(others))] if others else rows


def _tell_formats(matrices: Sequence[MatrixPlan]) -> tuple[str, str]:
    """Return the formats of some matrices with their sizes, the largest first, and the reasons."""
    sizes: dict[str, int] = {}
    reasons: dict[str, dict[str, None]] = {}
    for matrix in matrices:
        name = matrix.weight_format
        sizes[name] = sizes.get(name, 0) + matrix.size_bytes
        reasons.setdefault(name, {})[matrix.reason] = None
    names = sorted(sizes, key=lambda name: -sizes[name])
    # Reasons with a beginning in common are told as one.
    told: dict[str, dict[str, None]] = {}
    for reason in (each for name in names for each in reasons[name]):
        begin, _, detail = reason.partition(": ")
        told.setdefault(begin, {})[detail] = None
    why = [": ".join(filter(None, (begin, ", ".join(each)))) for begin, each in told.items()]
    products = " and ".join(dict.fromkeys(map(_name_products, names)))
    value = ", ".join(_tell_size(name, sizes[name]) for name in names)
    return value, "; ".join([*why, f"products of {products}"])


def _tell_size(name: str, size_bytes: int) -> str:
    name = "tensors" if name == NO_FORMAT else name
    return f"{name} {size_bytes / MIB:.0f} MiB" if size_bytes else name


def _name_products(name: str) -> str:
    if name == NO_FORMAT:
        return "torch"
    first = find_format(name.partition("+")[0])
    if first.is_integer:
        return "int8"
    return "float32" if first.name == "f32" else "bf16"


def render_plan(plan: ModelPlan) -> str:
    """Return the plan as text; layers that differ only in number share a line."""
    lines = [f"{plan.spec.name}: {plan.spec.dtype_reason}", ""]
    lines += _align([("layers", "attention", "RoPE", "MLP"), *_list_layers(plan)])
    lines += ["", *_align([("module", "class", "operator", "rule", "note"), *_list_modules(plan)])]
    head = ("matrix", "role", "shape", "format", "MiB", "stored", "why")
    lines += ["", *_align([head, *_list_matrices(plan)])]
    lines += ["", *_tell_rules(plan)]
    return "\n".join(lines)


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(n) for cell, n in zip(row[:-1], widths, strict=True)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def _list_layers(plan: ModelPlan) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in plan.layers:
        rope = layer.rope
        angles = "-" if rope is None else f"{rope.rope_type} {rope.rope_theta:g}"
        if rope is not None and rope.rope_type == "longrope":
            angles += f", {'long' if rope.is_long else 'short'} factors"
        key = (_tell_mixer(layer.mixer), angles, _tell_mlp(layer))
        groups.setdefault(key, []).append(layer.index)
    for key, indexes in groups.items():
        is_run = indexes == list(range(indexes[0], indexes[-1] + 1))
        which = f"{indexes[0]}-{indexes[-1]}" if is_run else f"{len(indexes)}: {indexes[0]}, ..."
        yield (which, *key)


def _tell_mixer(spec: MixerSpec | None) -> str:
    if spec is None:
        return "-"
    if isinstance(spec, MlaSpec):
        return f"mla {spec.num_heads}/1 heads of {spec.head}"
    if isinstance(spec, GatedDeltaSpec):
        heads = f"{spec.num_v_heads}/{spec.num_k_heads} heads of {spec.key_dim} x {spec.value_dim}"
        return f"gated delta {heads}, convolution {spec.conv_width}"
    if isinstance(spec, KimiDeltaSpec):
        heads = f"{spec.num_heads} heads of {spec.head_dim}"
        return f"kimi delta {heads}, convolution {spec.conv_width}"
    if isinstance(spec, ShortConvSpec):
        return f"convolution {spec.conv_width} of {spec.hidden_size} channels"
    if isinstance(spec, Mamba2Spec):
        heads = f"{spec.num_heads}/{spec.num_groups} heads of {spec.state_dim} x {spec.head_dim}"
        return f"mamba2 {heads}, convolution {spec.conv_width}"
    words = [f"gqa {spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"]
    words += [f"window {spec.window}"] if spec.window else []
    words += [f"chunks of {spec.chunk}"] if spec.chunk else []
    words += ["sinks"] if spec.has_sinks else []
    words += ["output gate"] if spec.has_out_gate else []
    words += ["q/k norm"] if spec.qk_norm is not None else []
    return ", ".join(words)


def _tell_mlp(layer: LayerSpec) -> str:
    mlp = layer.mlp
    if mlp is None:
        return "-"
    if not isinstance(mlp, MoeSpec):
        return f"mlp {mlp.intermediate_size}"
    shared = f", shared {mlp.shared_intermediate_size}" if mlp.shared_intermediate_size else ""
    return f"moe {mlp.top_k} of {mlp.num_experts} x {mlp.intermediate_size}{shared}"


def _list_modules(plan: ModelPlan) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    for module in plan.modules:
        pattern = re.sub(r"\d+", "*", module.module)
        note = re.sub(r"\.\d+", ".*", module.note)
        key = (pattern, module.class_name, module.operator, module.rule or "-", note)
        groups.setdefault(key, []).append(module.module)
    for (pattern, *cells), members in groups.items():
        yield (_name_group(pattern, members), *cells)


def _list_matrices(plan: ModelPlan) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[MatrixPlan]] = {}
    for matrix in plan.matrices:
        pattern = re.sub(r"\d+", "*", matrix.module)
        shape = "x".join(map(str, matrix.shape))
        key = (pattern, matrix.role, shape, matrix.weight_format, matrix.reason)
        groups.setdefault(key, []).append(matrix)
    for (pattern, role, shape, weight_format, reason), members in groups.items():
        size = sum(matrix.size_bytes for matrix in members)
        stored = sum(matrix.stored_bytes for matrix in members)
        name = _name_group(pattern, [matrix.module for matrix in members])
        sizes = (f"{size / MIB:.1f}", f"{stored / MIB:.1f}" if stored else "-")
        yield (name, role, shape, weight_format, *sizes, reason)


def _name_group(pattern: str, members: list[str]) -> str:
    return members[0] if len(members) == 1 else f"{pattern} x{len(members)}"


def _tell_rules(plan: ModelPlan) -> list[str]:
    replaced = sum(module.operator != DEFAULT for module in plan.modules)
    lines = [
        f"{replaced} of {len(plan.modules)} modules are operators of ours; all weights take "
        f"{plan.weight_bytes / MIB:.1f} MiB, of which a token reads {plan.token_bytes / MIB:.1f}."
    ]
    packed, stored = plan.stored_bytes
    if stored:
        lines.append(
            f"matrices without the embedding and routers: {packed / MIB:.1f} MiB packed, "
            f"{stored / MIB:.1f} in the checkpoint, {packed / stored:.3f} of it."
        )
    unused = [place for place in plan.unused_rules if not place.startswith(BUILT_IN)]
    lines += [f"not used: {note}" for note in plan.notes]
    lines += [f"unused: {place} matched no module" for place in unused]
    for place, by in plan.shadowed_rules.items():
        if not place.startswith(BUILT_IN):
            lines.append(f"shadowed: {place}, all its modules went to {', '.join(by)}")
    lines += [f"cannot be loaded: {m.problem}" for m in plan.modules if m.problem]
    return lines
