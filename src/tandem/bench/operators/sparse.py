"""`tandem bench sparse`: the cost of a long context in a layer that selects tokens by an index.

One layer of GLM-5's shape with 16 experts, random weights and random keys. Ours is a whole decode
step after a long context, the baseline the same step after 4k tokens, twice as many as are
selected. Both attend to the same number of tokens, so the difference is the cost of the index. The
aim is a ratio of at least 0.5. Another case measures the index alone; its ceiling is reading the
index keys once.

With latents in a file there is memory for an eighth of them. A step with ``rows=read`` follows one
that chose other rows, as its token is another; random keys make these choices independent of each
other, so that seven eighths of a choice are read. With ``rows=held`` all of it is in memory. The
case ``part=fetch`` is the file's reads alone, beside as many reads of one page, scattered over
another file, at the same depth.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GlmMoeDsaConfig

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.serving.model import write_random_weights
from tandem.core.kv_layout import MlaLayout
from tandem.kernels.latents.file import DEPTH
from tandem.kernels.latents.pages import PAGE_BYTES
from tandem.kernels.latents.tier import LatentTier
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
FILE_CONTEXT, QUICK_FILE_CONTEXT = 65_536, 2048
TIMEOUT_MS = 30_000
MEMORY_FRACTION = 0.125
"""Fraction of a context's latents for which there is memory, if latents lie in a file."""


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
        context = QUICK_FILE_CONTEXT if quick else FILE_CONTEXT
        yield from _make_file_cases(_FiledLayer(layer, Path(scratch), context), context, short)


