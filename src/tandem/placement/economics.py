"""Prices of hardware per rate and size: for which phase each machine is cheapest, and the GPUs that
a plan replaces.
"""

import math
from collections.abc import Sequence

import msgspec

from tandem.placement.hardware import Accelerator, HardwareSpec
from tandem.placement.planner import Plan
from tandem.placement.shape import ModelShape

__all__ = ["MachineCost", "OperatorClass", "Replacement", "compare", "list_classes", "replace_by"]

GIB = 1 << 30
USABLE = 0.9
"""Share of a GPU's memory usable for weights and cache if a model is on GPUs alone."""
ROLES = {"usd_per_tflops": "prefill", "usd_per_gbps": "decode", "usd_per_gb": "KV"}


class MachineCost(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's price per unit of the resource that each phase needs."""

    name: str
    title: str
    price_usd: float
    usd_per_tflops: float
    """Price per bf16 TFLOPS, which prefill needs."""
    usd_per_gbps: float
    """Price per GB/s of memory bandwidth, which decode needs."""
    usd_per_gb: float
    """Price per decimal GB of memory, which KV and routed experts need."""
    roles: tuple[str, ...] = ()
    """Phases for which no other machine of the comparison is cheaper."""


class OperatorClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of operators in the cost table of the KTransformers talk: its size, and its
    operations per byte.
    """

    name: str
    definition: str
    items: int
    """Number of weights, or of items in the cache."""
    ops_per_byte: float
    """Operations of a decode step per byte of memory that the class takes."""


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of one kind that would hold what the machine's DRAM and GPU memory hold: number and
    price.
    """

    title: str
    count: int
    price_usd: float


def _measure(spec: HardwareSpec) -> tuple[float, float, float]:
    """Return a machine's bf16 TFLOPS, GB/s and GB, of processors and GPUs together; memory
    that they share counts once.
    """
    tflops = spec.cpu_tflops(is_int8=False)
    if spec.processor is not None and spec.processor.sustained_tflops:
        tflops = spec.processor.sustained_tflops * spec.sockets
    gbps, memory = spec.cpu_bandwidth_gbps, spec.memory_gib
    gpu, num = spec.accelerator, spec.num_accelerators
    if gpu is not None:
        tflops += num * gpu.bf16_tflops
        if not spec.is_unified:
            gbps += num * gpu.bandwidth_gbps
            memory += num * gpu.memory_gib
    return tflops, gbps, memory


def compare(specs: Sequence[HardwareSpec]) -> list[MachineCost]:
    """Return the machines' prices, each with the phases for which it is cheapest.

    GB are counted as memory is sold: the talk's 512 GB are 8 modules of 64.
    """
    costs: list[MachineCost] = []
    for spec in specs:
        tflops, gbps, memory = _measure(spec)
        costs.append(
            MachineCost(
                name=spec.name,
                title=spec.title,
                price_usd=spec.price_usd,
                usd_per_tflops=spec.price_usd / tflops,
                usd_per_gbps=spec.price_usd / gbps,
                usd_per_gb=spec.price_usd / memory,
            )
        )
    return [
        msgspec.structs.replace(
            cost,
            roles=tuple(
                role
                for field, role in ROLES.items()
                if getattr(cost, field) == min(getattr(other, field) for other in costs)
            ),
        )
        for cost in costs
    ]


def list_classes(shape: ModelShape, *, context: int, users: int) -> list[OperatorClass]:
    """Return the operator classes of the talk's table, for weights of one byte and KV of two.

    Args:
        shape: the model.
        context: tokens of each sequence.
        users: sequences that decode at once.
    """
    items = sum(layer.kv_items for layer in shape.layers) * context
    ops = sum(layer.decode_ops for layer in shape.layers) * context
    cache = shape.count_cache_bytes(context)
    classes = [
        OperatorClass(
            name="attention",
            definition=f"the cache of one sequence of {context} tokens, and the products with it",
            items=items,
            ops_per_byte=ops / cache,
        ),
        OperatorClass(
            name="norm, linear, shared experts",
            definition="all weights but routed experts: projections, dense MLPs, embedding, head",
            items=shape.num_weights - shape.expert_weights,
            ops_per_byte=2.0 * users,
        ),
    ]
    if shape.moe_layers:
        layer = shape.moe_layers[0]
        share = layer.top_k / layer.num_experts
        classes.append(
            OperatorClass(
                name="routed experts",
                definition="the experts that a router chooses from, read by the tokens they get",
                items=shape.expert_weights,
                ops_per_byte=2 * users * share,
            )
        )
    return classes


def replace_by(plan: Plan, gpus: Sequence[Accelerator]) -> list[Replacement]:
    """Return how many of each GPU would hold the plan's weights and cache, cheapest first."""
    size = sum(row.size_bytes for row in plan.classes)
    size += sum(memory.parts.get("KV and states", 0) for memory in plan.memory)
    found: list[Replacement] = []
    for gpu in gpus:
        count = math.ceil(size / (gpu.memory_gib * GIB * USABLE))
        found.append(Replacement(title=gpu.title, count=count, price_usd=count * gpu.price_usd))
    return sorted(found, key=lambda one: one.price_usd)
