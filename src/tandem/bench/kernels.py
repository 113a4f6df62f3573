"""`tandem bench kernels`: packed experts against torch, and against the limits of the machine.

One MoE layer shaped as Qwen3-30B-A3B's, with as many experts as any machine holds, routed at
random. Layers are used in turn, so that no cache holds the weights of the next call. The rival is
torch, one expert after the other on the tokens that chose it, in bf16 or fp32 and on one thread or
as many as ours, whichever is the fastest for the case. Set OMP_WAIT_POLICY=PASSIVE on shared cores,
or torch's threads spin against each other and lose far more than the kernels differ.

The ceiling is what takes longer: reading the packed bytes of the chosen experts once, or as many
multiply-adds on operands in registers, with the instruction that the format's kernel uses. It is
measured on another layer, in the same rounds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase, time_call
from tandem.kernels.formats import find_format
from tandem.kernels.native_experts import PackedExperts

__all__ = ["make_cases"]

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 16, 2048, 768, 8
NUM_LAYERS = 3
"""At 4 bits a layer has 47 MB: three in turn leave nothing in a cache of 32 MB."""
FORMATS = {"int8g128": 0.021, "int4g32": 0.145, "bf16": 0.005}
"""The largest relative error of a result against float32, on these Gaussian weights."""
TOKENS = (1, 4, 16, 64, 256)
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
    def forward(self, batch: _Batch, num_threads: int) -> torch.Tensor:
        torch.set_num_threads(num_threads)
        x = batch.x.to(self._gate_up.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in batch.ids.unique().tolist():
            tokens, slots = torch.where(batch.ids == expert)
            gate, up = F.linear(x[tokens], self._gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self._down[expert]).float()
            out.index_add_(0, tokens, y * batch.weights[tokens, slots, None])
        return out


class _Bench:
    """Layers of random weights, the rival's in both dtypes, ours in one format at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPool(recommend_threads(read_topology()).threads)
        self._generator = torch.Generator().manual_seed(0)
        self._layers = [self._make_layer() for _ in range(NUM_LAYERS)]
        self._rivals = {
            dtype: [_TorchExperts(*layer, dtype) for layer in self._layers]
            for dtype in (torch.bfloat16, torch.float32)
        }
        threads = sorted({1, self._pool.num_threads})
        self._kinds = [(dtype, count) for dtype in self._rivals for count in threads]
        self._ours: tuple[str, list[PackedExperts]] = ("", [])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _make_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up = self._normal(NUM_EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5
        return gate_up, self._normal(NUM_EXPERTS, HIDDEN, INNER) / INNER**0.5

    def _make_batch(self, num_tokens: int) -> _Batch:
        scores = torch.rand(num_tokens, NUM_EXPERTS, generator=self._generator)
        weights, ids = scores.topk(TOP_K)
        return _Batch(self._normal(num_tokens, HIDDEN), ids, weights / weights.sum(-1, True))

    def _pack(self, name: str) -> list[PackedExperts]:
        if self._ours[0] != name:
            self._ours = ("", [])  # Freed before the next ones are made.
            weight_format = find_format(name)
            pack = PackedExperts.pack
            ours = [pack(weight_format, *layer, pool=self._pool) for layer in self._layers]
            self._ours = (name, ours)
        return self._ours[1]

    def case(self, name: str, num_tokens: int) -> BenchCase:
        batches = [self._make_batch(num_tokens) for _ in range(NUM_LAYERS)]
        turn = 0
        chosen = self._kinds[0]

        def time_ours() -> float:
            nonlocal turn
            turn = (turn + 1) % NUM_LAYERS
            layer = self._pack(name)[turn]
            batch = batches[turn]
            call = time_call(lambda: layer.forward(batch.x, batch.ids, batch.weights))
            return call * 1e3

        def time_rival(kind: tuple[torch.dtype, int]) -> float:
            layer = self._rivals[kind[0]][turn]
            return time_call(lambda: layer.forward(batches[turn], kind[1])) * 1e3

        def time_ceiling() -> float:
            layer = self._pack(name)[(turn + 1) % NUM_LAYERS]
            num_macs = num_tokens * TOP_K * 3 * HIDDEN * INNER
            read = time_call(lambda: layer.read_weights(batches[turn].num_active))
            multiplied = time_call(lambda: layer.multiply_registers(num_macs))
            return max(read, multiplied) * 1e3

        def check() -> str:
            nonlocal chosen
            batch = batches[0]
            got = self._pack(name)[0].forward(batch.x, batch.ids, batch.weights)
            want = self._rivals[torch.float32][0].forward(batch, self._pool.num_threads)
            error = float((got - want).norm() / want.norm())
            if not error <= FORMATS[name]:
                return f"relative error {error:.4f}, at most {FORMATS[name]} is allowed"
            chosen = min(self._kinds, key=lambda kind: min(time_rival(kind) for _ in range(3)))
            return "ok"

        return BenchCase(
            name=f"format={name} shape=qwen3-30b-a3b experts={NUM_EXPERTS} tokens={num_tokens}",
            unit="ms",
            ours=time_ours,
            check=check,
            baseline=lambda: time_rival(chosen),
            baseline_name=lambda: f"{chosen[0]} threads={chosen[1]}",
            ceiling=time_ceiling,
        )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, format by format; ``quick`` has fewer batch sizes."""
    bench = _Bench()
    for name in FORMATS:
        for num_tokens in QUICK_TOKENS if quick else TOKENS:
            yield bench.case(name, num_tokens)
