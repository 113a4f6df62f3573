"""`tandem bench moe`: packed experts against torch, and against the limits of the machine.

One MoE layer of a known model, with as many experts as fit a laptop, routed at random. Where a
layer is small, several are used in turn, so that no cache holds the weights of the next call. The
rival is torch, one expert after the other on the tokens that chose it, in bf16 or fp32 and on one
thread or as many as ours, whichever is the fastest for the case. Set OMP_WAIT_POLICY=PASSIVE on
shared cores, or torch's threads spin against each other and lose far more than the kernels differ.

The ceiling is what takes longer: reading the packed bytes of the chosen experts once, or as many
multiply-adds on operands in registers, with the instruction that the format's kernel uses. It is
measured on another layer, where there is one, in the same rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase
from tandem.bench.turns import Kind, list_kinds, make_turn_case
from tandem.kernels.formats import find_format
from tandem.kernels.native_experts import PackedExperts

__all__ = ["make_cases"]


@dataclass(frozen=True)
class Shape:
    """A layer: hidden and intermediate size, experts per token, experts that the model has."""

    name: str
    hidden: int
    inner: int
    top_k: int
    num_experts: int


SHAPES = [
    Shape("qwen3-30b-a3b", 2048, 768, 8, 128),
    Shape("deepseek-v3", 7168, 2048, 8, 256),
    Shape("kimi-k2", 7168, 2048, 8, 384),
    Shape("mixtral", 4096, 14336, 2, 8),
]
LAYER_WEIGHTS = 80 * 10**6
"""Of one layer, where top_k experts do not need more: 16 experts of Qwen3-30B-A3B."""
TOTAL_WEIGHTS = 200 * 10**6
"""Of all layers in turn at least: at 4 bits 125 MB, of which a cache of 32 MB holds little."""
FORMATS = {
    "int8g128": 0.021,
    "int4g32": 0.145,
    "bf16": 0.005,
    "fp8": 0.05,
    "mxfp4": 0.25,
    "int8row": 0.03,
}
"""The largest relative error of a result against float32, on these Gaussian weights."""
QUICK_FORMATS = ("int8g128", "int4g32", "bf16")
TOKENS = (1, 4, 16, 64, 256, 2048)
QUICK_TOKENS = (1, 16, 256)


@dataclass
class _Batch:
    """What a call takes: x [T, D], ids [T, K], router weights [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def num_active(self) -> int:
        return len(self.ids.unique())


class _TorchExperts:
    """The rival: weights [E, 2 F, D] and [E, D, F] in one dtype."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype) -> None:
        self._gate_up, self._down = gate_up.to(dtype), down.to(dtype)

    @torch.inference_mode()
    def forward(self, batch: _Batch) -> torch.Tensor:
        x = batch.x.to(self._gate_up.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in batch.ids.unique().tolist():
            tokens, slots = torch.where(batch.ids == expert)
            gate, up = F.linear(x[tokens], self._gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self._down[expert]).float()
            out.index_add_(0, tokens, y * batch.weights[tokens, slots, None])
        return out


class _Layers:
    """Layers of random weights of one shape; the rival's in both dtypes, ours in one format."""

    def __init__(self, shape: Shape, pool: ThreadPool) -> None:
        self.shape = shape
        self.pool = pool
        self._generator = torch.Generator().manual_seed(0)
        weights = 3 * shape.hidden * shape.inner
        self.num_experts = min(shape.num_experts, max(shape.top_k, LAYER_WEIGHTS // weights))
        self.num_layers = -(-TOTAL_WEIGHTS // (self.num_experts * weights))
        self.layers = [self._make_layer() for _ in range(self.num_layers)]
        self.rivals = {
            dtype: [_TorchExperts(*layer, dtype) for layer in self.layers]
            for dtype in (torch.bfloat16, torch.float32)
        }
        self.kinds = list_kinds(list(self.rivals), self.pool.num_threads)
        self._ours: tuple[str, list[PackedExperts]] = ("", [])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _make_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        count, hidden, inner = self.num_experts, self.shape.hidden, self.shape.inner
        gate_up = self._normal(count, 2 * inner, hidden) / hidden**0.5
        return gate_up, self._normal(count, hidden, inner) / inner**0.5

    def make_batch(self, num_tokens: int) -> _Batch:
        scores = torch.rand(num_tokens, self.num_experts, generator=self._generator)
        weights, ids = scores.topk(self.shape.top_k)
        x = self._normal(num_tokens, self.shape.hidden)
        return _Batch(x, ids, weights / weights.sum(-1, True))

    def pack(self, name: str) -> list[PackedExperts]:
        if self._ours[0] != name:
            self._ours = ("", [])  # Freed before the next ones are made.
            weight_format = find_format(name)
            pack = PackedExperts.pack
            ours = [pack(weight_format, *layer, pool=self.pool) for layer in self.layers]
            self._ours = (name, ours)
        return self._ours[1]


class _Bench:
    """The layers of one shape at a time, made when the first case of the shape is checked."""

    def __init__(self) -> None:
        self._pool = ThreadPool(recommend_threads(read_topology()).threads)
        self._layers: _Layers | None = None

    def find(self, shape: Shape) -> _Layers:
        if self._layers is None or self._layers.shape != shape:
            self._layers = None  # Freed before the next ones are made.
            self._layers = _Layers(shape, self._pool)
        return self._layers


@dataclass(frozen=True, slots=True)
class _Turns:
    """What a case calls the layers of its shape with: a batch for each."""

    layers: _Layers
    name: str
    batches: list[_Batch]

    @property
    def count(self) -> int:
        return self.layers.num_layers

    @property
    def kinds(self) -> list[Kind]:
        return self.layers.kinds

    def find(self, turn: int) -> PackedExperts:
        return self.layers.pack(self.name)[turn]

    def run(self, turn: int) -> torch.Tensor:
        batch = self.batches[turn]
        return self.find(turn).forward(batch.x, batch.ids, batch.weights)

    def run_rival(self, turn: int, kind: Kind) -> torch.Tensor:
        return self.layers.rivals[kind[0]][turn].forward(self.batches[turn])

    def find_idle(self, turn: int) -> int:
        # Of all layers the one that has been out of use the longest when its turn comes.
        return (turn - 1) % self.count

    def read_all(self, turn: int) -> None:
        self.find(turn).read_weights(self.layers.num_experts)

    def read(self, idle: int, turn: int) -> None:
        self.find(idle).read_weights(self.batches[turn].num_active)

    def multiply(self, turn: int) -> None:
        shape, num_tokens = self.layers.shape, len(self.batches[turn].x)
        macs = num_tokens * shape.top_k * 3 * shape.hidden * shape.inner
        self.find(turn).multiply_registers(macs)

    def measure_error(self) -> float:
        torch.set_num_threads(self.layers.pool.num_threads)
        want = self.layers.rivals[torch.float32][0].forward(self.batches[0])
        return float((self.run(0) - want).norm() / want.norm())


def _make_case(bench: _Bench, shape: Shape, name: str, num_tokens: int) -> BenchCase:
    batches: list[_Batch] = []

    def find() -> _Turns:
        layers = bench.find(shape)
        if not batches:
            batches.extend(layers.make_batch(num_tokens) for _ in range(layers.num_layers))
        return _Turns(layers, name, batches)

    return make_turn_case(
        f"op=moe format={name} shape={shape.name} tokens={num_tokens}",
        num_tokens=num_tokens,
        largest_error=FORMATS[name],
        find=find,
    )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, shape by shape and format by format; ``quick`` has fewer of all."""
    bench = _Bench()
    for shape in SHAPES[:1] if quick else SHAPES:
        for name in QUICK_FORMATS if quick else FORMATS:
            for num_tokens in QUICK_TOKENS if quick else TOKENS:
                yield _make_case(bench, shape, name, num_tokens)
