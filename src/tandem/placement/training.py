"""LoRA fine-tuning on a described machine: memory by device, and the time of a step.

As in KTransformers, frozen routed experts are in DRAM and computed by the CPU, everything else is
on the GPUs; without a GPU everything is on the CPU. Times use ``costs`` with the efficiencies of
serving: nothing is fitted to published training figures.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.placement.catalog import (
    PublishedTraining,
    find_hardware,
    find_model,
    read_published,
)
from tandem.placement.costs import Efficiencies, Placement, chunk_time
from tandem.placement.hardware import HardwareSpec
from tandem.placement.planner import DeviceMemory
from tandem.placement.shape import FORMAT_BYTES, ModelShape, read_shape

__all__ = [
    "TrainingFigure",
    "TrainingPlan",
    "TrainingWishes",
    "list_training",
    "plan_training_on",
    "predict_training",
]

GIB = 1 << 30
EXPERT_PRODUCTS = 16 / 6
"""Work of a routed expert in a training step relative to its forward pass: the backward pass
computes gate and up again and three gradients of inputs (KTransformers counts 6 and 10 of H x I).
"""
DENSE_PASSES, CHECKPOINTED_PASSES = 2, 3
"""Passes over all matrices except routed experts in a training step. Their weights get no gradient,
so these are forward and backward; with checkpointing, forward again.
"""
HANDOVERS = 2
"""Round trips from GPU to CPU and back in a layer per training step: one in the forward pass and
one in the backward pass.
"""
TRAINED_BYTES = 16
"""Bytes of a trained weight: value, gradient and two moments, in float32."""
KEPT_ITEMS = 34 / 2
"""Items in bf16, as a multiple of the hidden size, that a layer keeps per token for its backward
pass: Korthikanti et al. (arXiv 2205.05198) count 34 bytes without attention's scores, which fused
attention does not keep.
"""
LOGIT_BYTES = 10
"""Bytes of a logit: bf16, and float32 for the loss and its gradient."""
CONTEXT_BYTES = GIB * 3 // 4
"""Bytes on each GPU for CUDA's context and kernels."""


class TrainingWishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a training run that affect memory and time."""

    tokens: Annotated[int, Meta(ge=1)]
    """Tokens of a micro-batch: rows times their length."""
    accumulation: Annotated[int, Meta(ge=1)] = 1
    """Micro-batches of a step."""
    rank: Annotated[int, Meta(ge=1)] = 8
    is_checkpointed: bool = False
    """True if layers keep only their inputs and are recomputed in the backward pass."""
    expert_format: str = "bf16"
    dense_format: str = "bf16"


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted memory of a training run, by device, and its speed."""

    memory: tuple[DeviceMemory, ...]
    trainable_parameters: int
    step_s: float
    tokens_per_s: float

    @property
    def fits(self) -> bool:
        """True if the memory of each kind of device suffices for the run."""
        return all(memory.used_bytes <= memory.capacity_bytes for memory in self.memory)

    def find_used(self, device: str) -> int:
        """Return the bytes that the run uses on a kind of device; 0 if there is no such device."""
        return sum(memory.used_bytes for memory in self.memory if memory.device == device)


class TrainingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure of a training run (speed or memory), and what the cost model predicts for
    it.
    """

    row: str
    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction relative to the published figure."""
        return self.predicted / self.published - 1


