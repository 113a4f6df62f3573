"""Planning of a model: the operator of each module, and the storage of each matrix.

Reads ``config.json`` and the rule file, but no weight. The skeleton is built on the meta device,
its modules are described once (``describe``), and rules choose operators (``assignment``); the
result is a ``ModelPlan``, from which loading builds operators without further decisions.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec

from tandem._native import read_topology
from tandem.core.errors import ConfigError
from tandem.core.model.layers import ExpertsSpec, HeadSpec
from tandem.core.model.plan import (
    NO_FORMAT,
    FormatChoice,
    LayerSpec,
    MatrixPlan,
    MatrixRole,
    ModelPlan,
    ModulePlan,
)
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.kernels.cpu import experts as native_experts
from tandem.kernels.cpu import linear as native_linear
from tandem.kernels.devices import has_native_kernels
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.kernels.weights.head_matrix import choose_head_format, count_head_bytes
from tandem.kernels.weights.recode import group_formats
from tandem.models.deferred_imports import computing_shapes
from tandem.models.families import Checkpoint, open_checkpoint
from tandem.models.identity import list_config_values
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.assignment import DefaultFormats, Workload, load_rules, plan_modules
from tandem.models.planning.deferral import check_deferral
from tandem.models.planning.describe import Describer
from tandem.models.planning.layers import complete_spec, list_layers, place_matrices
from tandem.models.planning.operators import FORMAT_KWARG
from tandem.models.planning.precision import (
    FormatChoices,
    choose_dtype,
    choose_expert_parts,
    choose_formats,
    set_auto_dtype,
)
from tandem.models.planning.roles import (
    RawMatrix,
    Vectors,
    list_adapter_places,
    list_matrices,
)
from tandem.models.planning.stored import StoredMatrix, StoredModel, read_stored
from tandem.placement.rules import Rule

__all__ = ["describe_model", "plan_model"]

PACKED_ROLES = ("qkv", "q_up", "attention_out", "gate_up", "down", "head")
"""Roles of the matrices that take the weight format of linear modules."""


@computing_shapes()
def describe_model(path_or_id: str | Path) -> ModelSpec:
    """Describe a checkpoint from its ``config.json`` and transformers' modules for it.

    Raises: the errors of ``plan_model`` that do not depend on settings and rules.
    """
    checkpoint = open_checkpoint(path_or_id)
    skeleton = build_skeleton(checkpoint.config)
    matrices, vectors = list_matrices(skeleton)
    stored = read_stored(checkpoint, matrices)
    layers = list_layers(Describer(skeleton))
    return _describe(checkpoint, layers, matrices, vectors, stored)


@computing_shapes()
def plan_model(
    path_or_id: str | Path,
    *,
    dtype: str = "auto",
    rules: str | Path | tuple[Rule, ...] | None = None,
    device: str = "cpu",
    expert_device: str = "auto",
    expert_format: str = "auto",
    linear_format: str = "auto",
    packed_cache: str = "off",
    expert_parts: int = 0,
    num_nodes: int | None = None,
    deferred_experts: int = 0,
    workload: Workload = "serving",
) -> ModelPlan:
    """Decide how a checkpoint will be stored and run.

    Args:
        path_or_id: a folder, or a hub id that was pulled before.
        dtype: ``auto`` (see ``ModelSpec.dtype_reason``), ``float32`` or ``bfloat16``.
        rules: rules, or a file of rules, with precedence over the built-in ones.
        device: where operators run.
        expert_device: where routed experts run: ``device``'s name, ``cpu``, or ``auto``, which
            means ``cpu`` unless ``expert_format`` is ``none``.
        expert_format: format of routed experts without a rule: a weight format, ``none`` or
            ``auto``.
        linear_format: format of the other matrices; with ``auto`` the embedding keeps a
            checkpoint's codes, otherwise it is a tensor.
        packed_cache: cache of packed experts: a folder, ``off`` or ``auto``.
        expert_parts: number of parts into which packed experts are split, each in memory of the
            NUMA node that computes it; 0: one for each of ``num_nodes``.
        num_nodes: NUMA nodes that have threads; None: all of this machine.
        deferred_experts: experts of an output token that are added one layer later.
        workload: set of built-in rules; in training, matrices that stay transformers' modules are
            tensors, and ``auto`` formats are those of serving.

    A module that does not fit its rule's operator becomes a ``problem`` of the plan; only loading
    raises an error for it.

    Raises:
        NotFoundError: no such checkpoint or rule file.
        CorruptionError: a JSON file does not parse.
        ConfigError: a configuration, rule or setting is wrong.
        ShapeError: a matrix is not whole groups of its weight format.
        UnsupportedError: the model is not supported; the text says what and why.
    """
    checkpoint = open_checkpoint(path_or_id)
    skeleton = build_skeleton(checkpoint.config)
    describer = Describer(skeleton)
    layers = list_layers(describer)
    raw, vectors = list_matrices(skeleton, is_absorbed=workload == "serving")
    stored = read_stored(checkpoint, raw)
    described = _describe(checkpoint, layers, raw, vectors, stored)
    spec = choose_dtype(described, dtype, is_coded=stored.has_any_codes)
    expert_device = _choose_expert_device(expert_device, device, spec, expert_format)
    choices = choose_formats(
        spec,
        expert_format=expert_format,
        linear_format=linear_format,
        device=device,
        expert_device=expert_device,
        linear_widths={m.shape[-1] for m in raw if m.role in PACKED_ROLES},
    )
    all_rules = load_rules(rules, workload)
    wishes = {"experts": expert_format, "linear": linear_format}
    kept = _keep_stored(stored, raw, wishes, {"experts": expert_device, "linear": device})
    formats = DefaultFormats(
        experts=choices.experts.weight_format,
        linear=choices.linear.weight_format,
        router=choices.router.weight_format,
        stored=kept,
        widths={matrix.module: matrix.shape[-1] for matrix in raw},
    )
    table, modules = plan_modules(describer, all_rules, device=device, formats=formats)
    nodes = len(read_topology().numa_nodes) if num_nodes is None else num_nodes
    matrices = _plan_matrices(
        raw, modules, choices, all_rules, spec, stored, kept, device, expert_device
    )
    complete, others = place_matrices(layers, matrices, list_adapter_places(skeleton))
    check_deferral(deferred_experts, complete, modules)
    return ModelPlan(
        folder=str(checkpoint.folder),
        spec=spec,
        device=device,
        expert_device=expert_device,
        config=list_config_values(checkpoint.config),
        layers=complete,
        modules=modules,
        other_matrices=others,
        vector_bytes=vectors.num_weights * DTYPE_BYTES[spec.dtype] + vectors.buffered_bytes,
        experts=choices.experts,
        linear=choices.linear,
        router=choices.router,
        expert_parts=choose_expert_parts(expert_parts, nodes, spec.moe_intermediate_size),
        packed_cache=packed_cache,
        num_deferred_experts=deferred_experts,
        notes=() if checkpoint.quantization is None else checkpoint.quantization.notes,
        unused_rules=tuple(all_rules[i].place for i in table.unused),
        shadowed_rules={
            all_rules[i].place: tuple(all_rules[j].place for j in by)
            for i, by in table.shadowed.items()
        },
    )


def _describe(
    checkpoint: Checkpoint,
    layers: tuple[LayerSpec, ...],
    matrices: list[RawMatrix],
    vectors: Vectors,
    stored: StoredModel,
) -> ModelSpec:
    experts = [stored.matrices.get(m.module) for m in matrices if m.role == "experts"]
    formats = {None if matrix is None else matrix.weight_format for matrix in experts}
    held = formats.pop() if len(formats) == 1 else None
    spec = msgspec.structs.replace(checkpoint.spec, expert_format="" if held is None else held.name)
    num_vectors = vectors.num_weights + vectors.num_buffered
    complete = complete_spec(spec, layers, matrices, num_vectors)
    return set_auto_dtype(complete, is_coded=stored.has_any_codes)


def _choose_expert_device(wish: str, device: str, spec: ModelSpec, expert_format: str) -> str:
    """Return the device on which routed experts run.

    Raises: ConfigError (neither the model's device nor the CPU).
    """
    if not spec.is_moe or has_native_kernels(device):
        return device
    if wish not in ("auto", "cpu", device):
        raise ConfigError(
            "models.plan",
            f"experts on {wish}, the model on {device}: give one of {device}, cpu and auto",
            field="model.expert_device",
        )
    is_on_host = wish == "cpu" or (wish == "auto" and expert_format != NO_FORMAT)
    return "cpu" if is_on_host else device


def _keep_stored(
    stored: StoredModel, raw: list[RawMatrix], wishes: dict[str, str], devices: dict[str, str]
) -> StoredModel:
    """Return the matrices that keep the format in which the checkpoint stores them, as no other was
    asked for and there are kernels for it.
    """
    groups = {matrix.module: "experts" if matrix.role == "experts" else "linear" for matrix in raw}
    return StoredModel(
        {
            name: matrix
            for name, matrix in stored.matrices.items()
            if wishes[groups[name]] == "auto" and has_native_kernels(devices[groups[name]])
        }
    )


def _plan_matrices(
    raw: list[RawMatrix],
    modules: tuple[ModulePlan, ...],
    choices: FormatChoices,
    rules: tuple[Rule, ...],
    spec: ModelSpec,
    stored: StoredModel,
    kept: StoredModel,
    device: str,
    expert_device: str,
) -> Iterator[MatrixPlan]:
    by_name = {module.module: module for module in modules}
    asked = {rule.place for rule in rules if FORMAT_KWARG in rule.kwargs}
    is_in_head = _shares_codes(raw, by_name)
    for holder, group in _group_by_holder(raw, by_name):
        module, role = by_name[holder], group[0].role
        plain = sum(prod(m.shape) for m in group) * DTYPE_BYTES[spec.dtype]
        runs = _choose_group_formats(module, group, kept)
        weight_format = "+".join(name for name, _ in runs)
        is_rows = role == "embedding" and is_in_head
        is_view = is_rows or (group[0].is_shared and _shares_tensor(raw, by_name, weight_format))
        shape = (sum(m.shape[0] for m in group), *group[0].shape[1:])
        yield MatrixPlan(
            module=holder,
            role=role,
            shape=shape,
            weight_format=_find_format(role, shape, weight_format),
            device=expert_device if role == "experts" else device,
            size_bytes=0
            if is_view
            else _count_bytes(role, shape, runs, plain, is_gated=_has_gate(module)),
            plain_bytes=0 if group[0].is_shared else plain,
            reason=_tell_stored(
                [stored.matrices[m.module] for m in group if m.module in stored.matrices],
                weight_format,
                _give_reason(module, role, choices, asked, is_view=is_view and not is_rows),
                is_kept=(module.keeps_codes or kept.find_format(holder) is not None)
                and module.rule not in asked,
            ),
            stored_bytes=sum(stored.size_bytes.get(m.module, 0) for m in group),
            rows=tuple((m.module, m.shape[0]) for m in group),
        )


def _shares_codes(raw: list[RawMatrix], by_name: dict[str, ModulePlan]) -> bool:
    """Return True if the embedding's rows are read from the codes of the LM head, which is tied to
    it.
    """
    embedding = next((by_name[m.module] for m in raw if m.role == "embedding"), None)
    head = next((by_name[m.module] for m in raw if m.role == "head" and m.is_shared), None)
    return (
        embedding is not None
        and head is not None
        and isinstance(head.spec, HeadSpec)
        and not head.spec.has_bias
        and embedding.weight_format == head.weight_format != NO_FORMAT
    )


def _shares_tensor(
    raw: list[RawMatrix], by_name: dict[str, ModulePlan], weight_format: str
) -> bool:
    """Return True if a tied head whose matrix has this weight format can use the embedding's
    tensor, which holds if both are plain tensors.
    """
    held = {by_name[m.module].weight_format for m in raw if m.role == "embedding"}
    return weight_format == NO_FORMAT and held <= {NO_FORMAT}


def _has_gate(module: ModulePlan) -> bool:
    return not isinstance(module.spec, ExpertsSpec) or module.spec.is_gated


def _choose_group_formats(
    module: ModulePlan, group: list[RawMatrix], kept: StoredModel
) -> list[tuple[str, int]]:
    """Return (format, outputs) of each run of matrices that are stacked into one, as
    ``read_matrix`` does.
    """
    if group[0].role == "gates" and module.spec is not None:
        return [(module.score_format, sum(m.shape[0] for m in group))]
    if module.keeps_codes:
        runs = _group_stored([kept.matrices.get(m.module) for m in group])
        if runs is not None:
            return [(held.name, sum(group[i].shape[0] for i in own)) for held, own in runs]
    return [(module.weight_format, sum(m.shape[0] for m in group))]


def _group_stored(
    stored: list[StoredMatrix | None],
) -> list[tuple[WeightFormat, list[int]]] | None:
    return group_formats([None if one is None else one.weight_format for one in stored])


def _find_format(role: MatrixRole, shape: tuple[int, ...], weight_format: str) -> str:
    if role != "head_matrices" or weight_format == NO_FORMAT:
        return weight_format
    chosen = choose_head_format(find_format(weight_format), shape[2])
    assert chosen is not None, weight_format
    return chosen.name


def _group_by_holder(
    raw: list[RawMatrix], by_name: dict[str, ModulePlan]
) -> Iterator[tuple[str, list[RawMatrix]]]:
    """Yield (module that holds them, matrices that it stacks into one), with runs of matrices in
    order.
    """
    run: list[RawMatrix] = []
    holder = ""
    for matrix in raw:
        owner = by_name[matrix.module].owner
        if not (run and owner and owner == holder):
            for group in _group_by_role(run):
                yield holder, group
            run = []
        holder = owner or matrix.module
        run.append(matrix)
    for group in _group_by_role(run):
        yield holder, group


def _group_by_role(run: list[RawMatrix]) -> list[list[RawMatrix]]:
    """Return groups of a module's matrices that are stacked: those of one role with equal inputs.

    Matrices of attention heads are not stacked.
    """
    groups: dict[tuple[MatrixRole, tuple[int, ...]], list[RawMatrix]] = {}
    for matrix in run:
        shape = matrix.shape if matrix.role == "head_matrices" else matrix.shape[1:]
        groups.setdefault((matrix.role, shape), []).append(matrix)
    return list(groups.values())


def _count_bytes(
    role: MatrixRole,
    shape: tuple[int, ...],
    runs: list[tuple[str, int]],
    plain: int,
    *,
    is_gated: bool,
) -> int:
    """Return the bytes of matrices stacked into one, in one format, or in several run by run."""
    if len(runs) > 1:
        return sum(
            native_linear.count_bytes(find_format(name), shape[1], rows) for name, rows in runs
        )
    weight_format = runs[0][0]
    if weight_format == NO_FORMAT:
        return plain
    packed = find_format(weight_format)
    if role == "experts":
        count, rows, hidden = shape
        if not is_gated:
            inner = rows // 2
            sizes = ((hidden, inner), (inner, hidden))
            return count * sum(native_linear.count_bytes(packed, *size) for size in sizes)
        return native_experts.count_bytes(packed, count, hidden, rows // 3)
    if role == "head_matrices":
        return count_head_bytes(packed, shape[0], shape[2], shape[1])
    return native_linear.count_bytes(packed, shape[1], shape[0])


def _tell_stored(
    matrices: list[StoredMatrix], weight_format: str, reason: str, *, is_kept: bool
) -> str:
    """Return the reason for a format, with a note on the checkpoint's codes if it has any."""
    storage = " and ".join(sorted({matrix.storage for matrix in matrices if matrix.storage}))
    if not storage:
        return reason
    runs = _group_stored(list(matrices))
    if runs is not None and "+".join(held.name for held, _ in runs) == weight_format:
        return f"as the checkpoint stores it: {storage}" if is_kept else f"{reason}: stored so"
    why = "".join(f", {why}" for why in sorted({m.why for m in matrices if m.why}))
    return f"{reason}; decoded from {storage}{why}"


def _give_reason(
    module: ModulePlan,
    role: MatrixRole,
    choices: FormatChoices,
    asked: set[str],
    *,
    is_view: bool,
) -> str:
    if is_view:
        return "the embedding's tensor"
    if module.rule in asked:
        return f"{module.rule} asks for it"
    if role == "embedding":
        return "rows are looked up"
    if module.operator == "default":
        return "a module of the skeleton"
    choice: FormatChoice = choices.linear
    if role in ("experts", "router", "gates"):
        choice = choices.experts if role == "experts" else choices.router
    return choice.reason
