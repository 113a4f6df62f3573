"""Experts on disk: choice of memory and disk settings, and measurement of the disk's read speed.

``plan_tier`` sizes the memory; ``open_tier`` allocates it, and loading gives it to the layers.
"""

import time
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import nn

from tandem._native import DirectReader
from tandem.core.errors import ConfigError, TandemError
from tandem.core.model.layers import ExpertsSpec
from tandem.core.model.plan import NO_FORMAT, ExpertTierPlan, ModelPlan, MoeSpec
from tandem.kernels.cpu.expert_slots import ExpertTier
from tandem.kernels.cpu.tiered_experts import DiskExperts, TierShare
from tandem.kernels.guesses import ExpertGuess
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.placement.experts.cache import EXPERT_POLICIES
from tandem.placement.experts.tier import ExpertSizes, predict_missed_bytes, size_tier

__all__ = [
    "ReadRate",
    "follow_experts",
    "list_expert_sizes",
    "measure_reads",
    "open_tier",
    "plan_tier",
]

MIB = 1 << 20
MEASURED_BYTES = 48 * MIB
"""Bytes read at each queue depth: some tens of milliseconds on a disk of 1 to 7 GB/s."""
DEPTHS = ((4, 1024), (8, 1024), (16, 512), (32, 256))
"""Queue depths to measure, each with the KiB of one read."""
DEFAULT_DEPTH = (16, 512)
MEASURE_TIMEOUT_MS = 2_000
"""Timeout of a measurement in milliseconds; a slower disk is measured by what it read until
then.
"""


class ReadRate(NamedTuple):
    """Read speed of a disk, and the number of parallel reads and the size of each that reach it."""

    depth: int
    part_bytes: int
    bytes_per_s: float
    """Bytes per second; 0 if it could not be measured."""


def list_expert_sizes(plan: ModelPlan) -> ExpertSizes | None:
    """Return number and size of a plan's routed experts; None if it has no packed ones."""
    packed = [m for m in plan.matrices if m.role == "experts"]
    if not packed or any(m.weight_format == NO_FORMAT for m in packed):
        return None
    if any(isinstance(m.spec, ExpertsSpec) and not m.spec.is_gated for m in plan.modules):
        # The file of packed experts has no layout for experts without a gate, so they cannot stay
        # on disk.
        return None
    top_k = max(layer.mlp.top_k for layer in plan.layers if isinstance(layer.mlp, MoeSpec))
    return ExpertSizes(
        num_layers=len(packed),
        num_experts=max(m.shape[0] for m in packed),
        top_k=top_k,
        expert_bytes=max(m.size_bytes // m.shape[0] for m in packed),
    )


def plan_tier(
    plan: ModelPlan, *, budget_bytes: int, wanted_slots: int, policy: str, read_rate: ReadRate
) -> ModelPlan:
    """Return the plan with its experts on disk.

    Args:
        plan: the model's plan.
        budget_bytes: memory for experts.
        wanted_slots: as for ``size_tier``.
        policy: a name of ``EXPERT_POLICIES``.
        read_rate: measured speed of the disk.

    Raises: ConfigError (no routed experts, or none that are packed; not even one slot fits).
    """
    sizes = list_expert_sizes(plan)
    if sizes is None:
        what = (
            "only routed experts in a weight format can stay on disk, and this model has none: "
            "give it more memory, or an --expert-format"
        )
        raise ConfigError("models.plan_tier", what, field="model.expert_slots")
    tier = size_tier(sizes, budget_bytes=budget_bytes, wanted_slots=wanted_slots)
    return msgspec.structs.replace(
        plan,
        # Parts on NUMA nodes are copies in memory, so experts that stay on disk have a single part.
        expert_parts=1,
        tier=ExpertTierPlan(
            num_slots=tier.num_slots,
            num_layers=sizes.num_layers,
            num_staged=tier.num_staged,
            slot_bytes=tier.slot_bytes,
            policy=policy,
            depth=read_rate.depth,
            part_bytes=read_rate.part_bytes,
            read_rate=read_rate.bytes_per_s,
            missed_bytes=predict_missed_bytes(sizes, tier.num_slots),
            reason=tier.reason,
        ),
    )


def open_tier(plan: ExpertTierPlan) -> TierShare:
    """Reserve the memory for experts on disk; return each layer's share.

    Raises: CapacityError (not enough memory).
    """
    num_slots = plan.num_slots * plan.num_layers
    reader = DirectReader(
        (num_slots + plan.num_staged) * plan.slot_bytes,
        depth=plan.depth,
        part_bytes=plan.part_bytes,
    )
    tier = ExpertTier(
        reader,
        slot_bytes=plan.slot_bytes,
        num_slots=num_slots,
        num_staged=plan.num_staged,
        # An expert that was read from disk may always be inserted into a slot, since that costs no
        # more than keeping it in the staging area.
        max_insertions=plan.num_slots,
        alignment=DirectReader.ALIGNMENT,
    )
    return TierShare(tier, plan.num_slots, EXPERT_POLICIES[plan.policy])


def follow_experts(model: nn.Module) -> None:
    """Let each layer's experts on disk be guessed and read ahead, while the layer before
    computes.
    """
    before: DiskExperts | None = None
    for block in model.modules():
        if not isinstance(block, MoeBlock):
            continue
        parts = dict(block.named_children())
        router, experts = parts.get(block.spec.gate_name), parts.get("experts")
        if not isinstance(experts, DiskExperts):
            continue
        if before is not None and isinstance(router, Router):
            experts.tiered.follow(before.tiered, ExpertGuess(router))
        before = experts


def measure_reads(folder: Path, read_bytes: int) -> ReadRate:
    """Read parts of a folder's largest file as experts are read; return the best depth and its
    rate.

    Takes a fraction of a second. The rate is 0 if nothing can be measured.

    Args:
        folder: folder of the checkpoint, or of packed weights.
        read_bytes: size of one expert.
    """
    files = [p for p in (folder.iterdir() if folder.is_dir() else [folder]) if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size, default=None)
    default = ReadRate(DEFAULT_DEPTH[0], DEFAULT_DEPTH[1] << 10, 0.0)
    if largest is None:
        return default
    found: list[ReadRate] = []
    for i, (depth, part_kib) in enumerate(DEPTHS):
        try:
            rate = _measure(largest, read_bytes, depth, part_kib << 10, i * MEASURED_BYTES)
        except TandemError:
            return default
        found.append(ReadRate(depth, part_kib << 10, rate))
    return max(found, key=lambda rate: rate.bytes_per_s)


def _measure(path: Path, read_bytes: int, depth: int, part_bytes: int, start: int) -> float:
    size = path.stat().st_size
    length = max(1, min(read_bytes, size))
    span = DirectReader.count_span(DirectReader.ALIGNMENT - 1, length)
    count = max(1, min(ceil(MEASURED_BYTES / length), size // length))
    reader = DirectReader(span * count, depth=depth, part_bytes=part_bytes)
    file = reader.add_file(str(path))
    reader.array()[:] = 0  # Pages are there, as they are when it serves.
    # Each queue depth reads another part of the file, as far as the file is large enough.
    first = start % (size - count * length + 1)
    begin = time.perf_counter()
    reads = [reader.begin(file, first + i * length, length, i * span) for i in range(count)]
    for read in reads:
        reader.finish(read, MEASURE_TIMEOUT_MS)
    return count * length / (time.perf_counter() - begin)