def plan_training_on(
    spec: HardwareSpec, shape: ModelShape, wishes: TrainingWishes, eff: Efficiencies
) -> TrainingPlan:
    """Predict a training run's memory and speed on a machine.

    Args:
        spec: the machine.
        shape: the model.
        wishes: the run.
        eff: shares of the peaks that are reached.
    """
    place = Placement(
        expert_format=wishes.expert_format,
        dense_format=wishes.dense_format,
        sockets=spec.sockets,
        accelerators=spec.num_accelerators,
        parallel="pipeline",
        is_dense_on_gpu=spec.num_accelerators > 0,
        is_attention_on_gpu=spec.num_accelerators > 0,
    )
    tokens = wishes.tokens
    parts = chunk_time(
        spec, shape, place, eff, tokens=tokens, context=tokens / 2, heads=tokens
    ).parts
    passes = CHECKPOINTED_PASSES if wishes.is_checkpointed else DENSE_PASSES
    seconds = passes * (parts.gpu + parts.cpu)
    seconds += EXPERT_PRODUCTS * (parts.cpu_experts + parts.gpu_experts)
    seconds += HANDOVERS * parts.handover
    trainable = wishes.rank * sum(layer.adapter_items for layer in shape.layers)
    return TrainingPlan(
        memory=_count_memory(spec, shape, wishes, trainable),
        trainable_parameters=trainable,
        step_s=seconds * wishes.accumulation,
        tokens_per_s=tokens / seconds,
    )


def _count_memory(
    spec: HardwareSpec, shape: ModelShape, wishes: TrainingWishes, trainable: int
) -> tuple[DeviceMemory, ...]:
    tokens, width = wishes.tokens, shape.hidden_size
    layer_bytes = 2 * KEPT_ITEMS * tokens * width
    kept = len(shape.layers) * layer_bytes
    if wishes.is_checkpointed:
        kept = len(shape.layers) * 2 * tokens * width + layer_bytes
    others = shape.num_weights - shape.expert_weights
    parts = {
        "frozen weights": round(others * FORMAT_BYTES[wishes.dense_format]),
        "adapters, gradients, optimizer": trainable * TRAINED_BYTES,
        "activations": round(kept),
        "logits": tokens * shape.vocab_size * LOGIT_BYTES,
    }
    dram: dict[str, int] = {}
    if shape.expert_weights:
        size = shape.expert_weights * FORMAT_BYTES[wishes.expert_format]
        dram["routed experts"] = round(size)
        kept_experts = sum(
            2 * 2 * tokens * layer.top_k * layer.expert_weights // (3 * width)
            for layer in shape.moe_layers
        )
        dram["activations of experts"] = kept_experts
    memory: list[DeviceMemory] = []
    gpu = spec.accelerator
    if gpu is None:
        dram = {**parts, **dram}
    elif spec.is_unified:
        parts["contexts of the GPUs"] = spec.num_accelerators * CONTEXT_BYTES
        dram = {**parts, **dram}
    else:
        parts["contexts of the GPUs"] = spec.num_accelerators * CONTEXT_BYTES
        capacity = spec.accelerator_memory_bytes
        memory.append(DeviceMemory(device="GPU", capacity_bytes=capacity, parts=parts))
    if dram:
        memory.append(DeviceMemory(device="DRAM", capacity_bytes=spec.memory_bytes, parts=dram))
    return tuple(memory)


def predict_training(row: PublishedTraining, eff: Efficiencies) -> list[TrainingFigure]:
    """Predict the figures of a published run: speed, VRAM and DRAM."""
    shape = read_shape(find_model(row.model).config, row.model)
    wishes = TrainingWishes(
        tokens=row.tokens, accumulation=row.accumulation, rank=row.rank,
        is_checkpointed=row.is_checkpointed,
    )  # fmt: skip
    planned = plan_training_on(find_hardware(row.machine), shape, wishes, eff)
    told = (
        ("tokens/s", row.rate, planned.tokens_per_s),
        ("VRAM GB", row.vram_gb, planned.find_used("GPU") / 1e9),
        ("DRAM GB", row.dram_gb, planned.find_used("DRAM") / 1e9),
    )
    return [
        TrainingFigure(row=row.id, what=what, published=published, predicted=predicted)
        for what, published, predicted in told
    ]


def list_training(eff: Efficiencies) -> list[TrainingFigure]:
    """Return the published and predicted figures of all published training runs, in the file's
    order.
    """
    return [figure for row in read_published().training for figure in predict_training(row, eff)]
