"""`tandem bench linear`: one packed matrix against torch, and against the limits of the machine.

Matrices of known models: attention projections, a dense feed-forward block, a head. Several of
them are used in turn, so that no cache holds the weights of the next call. Rival and ceiling are
those of `tandem bench moe`: torch's product in bf16 or fp32, with one thread or as many as ours,
whichever is the fastest; reading the packed bytes once, or the multiply-adds in registers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase
from tandem.bench.operators.rotation import Kind, list_kinds, make_rotation_case, time_torch
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.weights.formats import find_format

__all__ = ["make_cases"]

SHAPES = {
    "qwen3-30b-a3b-qkv": (2048, 5120),
    "qwen3-30b-a3b-o": (4096, 2048),
    "qwen3-30b-a3b-head": (2048, 151936),
    "deepseek-v3-mlp": (7168, 18432),
}
"""Matrices by name, as (inputs, outputs)."""
QUICK_SHAPES = ("qwen3-30b-a3b-qkv",)
FORMATS = {
    "int8g128": 0.015,
    "int4g32": 0.09,
    "f32": 1e-5,
    "bf16": 0.004,
    "fp8": 0.03,
    "fp8row": 0.03,
    "mxfp4": 0.15,
    "int8row": 0.02,
}
"""Largest allowed error of a result relative to float32, by weight format, on these Gaussian
weights.
"""
QUICK_FORMATS = ("int8g128", "int4g32", "bf16")
ROWS = (1, 4, 16, 64, 256, 2048)
QUICK_ROWS = (1, 64)
TOTAL_WEIGHTS = 200 * 10**6
"""Fewest weights of all matrices used in turn: 125 MB at 4 bits, most of which does not fit into a
cache of 32 MB.
"""


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
        self.kinds = list_kinds(self.rivals, pool.num_threads)
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
    """State that the cases share: the matrices of one shape at a time, made by the check of the
    shape's first case.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool(recommend_threads(read_topology()).threads)
        self._matrices: _Matrices | None = None

    def find(self, shape: tuple[int, int]) -> _Matrices:
        if self._matrices is None or self._matrices.shape != shape:
            self._matrices = None  # Freed before the next ones are made.
            self._matrices = _Matrices(shape, self._pool)
        return self._matrices


@dataclass(frozen=True, slots=True)
class _Turns:
    """The matrices of a case's shape, of ours and of torch, which are called in turn so that no
    cache holds them.
    """

    matrices: _Matrices
    name: str
    x: dict[torch.dtype, torch.Tensor]

    @property
    def count(self) -> int:
        return self.matrices.count

    @property
    def kinds(self) -> list[Kind]:
        return self.matrices.kinds

    def find(self, nth: int) -> PackedLinear:
        return self.matrices.pack(self.name)[nth]

    def run(self, nth: int) -> torch.Tensor:
        return self.find(nth).forward(self.x[torch.float32])

    @torch.inference_mode()
    def time_rival(self, nth: int, kind: Kind) -> float:
        dtype = kind[0]
        assert isinstance(dtype, torch.dtype)
        weight = self.matrices.rivals[dtype][nth]
        return time_torch(kind, lambda: F.linear(self.x[dtype], weight))

    def check_rival(self, kind: Kind) -> str:
        del kind  # torch's own product is what ours is checked against.
        return ""

    def find_idle(self, nth: int) -> int:
        # The matrix half a round away is taken: its last use and its next one are equally far, so
        # it is not in the caches and is not brought there for ours.
        return (nth + self.count // 2) % self.count

    def read_all(self, nth: int) -> None:
        self.find(nth).read_weights()

    def read(self, idle: int, nth: int) -> None:
        del nth  # Every call needs all of a matrix.
        self.read_all(idle)

    def multiply(self, nth: int) -> None:
        ins, outs = self.matrices.shape
        self.find(nth).multiply_registers(len(self.x[torch.float32]) * ins * outs)

    def measure_error(self) -> float:
        want = F.linear(self.x[torch.float32], self.matrices.rivals[torch.float32][0])
        return float((self.run(0) - want).norm() / want.norm())


def _make_case(bench: _Bench, shape_name: str, name: str, num_rows: int) -> BenchCase:
    shape = SHAPES[shape_name]
    x: dict[torch.dtype, torch.Tensor] = {}

    def find() -> _Turns:
        matrices = bench.find(shape)
        if not x:
            wide = torch.randn(num_rows, shape[0], generator=matrices.generator)
            x.update({dtype: wide.to(dtype) for dtype in matrices.rivals})
        return _Turns(matrices, name, x)

    return make_rotation_case(
        f"op=linear format={name} shape={shape_name} tokens={num_rows}",
        num_tokens=num_rows,
        largest_error=FORMATS[name],
        find=find,
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, shape by shape and format by format; ``quick`` has fewer of all."""
    bench = _Bench()
    for shape in QUICK_SHAPES if quick else SHAPES:
        for name in QUICK_FORMATS if quick else FORMATS:
            for num_rows in QUICK_ROWS if quick else ROWS:
                yield _make_case(bench, shape, name, num_rows)
