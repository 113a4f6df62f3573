"""`tandem bench sparse`: the cost of a long context in a layer that selects tokens by an index.

One layer of GLM-5's shape with 16 experts, random weights and random keys. Ours is a whole decode
step after a long context, the baseline the same step after 4k tokens, twice as many as are
selected. Both attend to the same number of tokens, so the difference is the cost of the index. The
aim is a ratio of at least 0.5. Another case measures the index alone; its ceiling is reading the
index keys once.
"""

import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.serving.model import write_random_weights
from tandem.kernels.native import view_tensor
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.planning.planner import plan_model

__all__ = ["make_cases"]

SHAPE: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 1,
    "mlp_layer_types": ["sparse"],
    "n_routed_experts": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 18,
}
QUICK_SHAPE = SHAPE | {
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "index_topk": 256,
}
BLOCK_SIZE = 64
SHORT, LONG = 4096, (16_384, 65_536, 131_072)
QUICK_SHORT, QUICK_LONG = 512, (2048,)


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases of each long context: a whole step, and its index alone.

    Args:
       quick: a narrow layer and one context.
    """
    short, longs = (QUICK_SHORT, QUICK_LONG) if quick else (SHORT, LONG)
    with tempfile.TemporaryDirectory() as scratch:
        layer = _Layer(Path(scratch), QUICK_SHAPE if quick else SHAPE, max(longs))
        for context in longs:
            yield _make_step_case(layer, context, short)
            yield _make_index_case(layer, context)


def _make_step_case(layer: "_Layer", context: int, short: int) -> BenchCase:
    return BenchCase(
        name=f"part=step context={context}",
        unit="ms",
        ours=lambda: layer.time_step(context),
        check=lambda: layer.check(context),
        baseline=lambda: layer.time_step(short),
        baseline_name=f"after {short} tokens",
    )


def _make_index_case(layer: "_Layer", context: int) -> BenchCase:
    return BenchCase(
        name=f"part=index context={context}",
        unit="ms",
        ours=lambda: layer.time_index(context),
        check=lambda: layer.check(context),
        ceiling=lambda: layer.time_read(context),
    )


class _Layer:
    """A model of one layer, with blocks of a long context filled with random keys."""

    def __init__(self, folder: Path, shape: dict[str, Any], context: int) -> None:
        self._folder, self._shape, self._context = folder, shape, context

    @cached_property
    def threads(self) -> _native.ThreadPool:
        return _native.ThreadPool(_native.recommend_threads(_native.read_topology()).threads)

    @cached_property
    def model(self) -> CausalModel:
        config = GlmMoeDsaConfig(**self._shape, dtype="bfloat16")
        write_random_weights(self._folder, config)
        return load_model(plan_model(self._folder, dtype="bfloat16"), self.threads)

    @cached_property
    def cache(self) -> PagedKvCache:
        cache = self.model.allocate_kv(-(-self._context // BLOCK_SIZE), block_size=BLOCK_SIZE)
        cache.tensor.normal_(generator=torch.Generator().manual_seed(0))
        return cache

    @cached_property
    def table(self) -> list[int]:
        order = torch.randperm(self.cache.num_blocks, generator=torch.Generator().manual_seed(1))
        return order.tolist()

    def _plan(self, context: int) -> PagedBatch:
        chunk = SequenceChunk([5], context - 1, self.table[: -(-context // BLOCK_SIZE)])
        return PagedBatch.build([chunk], BLOCK_SIZE)

    def run(self, context: int) -> Tensor:
        return self.model.forward(self._plan(context), self.cache)

    def time_step(self, context: int) -> float:
        batch = self._plan(context)
        return 1e3 * time_call(lambda: self.model.forward(batch, self.cache))

    def _plan_index(self, context: int) -> "tuple[_native.PlannedAttention, list[Tensor]]":
        index = self.model.plan.layers[0].mixer
        spec = getattr(index, "index", None)
        top = getattr(index, "top", 0)
        assert spec is not None and self.cache.native_index is not None, "a layer without an index"
        batch = self._plan(context)
        plan = _native.PlannedAttention(
            self.cache.native_index,
            batch.block_table,
            batch.query_start,
            batch.context_lens,
            self.threads,
        )
        draw = torch.Generator().manual_seed(2)
        q = torch.randn(1, spec.num_heads, spec.dim, generator=draw).bfloat16()
        weights = torch.randn(1, spec.num_heads, generator=draw)
        return plan, [q, weights, torch.empty(1, top, dtype=torch.int32)]

    def time_index(self, context: int) -> float:
        plan, (q, weights, chosen) = self._plan_index(context)
        queries, factors, out = view_tensor(q), view_tensor(weights), view_tensor(chosen)
        return 1e3 * time_call(lambda: plan.choose(0, queries, factors, 1.0, out))

    def time_read(self, context: int) -> float:
        pool = self.cache.native_index
        assert pool is not None, "a cache without index keys"
        # `read` covers the index keys of all blocks, so its time is scaled down to the blocks of
        # the context.
        share = context / (self.cache.num_blocks * BLOCK_SIZE)
        return 1e3 * share * time_call(lambda: pool.read(0, self.threads))

    def check(self, context: int) -> str:
        """Compare the selection with one by float64 scores, except for tokens whose scores nearly
        tie.
        """
        plan, (q, weights, chosen) = self._plan_index(context)
        plan.choose(0, view_tensor(q), view_tensor(weights), 1.0, view_tensor(chosen))
        blocks = torch.tensor(self.table[: -(-context // BLOCK_SIZE)])
        keys = self.cache.index_slots[0][blocks].flatten(0, 1)[:context].double()
        scores = (weights.double() @ (q[0].double() @ keys.T).relu())[0]
        least = scores.topk(chosen.shape[1]).values[-1]
        slack = 1e-3 * float(scores.abs().max())
        if bool((scores[chosen[0].long()] < least - slack).any()):
            return "a token is chosen that scores less than others"
        return "ok" if bool(self.run(context).isfinite().all()) else "logits are not finite"
