"""`tandem bench gated-delta`: a Gated DeltaNet layer between its projections, against torch.

Convolution, gates, recurrence and gated norm of the shapes of known models, bfloat16 rows. The
rival is transformers' own formula in torch (in chunks for a prompt, token by token for a decode),
on one thread or as many as ours, whichever is faster. The ceiling is the slower of moving the
states once each way and doing four float32 operations per element of the state and token, in
registers. The time of the same layer's projections, packed as int8g128, is reported too: the rest
of the layer should be short compared with them.

A decode takes sequences' states from memory: as many layers in turn as leave no cache warm.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.torch.execution import TorchExecution
from tandem.kernels.weights.formats import find_format

__all__ = ["make_cases"]


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int
    k_heads: int
    v_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def keys(self) -> int:
        return self.k_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.value_dim


SHAPES = {
    "qwen3.6-35b-a3b": _Shape(2048, 16, 32, 128, 128),
    "qwen3.6-27b": _Shape(5120, 16, 48, 128, 128),
}
QUICK_SHAPES = ("qwen3.6-35b-a3b",)
ROWS = ((1, 1), (16, 1), (1, 64), (1, 2048))
"""Batches as (sequences, tokens per sequence)."""
COLD_BYTES = 160 << 20
OPERATIONS = 4
"""Float operations per element of the state and token: the decay, the update, and two sums."""
CHECKED_TOKENS = 48
LARGEST_ERROR = 0.02
"""Largest allowed relative error of bfloat16 results against float32."""


class _Case:
    def __init__(self, model: str, sequences: int, tokens: int) -> None:
        self.shape, self.sequences, self.tokens = SHAPES[model], sequences, tokens
        self.nth, self.rival_threads = 0, 1
        self.generator = torch.Generator().manual_seed(0)

    def _draw(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=self.generator) * scale

    @cached_property
    def threads(self) -> _native.ThreadPool:
        return _native.ThreadPool(_native.recommend_threads(_native.read_topology()).threads)

    @cached_property
    def family(self) -> Any:
        return importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")

    def prepare(self) -> None:
        s = self.shape
        self.rule = GatedDeltaRule(
            self._draw(s.conv_width, 2 * s.keys + s.values, scale=0.5),
            self._draw(s.v_heads).exp(),
            self._draw(s.v_heads) - 2,
            self._draw(s.value_dim),
            num_k_heads=s.k_heads,
            key_dim=s.key_dim,
            norm_eps=1e-6,
        )
        self.execution = CpuExecution(self.threads)
        total = self.sequences * self.tokens
        self.rows = GatedDeltaRows(
            self._draw(total, 2 * s.keys + s.values).bfloat16(),
            self._draw(total, s.values).bfloat16(),
            self._draw(total, s.v_heads).bfloat16(),
            self._draw(total, s.v_heads).bfloat16(),
            range(0, total + 1, self.tokens),
            range(self.sequences),
        )
        slot_bytes = 4 * s.values * s.key_dim * self.sequences
        count = max(1, -(-COLD_BYTES // slot_bytes)) if self.tokens == 1 else 1
        self.layers = [
            StateSlots.allocate(self.rule, self.sequences, torch.bfloat16) for _ in range(count)
        ]
        packed = find_format("int8g128")
        self.x = self._draw(total, s.hidden).bfloat16()
        self.projections = [
            PackedLinear.pack(packed, self._draw(*size, scale=0.02), pool=self.threads)
            for size in ((2 * (s.keys + s.values + s.v_heads), s.hidden), (s.hidden, s.values))
        ]
        self.mixed = self._draw(total, s.values).bfloat16()
        self.multiplier = PackedLinear.pack(
            find_format("f32"), self._draw(64, 64), pool=self.threads
        )

    def check(self) -> str:
        self.prepare()
        torch.set_num_threads(self.threads.num_threads)
        size = min(CHECKED_TOKENS, self.tokens)
        rows, wide = self._cut_rows(size, torch.bfloat16), self._cut_rows(size, torch.float32)
        slots = StateSlots.allocate(self.rule, 1, torch.bfloat16)
        wide_slots = StateSlots.allocate(self.rule, 1, torch.float32)
        got = self.execution.gated_delta(self.rule, rows, slots)
        want = TorchExecution().gated_delta(self.rule, wide, wide_slots)
        error = float((got.float() - want).norm() / want.norm())
        if not error <= LARGEST_ERROR:
            return f"relative error {error:.4f}, at most {LARGEST_ERROR} is allowed"
        times = {}
        for threads in sorted({1, self.threads.num_threads}):
            self.rival_threads = threads
            times[threads] = min(self.time_rival() for _ in range(2))
        self.rival_threads = min(times, key=lambda threads: times[threads])
        return "ok"

    def _cut_rows(self, size: int, dtype: torch.dtype) -> GatedDeltaRows:
        rows = self.rows
        return GatedDeltaRows(
            rows.x_TC[:size].to(dtype),
            rows.z_TVv[:size].to(dtype),
            rows.a_TVd[:size].to(dtype),
            rows.b_TV[:size].to(dtype),
            [0, size],
            [0],
        )

    def run_ours(self) -> None:
        self.nth = (self.nth + 1) % len(self.layers)
        self.execution.gated_delta(self.rule, self.rows, self.layers[self.nth])

    @torch.inference_mode()
    def run_rival(self) -> None:
        s, n, t = self.shape, self.sequences, self.tokens
        padded = F.pad(self.rows.x_TC.view(n, t, -1), (0, 0, s.conv_width - 1, 0))
        weight = self.rule.conv_WC.T[:, None].bfloat16()
        mixed = F.silu(F.conv1d(padded.transpose(1, 2), weight, groups=weight.shape[0]))
        q, k, v = mixed.transpose(1, 2).split([s.keys, s.keys, s.values], -1)
        g = -self.rule.decay_rate_V * F.softplus(self.rows.a_TVd.float() + self.rule.decay_bias_Vd)
        scan = self.family.torch_recurrent_gated_delta_rule
        if t > 1:
            scan = self.family.torch_chunk_gated_delta_rule
        out, _ = scan(
            q.unflatten(-1, (s.k_heads, -1)),
            k.unflatten(-1, (s.k_heads, -1)),
            v.unflatten(-1, (s.v_heads, -1)),
            g=g.view(n, t, -1),
            beta=self.rows.b_TV.sigmoid().view(n, t, -1),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        normed = torch.rms_norm(out.float(), (s.value_dim,), self.rule.norm_v, 1e-6)
        z = self.rows.z_TVv.view(out.shape)
        (normed * F.silu(z.float())).bfloat16()

    def time_rival(self) -> float:
        torch.set_num_threads(self.rival_threads)
        return time_call(self.run_rival) * 1e3

    def time_ceiling(self) -> float:
        states = self.layers[(self.nth + 1) % len(self.layers)].states.tensor
        torch.set_num_threads(self.threads.num_threads)
        # Multiplying by 1 in place reads and writes every state once: the memory traffic of the
        # operator.
        moved = time_call(lambda: states.mul_(1.0))
        operations = OPERATIONS * self.sequences * self.tokens * states[0].numel()
        return max(moved, time_call(lambda: self.multiplier.multiply_registers(operations))) * 1e3

    def time_projections(self) -> float:
        first, last = self.projections

        def project() -> None:
            first.forward(self.x, dtype=torch.bfloat16)
            last.forward(self.mixed, dtype=torch.bfloat16)

        return time_call(project) * 1e3


def _make_case(model: str, sequences: int, tokens: int) -> BenchCase:
    case = _Case(model, sequences, tokens)
    return BenchCase(
        name=f"shape={model} sequences={sequences} tokens={tokens}",
        unit="ms",
        ours=lambda: time_call(case.run_ours) * 1e3,
        check=case.check,
        baseline=case.time_rival,
        baseline_name=lambda: f"torch threads={case.rival_threads}",
        ceiling=case.time_ceiling,
        limits={"projections int8g128": case.time_projections},
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases of decode steps, then those of prompts; ``quick`` has one model."""
    for model in QUICK_SHAPES if quick else SHAPES:
        for sequences, tokens in ROWS:
            yield _make_case(model, sequences, tokens)