def _make_file_cases(filed: "_FiledLayer", context: int, short: int) -> Iterator[BenchCase]:
    layer = filed.layer
    yield BenchCase(
        name=f"part=file context={context} rows=read",
        unit="ms",
        ours=lambda: filed.time_step(context),
        check=lambda: filed.check(context),
        baseline=lambda: layer.time_step(context, filed.token),
        baseline_name=lambda: f"all in memory, {filed.describe_step(context)}",
    )
    yield BenchCase(
        name=f"part=file context={context} rows=held",
        unit="ms",
        ours=lambda: filed.time_step(context, repeats=True),
        check=lambda: filed.check(context),
        baseline=lambda: layer.time_step(context, filed.token),
        baseline_name="all in memory",
    )
    yield BenchCase(
        name=f"part=file context={context} rows=read beside={short}",
        unit="ms",
        ours=lambda: filed.time_step(context),
        check=lambda: filed.check(context),
        baseline=lambda: filed.time_step(short),
        baseline_name=lambda: f"in the file after {short} tokens, {filed.describe_step(short)}",
    )
    yield BenchCase(
        name=f"part=fetch context={context}",
        unit="ms",
        ours=lambda: filed.time_fetch(context),
        check=lambda: filed.check(context),
        baseline=filed.time_disk,
        baseline_name=lambda: f"reads of a page each, {filed.describe_fetch(context)}",
    )


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

    def plan(self, context: int, token: int = 5) -> PagedBatch:
        """Return a step that decodes one token after a context."""
        chunk = SequenceChunk([token], context - 1, self.table[: -(-context // BLOCK_SIZE)])
        return PagedBatch.build([chunk], BLOCK_SIZE)

    def run(self, context: int) -> Tensor:
        return self.model.forward(self.plan(context), self.cache)

    def time_step(self, context: int, token: int = 5) -> float:
        batch = self.plan(context, token)
        return 1e3 * time_call(lambda: self.model.forward(batch, self.cache))

    def _plan_index(self, context: int) -> "tuple[_native.PlannedAttention, list[Tensor]]":
        index = self.model.plan.layers[0].mixer
        spec = getattr(index, "index", None)
        top = getattr(index, "top", 0)
        assert spec is not None and self.cache.native_index is not None, "a layer without an index"
        batch = self.plan(context)
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


class _FiledLayer:
    """A layer whose latents lie in a file, the same as those that the layer has in memory."""

    def __init__(self, layer: _Layer, folder: Path, context: int) -> None:
        self.layer, self._folder, self._context = layer, folder, context
        self.token = 0
        """The token that the last step decoded."""
        self._random = np.random.default_rng(3)
        self._num_reads = 0
        self._lengths: set[int] = set()
        """Contexts after which steps were taken."""

    @property
    def _top(self) -> int:
        top = getattr(self.layer.model.plan.layers[0].mixer, "top", 0)
        assert top, "a layer that attends to all tokens"
        return top

    @cached_property
    def tier(self) -> LatentTier:
        layout, num_blocks = self.layer.cache.layout, self.layer.cache.num_blocks
        assert isinstance(layout, MlaLayout), "a layer without latents"
        row_bytes = layout.bytes_per_layer // layout.block_size
        num_slots = max(int(self._context * MEMORY_FRACTION), self._top + 1)
        tier = LatentTier(
            layout, num_blocks, folder=self._folder, memory_bytes=num_slots * row_bytes
        )
        held = self.layer.cache.slots[0].flatten(0, 1)
        step = tier.num_slots // 2
        for first in range(0, len(held), step):
            rows = np.arange(first, min(first + step, len(held)))
            slots = tier.place(rows, np.ones(len(rows), np.bool_))
            bytes_of = held[first : first + step].contiguous().view(torch.uint8).numpy()
            tier.memory[slots] = bytes_of.reshape(len(rows), -1)
            tier.write(rows, slots)
        return tier

    @cached_property
    def cache(self) -> PagedKvCache:
        cache, model = self.layer.cache, self.layer.model
        filed = model.context.make_kv_cache(cache.layout, cache.num_blocks, latents=self.tier)
        filed.index_slots[0].copy_(cache.index_slots[0])
        return filed

    def run(self, context: int, token: int) -> Tensor:
        return self.layer.model.forward(self.layer.plan(context, token), self.cache)

    def time_step(self, context: int, *, repeats: bool = False) -> float:
        if not repeats:
            self.token = (self.token + 1) % self.layer.model.spec.vocab_size
        self._lengths.add(context)
        batch = self.layer.plan(context, self.token)
        return 1e3 * time_call(lambda: self.layer.model.forward(batch, self.cache))

    def describe_step(self, context: int) -> str:
        """Return what steps read, on average of a few."""
        tier, count = self.tier, 8
        before, hits = tier.file.read_bytes, tier.counters.hits
        chosen = tier.counters.chosen
        for _ in range(count):
            self.time_step(context)
        read_bytes = (tier.file.read_bytes - before) / count
        num_rows = (tier.counters.chosen - chosen - tier.counters.hits + hits) / count
        return f"{num_rows:.0f} rows in {read_bytes / 2**20:.2f} MiB read a step"

    def _draw_rows(self, context: int) -> NDArray[np.int64]:
        positions = self._random.choice(context, min(self._top, context), replace=False)
        blocks = np.array(self.layer.table)
        return np.sort(blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)

    def time_fetch(self, context: int) -> float:
        rows = self._draw_rows(context)
        out = np.empty((len(rows), self.tier.row_bytes), np.uint8)
        before = self.tier.file.read_bytes
        seconds = time_call(lambda: self.tier.file.read(rows, out))
        self._num_reads = (self.tier.file.read_bytes - before) // PAGE_BYTES
        return 1e3 * seconds

    def describe_fetch(self, context: int) -> str:
        """Return what a fetch reads."""
        self.time_fetch(context)
        num_rows = len(self._draw_rows(context))
        return f"{num_rows} rows in {self._num_reads * PAGE_BYTES / 2**20:.2f} MiB"

    @cached_property
    def _disk(self) -> tuple[_native.DirectReader, int, int]:
        """A reader, the number of a file of random bytes as long as the latents, and its pages."""
        num_pages = self._context * self.tier.row_bytes // PAGE_BYTES
        path = self._folder / "pages"
        with path.open("wb") as file:
            file.write(self._random.bytes(num_pages * PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        reader = _native.DirectReader(num_pages * PAGE_BYTES, depth=DEPTH)
        return reader, reader.add_file(str(path)), num_pages

    def time_disk(self) -> float:
        """Return the milliseconds of as many reads of a page as the last fetch read pages."""
        reader, file, num_pages = self._disk
        count = min(self._num_reads, num_pages)
        pages = np.sort(self._random.choice(num_pages, count, replace=False)).tolist()

        def read() -> None:
            reads = [
                reader.begin(file, page * PAGE_BYTES, PAGE_BYTES, i * PAGE_BYTES)
                for i, page in enumerate(pages)
            ]
            for each in reads:
                reader.finish(each, TIMEOUT_MS)

        return 1e3 * time_call(read)

    def check(self, context: int) -> str:
        """Compare the logits of a few tokens with those of latents in memory, bitwise."""
        layer = self.layer
        for length in sorted(self._lengths):
            # A step writes its token's latent, which steps after a longer context may choose.
            layer.model.forward(layer.plan(length), layer.cache)
            self.run(length, 5)
        for token in (1, 2, 3):
            expected = layer.model.forward(layer.plan(context, token), layer.cache)
            if not torch.equal(self.run(context, token), expected):
                return f"logits of token {token} differ from those of latents in memory"
        return "ok"
