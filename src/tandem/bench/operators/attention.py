"""`tandem bench attention`: attention over paged blocks against torch, and against the machine.

One layer at a time, with as many layers in turn as it takes to leave no cache warm. The rival is
torch's scaled dot product attention (for latent heads: two products and a softmax) in bf16 or fp32,
on one thread or as many as ours, whichever is fastest for the case; it gets its keys and values
gathered, which is not timed, and in a decode the queries of a KV head side by side, so that nothing
is repeated for them. Set OMP_WAIT_POLICY=PASSIVE on shared cores.

A decode's ceiling is reading the layer's blocks once, scales included; a prefill's is as many
multiply-adds on operands in registers, with the unit's own bf16 product.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels.cpu.device import CPU
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.native import view_tensor
from tandem.kernels.weights.formats import find_format

__all__ = ["make_cases"]

BLOCK_SIZE = 64
COLD_BYTES = 160 << 20
"""Layers measured in turn hold at least this many bytes, several times the size of a cache."""
DRAWN_TOKENS = 1 << 14
ROW_BYTES = 2 + 2 + 2 + 4
"""Bytes per element of keys and values: as drawn, in our blocks, and in the rival's two copies."""
SPARE_BYTES = 1 << 30
ERRORS = {"bf16": 0.01, "int8": 0.02, "fp8": 0.06}
"""Largest allowed relative error of a result against float32, on Gaussian queries, keys and
values.
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def is_latent(self) -> bool:
        return self.key_dim != self.value_dim


SHAPES = {
    "gqa": _Shape(heads=32, kv_heads=4, key_dim=128, value_dim=128),
    "mla": _Shape(heads=128, kv_heads=1, key_dim=576, value_dim=512),
}
"""Shapes of Qwen3-30B-A3B, and of DeepSeek-V3 with its projections absorbed."""


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for KV, allocated as a server allocates it."""
    return CPU.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class _Layers:
    """Random keys and values of several layers: in paged blocks for ours, and in the order of the
    tokens, [layers, C, kinds * K, d], for the rival.
    """

    def __init__(self, shape: _Shape, context: int, kv: str) -> None:
        blocks = -(-context // BLOCK_SIZE)
        rows = shape.kv_heads * BLOCK_SIZE * (1 if shape.is_latent else 2)
        item_bytes = 2 if kv == "bf16" else 1
        layer_bytes = blocks * rows * (shape.key_dim * item_bytes + (0 if kv == "bf16" else 2))
        self.count = max(1, min(64, -(-COLD_BYTES // layer_bytes)))
        self.memory, self.pool = self._allocate(shape, blocks, kv)
        generator = torch.Generator().manual_seed(0)
        kinds = 1 if shape.is_latent else 2
        size = (self.count, context, kinds * shape.kv_heads, shape.key_dim)
        self.kv = torch.empty(size, dtype=torch.bfloat16)
        # Random values are drawn piece by piece: a million tokens in float32 would not fit into
        # memory at once.
        for rows in self.kv.flatten(0, 1).split(DRAWN_TOKENS):
            rows.copy_(torch.randn(rows.shape, generator=generator))
        self.table = torch.randperm(blocks, generator=generator)[None]

    def _allocate(self, shape: _Shape, blocks: int, kv: str) -> tuple[Tensor, _native.KvPool]:
        kv_heads, d = shape.kv_heads, shape.key_dim
        if shape.is_latent:
            memory = _allocate((blocks, self.count, BLOCK_SIZE, d), torch.bfloat16)
            return memory, _native.KvPool.latent(view_tensor(memory), shape.value_dim)
        if kv == "bf16":
            size = (blocks, self.count, 2, kv_heads, BLOCK_SIZE, d)
            memory = _allocate(size, torch.bfloat16)
            return memory, _native.KvPool.grouped(view_tensor(memory))
        layer_bytes = 2 * kv_heads * BLOCK_SIZE * (d + 2)
        memory = _allocate((blocks, self.count, layer_bytes), torch.uint8)
        view = view_tensor(memory)
        return memory, _native.KvPool.coded(view, kv, kv_heads, BLOCK_SIZE, d)


class _Case:
    """Attention of the last ``tokens`` tokens of one sequence of ``context`` tokens."""

    def __init__(self, kind: str, kv: str, tokens: int, context: int) -> None:
        self.shape, self.kv, self.tokens, self.context = SHAPES[kind], kv, tokens, context
        self.nth = 0
        self.chosen: tuple[torch.dtype, int] = (torch.bfloat16, 1)
        self.layers: _Layers
        self.threads: _native.ThreadPool
        self.rivals: dict[torch.dtype, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @property
    def scale(self) -> float:
        return self.shape.key_dim**-0.5

    @property
    def num_macs(self) -> int:
        """Multiply-adds of the products, without those that the causal mask removes."""
        pairs = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2
        return pairs * self.shape.heads * (self.shape.key_dim + self.shape.value_dim)

    def _find_lack(self) -> str:
        """Return the reason why the case cannot run here; empty if it can."""
        shape = self.shape
        items = self.context * shape.kv_heads * shape.key_dim * (1 if shape.is_latent else 2)
        # A short context is measured on several layers in turn, which together exceed the caches; a
        # long context on one layer. Enough memory is needed for the larger of the two.
        needed = max(items * ROW_BYTES, 5 * COLD_BYTES) + SPARE_BYTES
        free = _native.read_topology().memory_available_bytes
        return "" if needed <= free else f"needs {needed >> 20} MiB of memory, {free >> 20} free"

    def prepare(self) -> None:
        shape, n = self.shape, self.tokens
        advice = _native.recommend_threads(_native.read_topology())
        self.threads = _native.ThreadPool(advice.threads)
        self.multiplier = PackedExperts(find_format("bf16"), 1, 64, 64, pool=self.threads)
        self.layers = layers = _Layers(shape, self.context, self.kv)
        plan: Any = _native.PlannedAttention
        whole = plan(layers.pool, layers.table, [0, self.context], [self.context], self.threads)
        for layer in range(layers.count):
            whole.store(layer, view_tensor(layers.kv[layer]))
        generator = torch.Generator().manual_seed(1)
        size = (n, shape.heads, shape.key_dim)
        self.q = torch.randn(size, generator=generator, dtype=torch.float32).bfloat16()
        self.out = torch.empty(n, shape.heads, shape.value_dim, dtype=torch.bfloat16)
        self.views = view_tensor(self.q), view_tensor(self.out)
        self.plan = plan(layers.pool, layers.table, [0, n], [self.context], self.threads)
        # The rival gets at most 8 layers, since fp32 layers are twice the size; together they are
        # still too large to stay in the caches.
        for dtype in (torch.bfloat16, torch.float32):
            self.rivals[dtype] = [self._gather(i, dtype) for i in range(min(layers.count, 8))]

    def _gather(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries [1, H, n, d], and its keys and values [1, K, C, d] in the order
        of the tokens, for the rival.
        """
        rows = self.layers.kv[layer].to(dtype).transpose(0, 1)[None]
        keys = rows[:, : self.shape.kv_heads].contiguous()
        values = keys[..., : self.shape.value_dim]
        if not self.shape.is_latent:
            values = rows[:, self.shape.kv_heads :].contiguous()
        return self.q.to(dtype).transpose(0, 1)[None].contiguous(), keys, values

    @torch.inference_mode()
    def run_rival(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Return the attention that the rival (torch) computes for a layer, [n, H, d]."""
        q, keys, values = self.rivals[dtype][layer]
        n, context = self.tokens, self.context
        if self.shape.is_latent:
            scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) * self.scale
            if n > 1:
                later = torch.ones(n, context, dtype=torch.bool).triu_(context - n + 1)
                scores.masked_fill_(later[None, :, None], float("-inf"))
            return torch.matmul(torch.softmax(scores, -1), values)[0]
        if n == 1:
            grouped = q.view(1, self.shape.kv_heads, -1, self.shape.key_dim)
            mixed = functional.scaled_dot_product_attention(grouped, keys, values, scale=self.scale)
            return mixed.view(1, self.shape.heads, -1)
        mask = None
        if n < context:
            mask = torch.ones(n, context, dtype=torch.bool).tril_(context - n)
        mixed = functional.scaled_dot_product_attention(
            q,
            keys,
            values,
            attn_mask=mask,
            is_causal=n == context,
            scale=self.scale,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1)

    def run_ours(self) -> None:
        self.nth = (self.nth + 1) % self.layers.count
        self.plan.attend(self.nth, *self.views, self.scale)

    def time_rival(self, kind: tuple[torch.dtype, int]) -> float:
        dtype, threads = kind
        torch.set_num_threads(threads)
        layer = self.nth % len(self.rivals[dtype])
        return time_call(lambda: self.run_rival(layer, dtype)) * 1e3

    def time_ceiling(self) -> float:
        # The ceiling reads the layer that ours used last, whose next use is farthest away: ours
        # never finds its layer in the caches because of this read.
        layer = (self.nth - 1) % self.layers.count
        read = time_call(lambda: self.layers.pool.read(layer, self.threads))
        multiplied = time_call(lambda: self.multiplier.multiply_registers(self.num_macs))
        return max(read, multiplied) * 1e3

    def check(self) -> str:
        lack = self._find_lack()
        if lack:
            return lack
        self.prepare()
        torch.set_num_threads(self.threads.num_threads)
        self.plan.attend(0, *self.views, self.scale)
        want = self.run_rival(0, torch.float32)
        error = float((self.out.float() - want).norm() / want.norm())
        if not error <= ERRORS[self.kv]:
            return f"relative error {error:.4f}, at most {ERRORS[self.kv]} is allowed"
        kinds = [(d, t) for d in self.rivals for t in sorted({1, self.threads.num_threads})]
        self.chosen = min(kinds, key=lambda kind: min(self.time_rival(kind) for _ in range(2)))
        return "ok"


def _make_case(kind: str, kv: str, tokens: int, context: int) -> BenchCase:
    case = _Case(kind, kv, tokens, context)
    return BenchCase(
        name=f"kind={kind} kv={kv} tokens={tokens} context={context}",
        unit="ms",
        ours=lambda: time_call(case.run_ours) * 1e3,
        check=case.check,
        baseline=lambda: case.time_rival(case.chosen),
        baseline_name=lambda: f"{case.chosen[0]} threads={case.chosen[1]}",
        ceiling=case.time_ceiling,
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield decodes over growing contexts, then prefills; ``quick`` has fewer of both."""
    decodes = (1024, 32768) if quick else (1024, 4096, 32768, 131072, 1 << 20)
    for kind in SHAPES:
        for context in decodes:
            yield _make_case(kind, "bf16", 1, context)
    for kv in ("int8", "fp8"):
        yield _make_case("gqa", kv, 1, 32768)
    prefills = ((512, 512),) if quick else ((512, 512), (2048, 2048), (512, 8192))
    for kind in SHAPES:
        for tokens, context in prefills:
            yield _make_case(kind, "bf16", tokens, context)
