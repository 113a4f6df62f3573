"""`tandem bench nvme`: routed experts computed from disk, against pages mapped from the same file.

The layers are those of Qwen3-30B-A3B (128 experts, 8 per token) with random weights in int4. Ours
decodes tokens with experts that are read with O_DIRECT into slots for a part of them; the slots are
empty at first. The rivals map the file, of which no page is resident at first (by ``mincore``): one
reads by page faults, the other asks with MADV_WILLNEED for the experts of each token. They keep
everything that they have read, so they are not limited by memory. Results are first compared
bitwise.

Each layer has a router that chooses the trace's experts on the layer's own input, and names some
others on that of the layer before: the share of right guesses is set. ``without guesses`` is ours
with nothing read ahead.

The ceiling is the longer of two times of the same round: the same tokens with all experts in
memory, and reading as many experts as ours missed from the same file, at the same size and queue
depth. ``both at once`` is the time of the two together, in two threads that do not wait for each
other: longer than the ceiling where reading takes the time of the cores that compute, as in a
virtual machine. ``planned`` is the planner's prediction, given that rate of the disk and these
hits, both without guesses, of which it knows nothing. Files are written to the folder for temporary
files (TMPDIR).
"""

import ctypes
import itertools
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem._native import DirectReader, ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase, time_call
from tandem.core.errors import DeadlineError
from tandem.kernels.cpu.expert_slots import ExpertTier
from tandem.kernels.cpu.experts import PackedExperts, count_bytes
from tandem.kernels.cpu.tiered_experts import TieredExperts
from tandem.kernels.guesses import ExpertGuess
from tandem.kernels.weights.formats import find_format
from tandem.models.loading.expert_disk import ReadRate, measure_reads
from tandem.placement.experts.cache import LruPolicy
from tandem.placement.experts.tier import ExpertSizes, count_slot_bytes, predict_token_seconds

if TYPE_CHECKING:
    from typing import Self

__all__ = ["make_cases"]

FORMAT = "int4g32"
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
NUM_LAYERS, QUICK_LAYERS = 3, 2
NUM_TOKENS, QUICK_TOKENS = 24, 12
NUM_STAGED = 32
REPEATED = 0.6
"""Share of a token's experts that the token before chose too, in traces that repeat: between the
published hit rates of caches of a quarter and of half of the experts.
"""
GUESSED_RIGHT = 0.75
"""Share of the experts that a router names on the input of the layer before which the layer then
chooses: above what the gate demands, so that experts are read ahead.
"""
SURE_LOGIT = 10.0
READ_TIMEOUT_MS = 60_000
DROPS = 500


