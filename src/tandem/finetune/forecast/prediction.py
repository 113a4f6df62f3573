"""Prediction of a run's memory and time before it is started: `tandem finetune --dry-run`.

Weights are counted from the ``ModelPlan``, the step is simulated (``fake_step``), its time follows
from rates that are measured now (``machine_speed``), and the number of steps from the data. No
weight is read.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from tandem._native import read_topology, recommend_threads
from tandem.core.errors import ConfigError, TandemError
from tandem.core.model.plan import ModelPlan
from tandem.finetune.data.dataset import prepare_data
from tandem.finetune.data.templates import load_tokenizer
from tandem.finetune.forecast.fake_step import StepCost, StepShape, simulate_step
from tandem.finetune.forecast.machine_speed import measure_speed
from tandem.finetune.recipes.recipe import MethodKeys, Recipe, make_recipe
from tandem.finetune.training.expert_adapters import adapt_model
from tandem.finetune.training.model import STORED, find_planned_format, plan_training
from tandem.finetune.training.output_folder import check_folders
from tandem.finetune.training.schedule import plan_schedule
from tandem.finetune.training.trainer import (
    check_packages,
    count_steps,
    make_lora_config,
)
from tandem.kernels.weights.formats import WeightFormat
from tandem.models.families import open_checkpoint
from tandem.models.loading.skeleton import build_skeleton

__all__ = ["DataShape", "MemoryPart", "RunPrediction", "predict_run"]

OPTIMIZER_BYTES = 8
"""Bytes of AdamW's state for each trained weight: two moments in float32."""
GRADIENT_BYTES = 4
WEIGHT_BYTES = 4
"""Bytes of a trained weight; adapters are float32 in every run."""
LEAST_CUTOFF = 128
Costs = dict[tuple[StepShape, MethodKeys], StepCost]


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a run's predicted memory: what it is, on which device, its bytes, and why they
    are needed.
    """

    name: str
    device: str
    size_bytes: int
    why: str


class DataShape(msgspec.Struct, frozen=True, kw_only=True):
    """The number and the lengths of a run's training rows, on which the prediction depends."""

    num_rows: int
    """Number of training rows of an epoch; a pair of answers counts as one."""
    longest: int
    """Tokens of the longest sequence, after the cutoff and packing."""
    num_tokens: int
    """Tokens of all sequences of an epoch. A pair has two sequences, each the prompt with an
    answer.
    """
    num_bad_rows: int = 0
    num_too_short: int = 0
    problem: str = ""
    """Reason why the data could not be read; empty if it was. The other figures are then assumed:
    ``max_samples`` rows (1,000 if it is not set), all as long as the cutoff.
    """


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted memory and time of a run, and changes of its recipe if the memory does not
    suffice.
    """

    parts: tuple[MemoryPart, ...]
    available_bytes: int
    data: DataShape
    trainable_parameters: int
    num_steps: int
    step_s: float
    tokens_per_s: float
    """Training tokens per second, without padding."""
    changes: tuple[str, ...] = ()
    """Changes of the recipe, as ``key=value``, that reduce the memory until the run fits, in the
    order in which to make them; empty if it fits without.
    """
    changed_bytes: int = 0
    """Bytes that the run needs at its peak with all of ``changes``."""
    problems: tuple[str, ...] = ()
    """Reasons other than memory for which the run would be refused."""

    @property
    def total_bytes(self) -> int:
        """Bytes that the run needs at its peak, on all devices together."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """True if the available memory suffices for the run, as predicted."""
        return self.total_bytes <= self.available_bytes

    @property
    def total_s(self) -> float:
        """Predicted seconds of training, without loading and evaluation."""
        return self.num_steps * self.step_s


def predict_run(recipe: Recipe, *, available_bytes: int | None = None) -> RunPrediction:
    """Predict the memory and the time of a run.

    Args:
        recipe: the run's recipe.
        available_bytes: memory that the run may use; None: the memory that is free now and what
            this process holds.

    Raises: the errors of ``plan_model``. An error in reading the data, or a refusal of the run's
        folders, becomes one of the prediction's ``problems`` instead.
    """
    data = _read_data(recipe)
    if available_bytes is None:
        available_bytes = _count_available() + _count_resident()
    costs: Costs = {}
    parts, cost, trainable = _count_memory(recipe, data, costs)
    step_s = _predict_step_s(recipe, data, cost)
    num_steps = count_steps(recipe, data.num_rows)
    epochs = num_steps * _rows_per_step(recipe) / max(data.num_rows, 1)
    total_s = num_steps * step_s
    changes: list[str] = []
    changed_bytes = total = sum(part.size_bytes for part in parts)
    if total > available_bytes:
        changes, changed_bytes = _find_changes(recipe, data, costs, available_bytes)
    return RunPrediction(
        parts=parts,
        available_bytes=available_bytes,
        data=data,
        trainable_parameters=trainable,
        num_steps=num_steps,
        step_s=step_s,
        tokens_per_s=data.num_tokens * epochs / total_s if total_s else 0.0,
        changes=tuple(changes),
        changed_bytes=changed_bytes,
        problems=tuple(_list_problems(recipe, data, num_steps)),
    )


def _list_problems(recipe: Recipe, data: DataShape, num_steps: int) -> Iterator[str]:
    """Yield the reasons other than memory for which the run would be refused."""
    if data.problem:
        yield data.problem
    for check in (partial(check_folders, recipe), partial(plan_schedule, recipe.train, num_steps)):
        try:
            check()
        except TandemError as error:
            yield str(error)


def _count_sequences(recipe: Recipe) -> int:
    """Return the number of sequences that a row of data adds to a batch: 2 for a pair of answers,
    else 1.
    """
    return 2 if recipe.method.stage == "dpo" else 1


def _rows_per_step(recipe: Recipe) -> int:
    return recipe.train.per_device_train_batch_size * recipe.train.gradient_accumulation_steps


def _read_data(recipe: Recipe) -> DataShape:
    try:
        check_packages(recipe)
        tokenizer = load_tokenizer(open_checkpoint(recipe.model.model_name_or_path))
        data = prepare_data(recipe, tokenizer)
    except TandemError as error:
        rows, tokens = recipe.data.max_samples or 1000, recipe.data.cutoff_len
        num_tokens = rows * tokens * _count_sequences(recipe)
        return DataShape(num_rows=rows, longest=tokens, num_tokens=num_tokens, problem=str(error))
    if recipe.method.stage == "dpo":
        lengths = [length for example in data.train for length in example.lengths]
    else:
        lengths = [len(example.token_ids) for example in data.train]
    return DataShape(
        num_rows=len(data.train),
        longest=max(lengths),
        num_tokens=sum(lengths),
        num_bad_rows=len(data.bad_rows),
        num_too_short=data.num_unlearnable,
    )


def _count_memory(
    recipe: Recipe, data: DataShape, costs: Costs
) -> tuple[tuple[MemoryPart, ...], StepCost, int]:
    """Return the parts of the memory at the peak, the cost of one step, and the number of trained
    weights.

    ``costs`` has the results of the steps simulated so far; a new result is added.
    """
    plan = _plan_weights(recipe)
    experts = plan.expert_bytes
    others = plan.weight_bytes - experts
    checkpoint = open_checkpoint(recipe.model.model_name_or_path)
    trainable = 0

    def adapt(model: Any) -> Any:
        model.name_or_path = recipe.model.model_name_or_path
        return adapt_model(model, make_lora_config(recipe, model), is_empty=True)

    whole = build_skeleton(checkpoint.config, None)
    trainable = sum(p.numel() for p in adapt(whole).parameters() if p.requires_grad)
    batch = min(recipe.train.per_device_train_batch_size, data.num_rows)
    batch *= _count_sequences(recipe)
    width = min(data.longest, recipe.data.cutoff_len)
    is_bf16 = recipe.train.bf16
    packed = find_planned_format(plan, is_expert=True)
    packed_linear = find_planned_format(plan, is_expert=False)
    shape = StepShape(
        num_rows=batch,
        num_tokens=width,
        is_bf16=is_bf16,
        has_packed_experts=packed is not None,
        has_f32_experts=packed is not None and packed.name == "f32",
        has_packed_linear=packed_linear is not None,
        is_checkpointed=recipe.train.gradient_checkpointing,
        has_reference=recipe.method.stage == "dpo",
    )
    key = (shape, recipe.method)
    if key not in costs:

        def make_skeleton() -> Any:
            checkpoint = open_checkpoint(recipe.model.model_name_or_path)
            return build_skeleton(checkpoint.config, None)

        costs[key] = simulate_step(make_skeleton, plan.layers, shape, adapt)
    cost = costs[key]
    trained = f"{trainable:,} weights of rank {recipe.method.lora_rank}"
    kept = "kept for the backward pass: "
    kept += "inputs of layers" if recipe.train.gradient_checkpointing else "all layers"
    rows_name = "rows" if not shape.has_reference else "chosen and rejected answers"
    rows = (
        ("libraries", _count_resident(), "this process now"),
        ("routed experts", experts, f"frozen, {_tell_format(packed, is_bf16=is_bf16)}"),
        ("other weights", others, f"frozen, {_tell_format(packed_linear, is_bf16=is_bf16)}"),
        ("adapters", trainable * WEIGHT_BYTES, f"{trained}, float32"),
        ("gradients", trainable * GRADIENT_BYTES, "float32"),
        ("optimizer", trainable * OPTIMIZER_BYTES, "two moments, float32"),
        ("activations", cost.kept_bytes, f"{kept}, {batch} {rows_name} of {width} tokens"),
        ("temporaries", cost.temporary_bytes, "of the loss and the backward pass"),
    )
    parts = tuple(
        MemoryPart(name=name, device="cpu", size_bytes=size, why=why) for name, size, why in rows
    )
    return parts, cost, trainable


def _tell_format(packed: WeightFormat | None, *, is_bf16: bool) -> str:
    if packed is not None:
        return f"packed as {packed.name}"
    return "tensors in bfloat16" if is_bf16 else "tensors in float32"


def _plan_weights(recipe: Recipe) -> ModelPlan:
    return plan_training(
        recipe.model.model_name_or_path,
        is_bf16=recipe.train.bf16,
        expert_format=recipe.model.expert_format,
        linear_format=recipe.model.linear_format,
        is_head_packed=recipe.method.stage != "dpo",
        context=recipe.data.cutoff_len,
    )


def _predict_step_s(recipe: Recipe, data: DataShape, cost: StepCost) -> float:
    is_bf16 = recipe.train.bf16
    plan = _plan_weights(recipe)
    spec = plan.spec
    threads = recipe.model.cpu_infer or recommend_threads(read_topology()).threads
    batch = min(recipe.train.per_device_train_batch_size, data.num_rows)
    tokens = batch * _count_sequences(recipe) * min(data.longest, recipe.data.cutoff_len)
    speed = measure_speed(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.moe_intermediate_size if spec.num_experts else 0,
        rows_per_expert=tokens * spec.top_k // max(spec.num_experts, 1),
        expert_format=find_planned_format(plan, is_expert=True),
        linear_format=find_planned_format(plan, is_expert=False),
        is_bf16=is_bf16,
        num_threads=threads,
    )
    # A batch is as wide as its longest row, and most batches have no row of the greatest length:
    # the mean of both lengths is assumed.
    mean = data.num_tokens / (data.num_rows * _count_sequences(recipe))
    share = (mean + min(data.longest, recipe.data.cutoff_len)) / 2 / max(data.longest, 1)
    return speed.predict_s(cost) * recipe.train.gradient_accumulation_steps * min(share, 1.0)


def _find_changes(
    recipe: Recipe, data: DataShape, costs: Costs, available_bytes: int
) -> tuple[list[str], int]:
    """Return the ``key=value`` changes that make the run fit, and the bytes that it then needs.

    Changes are tried in the order of ``_list_changes``, and those that save no memory are left out.
    If all together do not suffice, all are returned.
    """
    values = {key: value for key, value in recipe.flatten().items() if value is not None}
    parts, _, _ = _count_memory(recipe, data, costs)
    total = sum(part.size_bytes for part in parts)
    kept: list[str] = []
    is_coded = any(matrix.stored_bytes for matrix in _plan_weights(recipe).matrices)
    for change in _list_changes(recipe, is_coded=is_coded):
        try:
            changed = make_recipe({**values, **change})
            smaller = sum(part.size_bytes for part in _count_memory(changed, data, costs)[0])
        except ConfigError:
            continue
        if smaller >= total:
            continue
        values, total = {**values, **change}, smaller
        kept += [f"{key}={_render(value)}" for key, value in change.items()]
        if total <= available_bytes:
            break
    return kept, total


def _render(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list_changes(recipe: Recipe, *, is_coded: bool) -> list[dict[str, Any]]:
    """Return the changes of a recipe that may save memory, in the order in which to try them.

    First come those that change no result, then those that change the rounding, then those that
    change what is trained.

    Args:
        recipe: the recipe that does not fit.
        is_coded: True if the checkpoint has codes, which may be kept.
    """
    rows = _rows_per_step(recipe)
    tries: list[dict[str, Any]] = []
    if recipe.train.per_device_train_batch_size > 1:
        tries.append({"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows})
    tries += [{"gradient_checkpointing": True}, {"bf16": True}]
    if is_coded:
        tries += [{"expert_format": STORED}, {"linear_format": STORED}]
    tries += [
        {"expert_format": "int8"},
        {"linear_format": "int8"},
        {"expert_format": "int4"},
        {"linear_format": "int4"},
    ]
    cutoff = recipe.data.cutoff_len // 2
    while cutoff >= LEAST_CUTOFF:
        tries.append({"cutoff_len": cutoff})
        cutoff //= 2
    if recipe.method.lora_rank > 4:
        tries.append({"lora_rank": 4})
    return tries


def _count_available() -> int:
    """Return the bytes of memory that are free now, within the limit of the control group."""
    topology = read_topology()
    limit = topology.limits.memory_limit_bytes
    available = topology.memory_available_bytes
    return available if limit is None else min(available, limit)


def _count_resident() -> int:
    """Return the bytes of memory that this process holds now and that are not mapped from files."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
