"""Measurement of this machine's speed at the kinds of work that a training step consists of.

Each kind is timed at the sizes of the run on one thread, by that thread's CPU time, so that other
load on the machine changes no figure. The speed of one thread is multiplied by the number of
threads.

Shapes: T rows, D hidden, F intermediate of an expert.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem._native import ThreadPool
from tandem.finetune.forecast.fake_step import (
    EXPERT_BACKWARD_PRODUCTS,
    EXPERT_FORWARD_PRODUCTS,
    StepCost,
)
from tandem.kernels.cpu.autograd import multiply_frozen, run_experts
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.weights.formats import WeightFormat

__all__ = ["MachineSpeed", "measure_speed"]

LEAST_S = 0.05
"""Shortest measurement of a kind of work, in seconds of the thread's CPU time."""
MEMORY_THREADS = 8
"""Number of threads up to which memory traffic is assumed to grow in proportion; further threads
add little.
"""
MAX_ROWS = 512
MAX_WIDTH = 4096
"""Largest width of the matrices that are timed."""
NUM_EXPERTS = 2
COPIED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Measured rates of this machine for products, copies and small operations, all cores
    together.
    """

    torch_flops_per_s: float
    native_flops_per_s: float
    bytes_per_s: float
    operation_s: float
    """Seconds of CPU time that torch and autograd take for an operation on a few numbers."""

    def predict_s(self, cost: StepCost) -> float:
        """Return the predicted seconds of a step: its products, its other memory traffic, and the
        overhead of each operation, added up.
        """
        products_s = cost.torch_flops / self.torch_flops_per_s
        products_s += cost.native_flops / self.native_flops_per_s
        rest_s = cost.moved_bytes / self.bytes_per_s
        return products_s + rest_s + cost.num_operations * self.operation_s


def measure_speed(
    *,
    hidden_size: int,
    intermediate_size: int,
    rows_per_expert: int,
    expert_format: WeightFormat | None,
    linear_format: WeightFormat | None,
    is_bf16: bool,
    num_threads: int,
) -> MachineSpeed:
    """Measure this machine: time products of the run's shapes and formats, a copy, and tiny
    operations.

    Args:
        hidden_size: D.
        intermediate_size: F of a routed expert; 0: the model has none.
        rows_per_expert: rows that an expert computes in a step.
        expert_format: weight format of routed experts; None: torch computes them.
        linear_format: weight format of the other matrices; None: torch multiplies with them.
        is_bf16: True if torch multiplies in bfloat16, False for float32.
        num_threads: threads of the run.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(
            hidden_size,
            intermediate_size,
            max(1, min(rows_per_expert, MAX_ROWS)),
            expert_format,
            linear_format,
            torch.bfloat16 if is_bf16 else torch.float32,
            num_threads,
        )
    finally:
        torch.set_num_threads(before)


def _measure(
    hidden_size: int,
    intermediate_size: int,
    rows: int,
    expert_format: WeightFormat | None,
    linear_format: WeightFormat | None,
    dtype: torch.dtype,
    num_threads: int,
) -> MachineSpeed:
    pool = ThreadPool(1)
    width = min(hidden_size, MAX_WIDTH)
    left, right = torch.ones(MAX_ROWS, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    torch_s = _time(lambda: left @ right)
    torch_flops = 2 * MAX_ROWS * width * width
    native_flops_per_s = torch_flops / torch_s
    if expert_format is not None and intermediate_size:
        native_flops_per_s = _time_experts(
            expert_format, hidden_size, intermediate_size, rows, dtype, pool
        )
    elif linear_format is not None:
        native_flops_per_s = _time_linear(linear_format, width, dtype, pool)
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = _time(lambda: target.copy_(source))
    small = torch.zeros(8, requires_grad=True)
    operation_s = _time(lambda: (small + 1.0).sum().backward()) / 5
    return MachineSpeed(
        torch_flops / torch_s * num_threads,
        native_flops_per_s * num_threads,
        2 * COPIED_BYTES / copy_s * min(num_threads, MEMORY_THREADS),
        operation_s,
    )


def _time(call: Callable[[], object]) -> float:
    call()
    begin_s, num_calls = time.thread_time(), 0
    while (elapsed_s := time.thread_time() - begin_s) < LEAST_S:
        call()
        num_calls += 1
    return elapsed_s / num_calls


def _time_experts(
    weight_format: WeightFormat,
    hidden: int,
    inner: int,
    rows: int,
    dtype: torch.dtype,
    pool: ThreadPool,
) -> float:
    """Return the FLOP/s of a forward and a backward pass through a few packed experts."""
    gate_up = torch.full((NUM_EXPERTS, 2 * inner, hidden), 0.01, dtype=torch.bfloat16)
    down = torch.full((NUM_EXPERTS, hidden, inner), 0.01, dtype=torch.bfloat16)
    experts = PackedExperts.pack(weight_format, gate_up, down, pool=pool)
    x = torch.ones(rows * NUM_EXPERTS, hidden, dtype=dtype, requires_grad=True)
    ids = (torch.arange(len(x)) % NUM_EXPERTS)[:, None]
    weights = torch.ones(len(x), 1)

    def step() -> None:
        run_experts(experts, x, ids, weights).sum().backward()

    products = EXPERT_FORWARD_PRODUCTS + EXPERT_BACKWARD_PRODUCTS
    return 2 * len(x) * products * hidden * inner / _time(step)


def _time_linear(
    weight_format: WeightFormat, width: int, dtype: torch.dtype, pool: ThreadPool
) -> float:
    weight = torch.full((width, width), 0.01, dtype=torch.bfloat16)
    matrix = PackedLinear.pack(weight_format, weight, None, pool=pool)
    x = torch.ones(MAX_ROWS, width, dtype=dtype, requires_grad=True)
    seconds = _time(lambda: multiply_frozen(matrix, x).sum().backward())
    return 4 * MAX_ROWS * width * width / seconds
