"""The model that is tuned: transformers' modules with frozen weights that our sources read.

Attention, norms and dense blocks run in torch, which computes their gradients; routed experts are
our operator, with a native backward pass (``tandem.kernels.cpu.experts``). Only adapters are
trained.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import ConfigError
from tandem.core.model.layers import ExpertsSpec
from tandem.core.model.plan import NO_FORMAT, ModelPlan
from tandem.finetune.recipes.targets import find_expert_shapes
from tandem.finetune.training.expert_adapters import name_parameters
from tandem.kernels.operators.operator import Operator
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.models.families import Checkpoint, open_checkpoint
from tandem.models.loading.builders import Resources
from tandem.models.loading.injection import apply_plan, require_no_meta
from tandem.models.loading.loader import load_weights
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.planner import plan_model
from tandem.models.sources.containers import open_source
from tandem.models.sources.source import Progress
from tandem.placement.rules import parse_rules

__all__ = [
    "STORED",
    "FrozenModel",
    "count_weight_bytes",
    "find_planned_format",
    "load_frozen",
    "plan_training",
]

logger = logging.getLogger(__name__)
STORED = "stored"
"""Setting of a weight format that keeps the checkpoint's codes."""
KEEP_HEAD = parse_rules(
    "- match: {name: '^lm_head$'}\n  replace: {class: default}\n", "preferences"
)
"""Rule that keeps the head as transformers' module, because the losses of stage dpo multiply with
its weight themselves.
"""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A checkpoint that was loaded with frozen weights, and the plan by which they are stored."""

    model: Any
    """transformers' model; no parameter takes a gradient."""
    checkpoint: Checkpoint
    plan: ModelPlan


def _choose_format(name: str, *, is_bf16: bool) -> str:
    """Return the argument of ``plan_model`` for a format setting of ``load_frozen``.

    Raises: ConfigError (no such format).
    """
    if name == STORED:
        # The planner's auto keeps the codes of a checkpoint that has codes.
        return "auto"
    if name == NO_FORMAT or (name == "auto" and not is_bf16):
        return NO_FORMAT
    try:
        # The name stays as given: how large groups are may depend on the model's widths.
        wish = "bf16" if name == "auto" else name
        find_format(wish)
    except KeyError as error:
        raise ConfigError("finetune.choose_format", str(error), field="expert_format") from error
    return wish


def find_planned_format(plan: ModelPlan, *, is_expert: bool) -> WeightFormat | None:
    """Return the format of a plan's largest packed matrix; None if all of them are tensors.

    Args:
        plan: a plan made by ``plan_training``.
        is_expert: True for routed experts, False for all other matrices.
    """
    packed = [
        matrix
        for matrix in plan.matrices
        if (matrix.role == "experts") == is_expert and matrix.weight_format != NO_FORMAT
    ]
    largest = max(packed, key=lambda matrix: matrix.size_bytes, default=None)
    # Matrices that keep the codes of several formats are named by all of them.
    return None if largest is None else find_format(largest.weight_format.partition("+")[0])


def load_frozen(
    path_or_id: str,
    *,
    is_bf16: bool = False,
    expert_format: str = "auto",
    linear_format: str = "none",
    pool: ThreadPool | None = None,
    num_threads: int | None = None,
    is_head_packed: bool = True,
    context: int | None = None,
    progress: Progress | None = None,
) -> FrozenModel:
    """Load a checkpoint with frozen weights, to train adapters on it.

    Args:
        path_or_id: folder, hub id that was pulled before, or ``demo``.
        is_bf16: True for tensors in bfloat16, False for float32.
        expert_format: weight format of routed experts, or one of three words. ``none`` keeps
            tensors. ``auto`` is bf16 in a run in bf16, and ``none`` otherwise. ``stored`` keeps a
            checkpoint's codes in their own format, such as those of a GGUF file; a matrix without
            codes is packed as ``tandem serve`` packs it.
        linear_format: the same for attention, shared experts, dense blocks, and a head that does
            not share the embedding's matrix.
        pool: threads that run the native kernels, kept; None: a new pool.
        num_threads: threads of a new pool; None: as many as the machine allows.
        is_head_packed: False to keep the head as a tensor, whatever ``linear_format`` is.
        context: most tokens of a sequence, which decides between the factors of a LongRoPE; None:
            the model's own context.
        progress: called after each tensor.

    Raises: the errors of ``load_model``; ConfigError (no such format).
    """
    plan = plan_training(
        path_or_id,
        is_bf16=is_bf16,
        expert_format=expert_format,
        linear_format=linear_format,
        is_head_packed=is_head_packed,
        context=context,
    )
    for choice in (plan.experts, plan.linear):
        if "groups of" in choice.reason:
            logger.warning("event=groups format=%s why=%r", choice.weight_format, choice.reason)
    checkpoint = open_checkpoint(path_or_id)
    if pool is None:
        pool = ThreadPool(num_threads or recommend_threads(read_topology()).threads)
    # Without a named attention implementation transformers chooses the fastest one of this
    # architecture.
    model = build_skeleton(checkpoint.config, None)
    planned = [m.module for m in plan.modules if isinstance(m.spec, ExpertsSpec)]
    shapes = {name: _list_shapes(model.get_submodule(name)) for name in planned}
    apply_plan(model, plan, Resources(pool=pool))
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    with open_source(
        checkpoint.folder, dtype=dtype, progress=progress, quantization=checkpoint.quantization
    ) as source:
        load_weights(model, checkpoint, source)
    require_no_meta(model)
    for name, own in shapes.items():
        name_parameters(model.get_submodule(name), own, dtype)
    model.requires_grad_(False)
    model.config.use_cache = False
    # PEFT writes this attribute into the adapter's configuration as its base model.
    model.name_or_path = path_or_id
    return FrozenModel(model, checkpoint, plan)


def plan_training(
    path_or_id: str,
    *,
    is_bf16: bool = False,
    expert_format: str = "auto",
    linear_format: str = "none",
    is_head_packed: bool = True,
    context: int | None = None,
) -> ModelPlan:
    """Decide how the frozen weights of a checkpoint are stored and run. Arguments as for
    ``load_frozen``.

    Raises: the errors of ``plan_model``; ConfigError (no such format).
    """
    plan = plan_model(
        path_or_id,
        dtype="bfloat16" if is_bf16 else "float32",
        rules=None if is_head_packed else KEEP_HEAD,
        expert_format=_choose_format(expert_format, is_bf16=is_bf16),
        linear_format=_choose_format(linear_format, is_bf16=is_bf16),
        expert_parts=1,
        workload="training",
    )
    return plan if context is None else plan.serve(context)


def _list_shapes(experts: torch.nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of the parameters of transformers' module of routed experts, by name."""
    return {key: getattr(experts, key).shape for key in find_expert_shapes(experts)}


def count_weight_bytes(model: Any) -> int:
    """Return the bytes of all weights of a loaded model, packed ones included."""
    seen = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    tensors = sum(p.untyped_storage().nbytes() for p in seen.values())
    packed = [m.packed_bytes for m in model.modules() if isinstance(m, Operator)]
    return tensors + sum(packed)
