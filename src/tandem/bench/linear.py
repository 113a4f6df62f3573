"""`tandem bench linear`: one packed matrix against torch, and against the limits of the machine.

Matrices of known models: attention projections, a dense feed-forward block, a head. Several of
them are used in turn, so that no cache holds the weights of the next call. Rival and ceiling are
those of `tandem bench moe`: torch's product in bf16 or fp32, with one thread or as many as ours,
whichever is the fastest; reading the packed bytes once, or the multiply-adds in registers.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels.formats import find_format
from tandem.kernels.native_linear import PackedLinear

__all__ = ["make_cases"]

SHAPES = {
    "qwen3-30b-a3b-qkv": (2048, 5120),
    "qwen3-30b-a3b-o": (4096, 2048),
    "qwen3-30b-a3b-head": (2048, 151936),
    "deepseek-v3-mlp": (7168, 18432),
}
"""Inputs and outputs."""
QUICK_SHAPES = ("qwen3-30b-a3b-qkv",)
FORMATS = {
    "int8g128": 0.015,
    "int4g32": 0.09,
    "bf16": 0.004,
    "fp8": 0.03,
    "mxfp4": 0.15,
    "int8row": 0.02,
}
"""The largest relative error of a result against float32, on these Gaussian weights."""
QUICK_FORMATS = ("int8g128", "int4g32", "bf16")
ROWS = (1, 4, 16, 64, 256, 2048)
QUICK_ROWS = (1, 64)
TOTAL_WEIGHTS = 200 * 10**6
"""Of all matrices in turn at least: at 4 bits 125 MB, of which a cache of 32 MB holds little."""


class _Matrices:
    """Random matrices of one shape; the rival's in both dtypes, ours in one format."""

    def __init__(self, shape: tuple[int, int], pool: ThreadPool) -> None:
        self.shape = shape
        self.pool = pool
        self.generator = torch.Generator().manual_seed(0)
        ins, outs = shape
        self.count = -(-TOTAL_WEIGHTS // (ins * outs))
        wide = [
            torch.randn(outs, ins, generator=self.generator) / ins**0.5 for _ in range(self.count)
        ]
        self.rivals = {torch.float32: wide, torch.bfloat16: [w.bfloat16() for w in wide]}
        threads = sorted({1, pool.num_threads})
        self.kinds = [(dtype, count) for dtype in self.rivals for count in threads]
        self._ours: tuple[str, list[PackedLinear]] = ("", [])

    def pack(self, name: str) -> list[PackedLinear]:
        if self._ours[0] != name:
            self._ours = ("", [])  # Freed before the next ones are made.
            weight_format = find_format(name)
            wide = self.rivals[torch.float32]
            ours = [PackedLinear.pack(weight_format, w, pool=self.pool) for w in wide]
            self._ours = (name, ours)
        return self._ours[1]


class _Bench:
    """The matrices of one shape at a time, made when the first case of the shape is checked."""

    def __init__(self) -> None:
        self._pool = ThreadPool(recommend_threads(read_topology()).threads)
        self._matrices: _Matrices | None = None

    def find(self, shape: tuple[int, int]) -> _Matrices:
        if self._matrices is None or self._matrices.shape != shape:
            self._matrices = None  # Freed before the next ones are made.
            self._matrices = _Matrices(shape, self._pool)
        return self._matrices


def _make_case(bench: _Bench, shape_name: str, name: str, num_rows: int) -> BenchCase:
    shape = SHAPES[shape_name]
    x = torch.empty(0)
    turn = 0
    chosen = (torch.bfloat16, 1)

    def time_ours() -> float:
        nonlocal turn
        matrices = bench.find(shape)
        turn = (turn + 1) % matrices.count
        linear = matrices.pack(name)[turn]
        return time_call(lambda: linear.forward(x)) * 1e3

    @torch.inference_mode()
    def time_rival(kind: tuple[torch.dtype, int]) -> float:
        weight = bench.find(shape).rivals[kind[0]][turn]
        narrow = x.to(kind[0])
        torch.set_num_threads(kind[1])
        return time_call(lambda: F.linear(narrow, weight)) * 1e3

    def time_ceiling() -> float:
        matrices = bench.find(shape)
        # Out of use for as long as the one whose turn is next.
        linear = matrices.pack(name)[(turn + matrices.count // 2) % matrices.count]
        # The rival leaves the caches full of what it wrote: writing that back slows the next read.
        matrices.pack(name)[turn].read_weights()
        read = time_call(linear.read_weights)
        num_macs = num_rows * shape[0] * shape[1]
        multiplied = time_call(lambda: linear.multiply_registers(num_macs))
        return max(read, multiplied) * 1e3

    def check() -> str:
        nonlocal x, chosen
        matrices = bench.find(shape)
        x = torch.randn(num_rows, shape[0], generator=matrices.generator)
        got = matrices.pack(name)[0].forward(x)
        want = F.linear(x, matrices.rivals[torch.float32][0])
        error = float((got - want).norm() / want.norm())
        if not error <= FORMATS[name]:
            return f"relative error {error:.4f}, at most {FORMATS[name]} is allowed"
        tries = 1 if num_rows > 256 else 3
        chosen = min(matrices.kinds, key=lambda kind: min(time_rival(kind) for _ in range(tries)))
        return "ok"

    return BenchCase(
        name=f"op=linear format={name} shape={shape_name} tokens={num_rows}",
        unit="ms",
        ours=time_ours,
        check=check,
        baseline=lambda: time_rival(chosen),
        baseline_name=lambda: f"{chosen[0]} threads={chosen[1]}",
        ceiling=time_ceiling,
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, shape by shape and format by format; ``quick`` has fewer of all."""
    bench = _Bench()
    for shape in QUICK_SHAPES if quick else SHAPES:
        for name in QUICK_FORMATS if quick else FORMATS:
            for num_rows in QUICK_ROWS if quick else ROWS:
                yield _make_case(bench, shape, name, num_rows)