class _Model:
    """Layers of random experts, in memory and in files, and the tokens that use them.

    Args:
       folder: folder for the files.
       num_layers: layers of the model.
       num_tokens: tokens of a trace.
    """

    def __init__(self, folder: Path, num_layers: int, num_tokens: int) -> None:
        self.folder, self.num_layers, self.num_tokens = folder, num_layers, num_tokens
        self.format = find_format(FORMAT)
        self.pool = ThreadPool(recommend_threads(read_topology()).threads)
        self.settings = (self.format, NUM_EXPERTS, HIDDEN, INNER)
        size_bytes = count_bytes(*self.settings)
        self.expert_bytes = size_bytes // NUM_EXPERTS
        self.slot_bytes = count_slot_bytes(self.expert_bytes)
        self.paths = [folder / f"{i}.packed" for i in range(num_layers)]
        chance = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_tokens, num_layers, 1, HIDDEN, generator=chance).bfloat16()
        """Random inputs of each layer for each token, bfloat16 [tokens, layers, 1, hidden size]."""
        self.weights = torch.full((1, TOP_K), 1 / TOP_K)

    @cached_property
    def banks(self) -> list[PackedExperts]:
        """All experts in memory, which are also written to the files."""
        chance = torch.Generator().manual_seed(2)
        gate_up = torch.randn(8, 2 * INNER, HIDDEN, generator=chance) * HIDDEN**-0.5
        down = torch.randn(8, HIDDEN, INNER, generator=chance) * INNER**-0.5
        banks: list[PackedExperts] = []
        for path in self.paths:
            bank = PackedExperts(*self.settings, pool=self.pool)
            for expert_id in range(NUM_EXPERTS):
                # Only eight matrices are drawn, since drawing is slow; scaling them makes all
                # experts different.
                scale = 1 + 0.01 * (expert_id // 8)
                both = gate_up[expert_id % 8] * scale
                bank.pack_expert(expert_id, both[:INNER], both[INNER:], down[expert_id % 8])
            with path.open("wb") as file:
                file.write(bank.packed.data)
                os.fsync(file.fileno())
            banks.append(bank)
        return banks

    def make_trace(self, *, repeats: bool) -> list[list[torch.Tensor]]:
        """Return the experts of each token in each layer, int64 [1, K]."""
        chance = np.random.default_rng(3)
        trace: list[list[torch.Tensor]] = []
        kept = round(TOP_K * REPEATED) if repeats else 0
        for i in range(self.num_tokens):
            token: list[torch.Tensor] = []
            for layer in range(self.num_layers):
                old = trace[i - 1][layer][0].numpy()[:kept] if i else np.zeros(0, np.int64)
                others = np.setdiff1d(np.arange(NUM_EXPERTS), old)
                ids = np.concatenate([old, chance.choice(others, TOP_K - len(old), replace=False)])
                chance.shuffle(ids)
                token.append(torch.from_numpy(ids.astype(np.int64))[None])
            trace.append(token)
        return trace

    def compute(
        self, banks: "list[PackedExperts]", trace: list[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the output of each layer's chosen experts for each token of a trace."""
        return [
            bank.forward(x, ids, self.weights)
            for x_of_layers, token in zip(self.x, trace, strict=True)
            for bank, x, ids in zip(banks, x_of_layers, token, strict=True)
        ]

    def make_router(self, layer: int, trace: list[list[torch.Tensor]]) -> "_Router":
        """Return the router of a layer after the first: it chooses the trace's experts on the
        layer's input, and ``GUESSED_RIGHT`` of them on the input of the layer before.
        """
        chance = np.random.default_rng(5 + layer)
        inputs = self.x[:, layer - 1 : layer + 1, 0].float().flatten(0, 1)
        logits = torch.zeros(len(inputs), NUM_EXPERTS)
        for i, token in enumerate(trace):
            chosen = token[layer][0].numpy()
            right = chance.permutation(chosen)[: round(TOP_K * GUESSED_RIGHT)]
            others = np.setdiff1d(np.arange(NUM_EXPERTS), chosen)
            wrong = chance.choice(others, TOP_K - len(right), replace=False)
            guessed = chance.permutation(np.concatenate([right, wrong]))
            for row, ids in ((2 * i, guessed), (2 * i + 1, chosen)):
                # Give each expert another logit, so that their order is certain.
                logits[row, torch.from_numpy(ids)] = SURE_LOGIT - torch.arange(TOP_K) / TOP_K
        return _Router(torch.linalg.lstsq(inputs, logits, driver="gelsd").solution)


class _Router:
    """A router of a MoE layer that is one matrix product.

    Args:
       weight: its matrix, [D, E].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, weights and ids of the chosen experts."""
        logits = x.float() @ self._weight
        weights, ids = logits.topk(TOP_K, -1)
        return logits, weights, ids


class _Case:
    """One measured case: a number of slots for experts in memory, and a trace of tokens that does
    or does not repeat experts.
    """

    def __init__(self, model: _Model, num_slots: int, *, repeats: bool) -> None:
        self.model, self.num_slots = model, num_slots
        self.trace = model.make_trace(repeats=repeats)
        # The guesses of the next layer's experts outlive the layers of a round, so that what they
        # have learnt about being right holds in the next one.
        self.guesses = [
            ExpertGuess(model.make_router(layer, self.trace))
            for layer in range(1, model.num_layers)
        ]
        self.missed_bytes = 0
        self.hit_rate = 0.0
        self.num_guessed = 0
        """Number of experts that were read from disk ahead of use, by guess, in one run of the
        trace.
        """
        self.rates: list[float] = []
        self.times: list[float] = []

    @cached_property
    def depth(self) -> ReadRate:
        """The number and size of the reads under way at a time, chosen as a server chooses them on
        this disk.
        """
        return measure_reads(self.model.folder, self.model.expert_bytes)

    @cached_property
    def reader(self) -> DirectReader:
        model = self.model
        places = self.num_slots * model.num_layers + NUM_STAGED
        reader = DirectReader(
            places * model.slot_bytes, depth=self.depth.depth, part_bytes=self.depth.part_bytes
        )
        reader.array()[:] = 0  # Touch the pages, as the first tokens of a server have done.
        return reader

    def open(self, *, is_guessing: bool = True) -> tuple[ExpertTier, list[PackedExperts]]:
        """Return the tier (the slots in memory and the reads from disk) and its layers, with all
        slots empty.

        Args:
            is_guessing: True if each layer reads the next one's experts ahead.
        """
        model = self.model
        tier = ExpertTier(
            self.reader,
            slot_bytes=model.slot_bytes,
            num_slots=self.num_slots * model.num_layers,
            num_staged=NUM_STAGED,
            max_insertions=self.num_slots,
            alignment=DirectReader.ALIGNMENT,
        )
        layers = [
            TieredExperts(
                *model.settings,
                pool=model.pool,
                tier=tier,
                path=path,
                num_slots=self.num_slots,
                policy=LruPolicy(self.num_slots),
            )
            for path in model.paths
        ]
        pairs = zip(itertools.pairwise(layers), self.guesses, strict=True) if is_guessing else ()
        for (before, experts), guess in pairs:
            experts.follow(before, guess)
        return tier, [*layers]

    def check(self) -> str:
        """Compare the outputs of our implementation and of every rival bitwise; return ``ok`` or
        the error.
        """
        wanted = self.model.compute(self.model.banks, self.trace)
        # In the first run with guesses the layers learn that guesses are right; the second one
        # reads ahead.
        for is_guessing in (True, True, False):
            tier, layers = self.open(is_guessing=is_guessing)
            if not _equal(self.model.compute(layers, self.trace), wanted):
                return "experts from disk give other sums"
            if is_guessing:
                self.num_guessed = tier.counters.guessed
        counters = tier.counters
        missed = counters.inserted + counters.passed
        self.missed_bytes = counters.read_bytes
        self.hit_rate = counters.hits / (counters.hits + missed)
        with _Mapping(self.model) as mapping:
            if not _equal(self.model.compute(mapping.banks, self.trace), wanted):
                return "mapped experts give other sums"
        return "ok"

    def ours(self, *, is_guessing: bool = True) -> float:
        """Measure our milliseconds per token, with experts read from the disk into slots (memory
        for some of them).
        """
        _, layers = self.open(is_guessing=is_guessing)
        seconds = time_call(lambda: self.model.compute(layers, self.trace))
        return 1e3 * seconds / self.model.num_tokens

    def mapped(self, *, will_need: bool) -> float:
        """Measure the milliseconds per token with a mapped file of which no page is resident."""
        model = self.model
        with _Mapping(model) as mapping:
            begin = time.perf_counter()
            for x_of_layers, token in zip(model.x, self.trace, strict=True):
                for layer, ids in enumerate(token):
                    if will_need:
                        mapping.want(layer, ids[0].tolist())
                    mapping.banks[layer].forward(x_of_layers[layer], ids, model.weights)
            return 1e3 * (time.perf_counter() - begin) / model.num_tokens

    def ceiling(self) -> float:
        """Return the milliseconds per token of the slower one of computing and reading."""
        model = self.model
        computing = time_call(lambda: model.compute(model.banks, self.trace))
        self.times.append(computing)
        reading = self._read(self.missed_bytes)
        self.rates.append(self.missed_bytes / reading)
        return 1e3 * max(computing, reading) / model.num_tokens

    def both_at_once(self) -> float:
        """Measure the milliseconds per token until both computing and reading have ended, while
        neither waits for the other.
        """
        model = self.model
        with ThreadPoolExecutor(1) as executor:
            begin = time.perf_counter()
            reading = executor.submit(self._read, self.missed_bytes)
            model.compute(model.banks, self.trace)
            reading.result()
            return 1e3 * (time.perf_counter() - begin) / model.num_tokens

    def planned(self) -> float:
        """Return the planner's milliseconds per token, given the rates measured in this round."""
        model = self.model
        sizes = ExpertSizes(model.num_layers, NUM_EXPERTS, TOP_K, model.expert_bytes)
        return 1e3 * predict_token_seconds(
            sizes,
            self.num_slots,
            compute_seconds=self.times[-1] / model.num_tokens,
            read_rate=self.rates[-1],
            hit_rate=self.hit_rate,
        )

    def _read(self, size_bytes: int) -> float:
        """Return the seconds that reading this many bytes of experts takes, in random order."""
        model, reader = self.model, self.reader
        count = size_bytes // model.expert_bytes
        files = [reader.add_file(str(path)) for path in model.paths]
        chance = np.random.default_rng(4)
        wanted = chance.permutation(model.num_layers * NUM_EXPERTS)
        places = reader.array().nbytes // model.slot_bytes
        begun: list[int] = []
        begin = time.perf_counter()
        for i in range(count):
            layer, expert_id = divmod(int(wanted[i % len(wanted)]), NUM_EXPERTS)
            if len(begun) == min(TOP_K, places):
                reader.finish(begun.pop(0), READ_TIMEOUT_MS)
            at = i % min(TOP_K + 1, places) * model.slot_bytes
            offset = expert_id * model.expert_bytes
            begun.append(reader.begin(files[layer], offset, model.expert_bytes, at))
        for read in begun:
            reader.finish(read, READ_TIMEOUT_MS)
        return time.perf_counter() - begin


class _Mapping:
    """The rival's mapping of the experts' files, with no page in memory at first. A context
    manager.
    """

    def __init__(self, model: _Model) -> None:
        self._model = model
        self._maps: list[mmap.mmap] = []
        self.banks: list[PackedExperts] = []

    def __enter__(self) -> "Self":
        for path in self._model.paths:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                array = np.frombuffer(mapped, np.uint8)
                _drop(file.fileno(), array)
            self._maps.append(mapped)
            self.banks.append(
                PackedExperts(*self._model.settings, pool=self._model.pool, storage=array)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.banks.clear()
        self._maps.clear()

    def want(self, layer: int, expert_ids: list[int]) -> None:
        """Ask the kernel to read the experts of a token ahead."""
        size = self._model.expert_bytes
        for expert_id in expert_ids:
            first = expert_id * size // mmap.PAGESIZE * mmap.PAGESIZE
            length = (expert_id + 1) * size - first
            self._maps[layer].madvise(mmap.MADV_WILLNEED, first, length)


def _drop(descriptor: int, array: np.ndarray) -> None:
    """Evict all pages of a file from the page cache.

    Raises: DeadlineError (some stay: another process maps them).
    """
    for _ in range(DROPS):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if not count_resident(array):
            return
        # Read-ahead that began in an earlier round may still bring pages into memory, so dropping
        # is repeated.
        time.sleep(0.01)
    raise DeadlineError("bench.nvme", "pages of the file stay in memory")


def count_resident(array: np.ndarray) -> int:
    """Return how many pages of a mapping are in memory."""
    pages = -(-array.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), found) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in bytes(found))


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases: slots in memory for different parts of the experts, each with traces that
    repeat experts and that do not.
    """
    folder = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    try:
        model = _Model(
            folder,
            QUICK_LAYERS if quick else NUM_LAYERS,
            QUICK_TOKENS if quick else NUM_TOKENS,
        )
        for num_slots, repeats in [(32, True)] if quick else [(32, True), (64, True), (32, False)]:
            case = _Case(model, num_slots, repeats=repeats)
            yield BenchCase(
                name=f"format={FORMAT} layers={model.num_layers} slots={num_slots}/{NUM_EXPERTS} "
                f"trace={'repeats' if repeats else 'even'}",
                unit="ms/token",
                ours=case.ours,
                check=case.check,
                rivals={
                    "mapped": lambda case=case: case.mapped(will_need=False),
                    "mapped willneed": lambda case=case: case.mapped(will_need=True),
                },
                ceiling=case.ceiling,
                limits={
                    "planned": case.planned,
                    "both at once": case.both_at_once,
                    "without guesses": lambda case=case: case.ours(is_guessing=False),
                },
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
