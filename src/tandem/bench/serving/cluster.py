"""`tandem bench cluster`: the gain from KV that outlives its request and its instance.

- ``case=prefix``: the time to first token of a long prompt of which 15/16 are in the store, against
  computing all of it. Another instance computed the stored KV, so the case shows that a prefix
  computed on one instance is found by another. The ceiling is the same prompt with the 15/16 on the
  device.
- ``case=chat``: several conversations take turns on a device that holds few of them. Per turn, the
  time to first token with the device's blocks alone (the baseline), with a store in memory, and
  with a store that has little memory and a large SSD. The name of the baseline carries the shares
  of prompt tokens that were cached.
- ``case=interference``: the slowdown that long prompts cause to requests that are decoding, with
  prefill and decode on separate instances, against one instance on all cores (``interference.py``).

Both sides of the first two cases run in one process on the same engine, in turn; the store is a
separate process. Before a time counts, the tokens must equal those of an engine without a store.
"""

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from tandem.bench.children import start_child
from tandem.bench.harness import BenchCase
from tandem.bench.serving.interference import make_interference_cases
from tandem.bench.serving.model import QUICK_SHAPE, SHAPE, write_random_model
from tandem.core.clock import MonotonicClock
from tandem.core.errors import DeadlineError, InternalError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import BuiltEngine, build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.service import TierService
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.store.config import StoreConfig
from tandem.store.process import READY, StoreProcessSpec

__all__ = ["make_cases"]

BLOCK = 64
PROMPT_LEN, QUICK_PROMPT_LEN = 4096, 512
STORED = 15 / 16
TURN_LEN, QUICK_TURN_LEN = 512, 64
NUM_TURNS, NUM_CONVERSATIONS = 4, 8
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 60.0, 600.0
WEIGHT_FORMAT = "int8"
LOAD_ALWAYS = TierConfig(
    decision="load", prefetch="wait", load_deadline_ms=60_000, lookup_timeout_ms=10_000
)


class _Store:
    """The KV store (master and host) in a child process."""

    def __init__(self, folder: Path, memory_bytes: int, ssd: bool) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.config = StoreConfig(
            master=f"ipc://{folder}/store.sock",
            name="bench",
            segment_bytes=memory_bytes,
            segment_dir=str(folder / "segments"),
            ssd_dir=str(folder / "ssd") if ssd else "",
        )
        command = [sys.executable, "-m", "tandem.store.process"]
        pipe = subprocess.PIPE
        self._process = start_child(command, stdin=pipe, stdout=pipe)
        spec = StoreProcessSpec(store=self.config, rpc=RpcConfig(), log_level="error")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line != READY:
            raise InternalError("bench.cluster", f"the store did not start: {line.decode()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Gate:
    """A ``BlockTransfers`` (what moves KV blocks between engine and store) whose writes can be
    switched off, so that they do not disturb a measurement.
    """

    def __init__(self, tier: TierService) -> None:
        self.writes = True
        self.sources = tier.sources
        self._tier = tier

    def begin(self, plan: StepPlan) -> None:
        if not self.writes:
            plan.filled, plan.evicted = [], []
        self._tier.begin(plan)


class _Instance:
    """An engine with or without a store, which runs one request at a time."""

    def __init__(
        self, folder: Path, store: StoreConfig | None, num_blocks: int, cache: str
    ) -> None:
        self.built: BuiltEngine = build_engine(
            ModelConfig(
                path=str(folder),
                dtype="bfloat16",
                expert_format=WEIGHT_FORMAT,
                linear_format=WEIGHT_FORMAT,
                packed_cache=cache,
            ),
            EngineConfig(
                block_size=BLOCK, num_kv_blocks=num_blocks, max_model_len=num_blocks * BLOCK // 4
            ),
            MonotonicClock(),
            tiers=LOAD_ALWAYS if store is not None else None,
        )
        self.engine = self.built.engine
        self.tier: TierService | None = None
        self._ids = itertools.count()
        if store is None or self.built.planner is None:
            return
        self.tier = TierService(
            store,
            RpcConfig(),
            LOAD_ALWAYS,
            self.built.view_groups(),
            block_size=self.built.cache.layout.block_size,
            identity=self.built.identity.digest.hex(),
            clock=MonotonicClock(),
            on_load=self.built.planner.note_load,
        )
        self.gate = _Gate(self.tier)
        self.engine.attach_transfers(self.gate)
        self.tier.start(self.engine, timeout_s=START_TIMEOUT_S)
        if not self.tier.is_connected:
            raise InternalError("bench.cluster", "the store cannot be reached")

    def ask(
        self, prompt: list[int], num_tokens: int = 1, salt: str = ""
    ) -> tuple[float, list[int], int]:
        """Run one request; return (milliseconds to its first token, its tokens, the number of
        prompt tokens that were cached).
        """
        begin_s = time.perf_counter()
        request = AddRequest(
            request_id=str(next(self._ids)),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            cache_salt=salt,
        )
        stored = 0
        if self.tier is not None:
            missing = self.engine.find_missing_blocks(request)
            found = asyncio.run(self.tier.count_stored(missing.keys))
            stored = missing.num_cached + (found or 0)
        self.engine.add(request, num_stored_blocks=stored)
        first_s, tokens, cached = 0.0, list[int](), 0
        while self.engine.is_live(request.request_id):
            if time.perf_counter() - begin_s > REQUEST_TIMEOUT_S:
                raise DeadlineError("bench.cluster", "a request does not end")
            self.engine.wait_for_work(1.0)
            for output in self.engine.step():
                if output.token_ids and not tokens:
                    first_s = time.perf_counter() - begin_s
                tokens += output.token_ids
                cached = output.cached_len or cached
        return first_s * 1e3, tokens, cached

    def settle(self, num_blocks: int) -> None:
        """Wait until ``num_blocks`` KV blocks have been written to the store since the start."""
        assert self.tier is not None
        self.engine.step()  # Reports the last full blocks.
        deadline_s = time.perf_counter() + START_TIMEOUT_S
        counters = self.tier.counters
        while counters.stored_blocks + counters.store_existing_blocks < num_blocks:
            if time.perf_counter() > deadline_s:
                raise DeadlineError("bench.cluster", f"blocks are not stored: {counters}")
            time.sleep(0.01)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.stop()


class _Bench:
    def __init__(self, scratch: Path, opened: contextlib.ExitStack, *, quick: bool) -> None:
        self._scratch = scratch
        self._opened = opened
        self._quick = quick
        self._shape = QUICK_SHAPE if quick else SHAPE
        self._random = torch.Generator().manual_seed(1)
        self._model: Path | None = None

    @property
    def model(self) -> Path:
        if self._model is None:
            self._model = self._scratch / "model"
            write_random_model(self._model, self._shape, 8192)
        return self._model

    @property
    def cache(self) -> str:
        return str(self._scratch / "packed")

    def draw(self, count: int) -> list[int]:
        size = self._shape["vocab_size"]
        return torch.randint(0, size, (count,), generator=self._random).tolist()

    def open_store(self, name: str, memory_bytes: int, *, ssd: bool = False) -> StoreConfig:
        store = _Store(self._scratch / name, memory_bytes, ssd)
        self._opened.callback(store.close)
        return store.config

    def open_instance(self, store: StoreConfig | None, num_blocks: int) -> _Instance:
        instance = _Instance(self.model, store, num_blocks, self.cache)
        self._opened.callback(instance.close)
        return instance

    def prefix_case(self) -> BenchCase:
        length = QUICK_PROMPT_LEN if self._quick else PROMPT_LEN
        shared = int(length * STORED) // BLOCK * BLOCK
        instances: list[_Instance] = []
        salts = itertools.count()
        prompt = self.draw(length)

        def check() -> str:
            store = self.open_store("store", 2**26 if self._quick else 2**31)
            # The scheduler uses at most a quarter of the blocks for loads from the store, so four
            # times the prompt's blocks are allotted.
            blocks = 4 * length // BLOCK + 64
            computes, loads = self.open_instance(store, blocks), self.open_instance(store, blocks)
            computes.ask(prompt[: shared + 1])
            computes.settle(shared // BLOCK)
            computes.close()
            loads.gate.writes = False
            instances.append(loads)
            _, tokens, cached = loads.ask(prompt, 8)
            if cached != shared:
                return f"{cached} tokens of {shared} came from the other instance's KV"
            if loads.ask(prompt, 8, salt="computed")[1] != tokens:
                return "tokens differ from those of a prefix that was computed"
            return "ok"

        def measure(*, is_hot: bool, salt: str = "") -> float:
            instances[0].engine.flush_cache()
            if is_hot:
                instances[0].ask(prompt[: shared + 1])
            return instances[0].ask(prompt, salt=salt)[0]

        return BenchCase(
            name=f"case=prefix prompt={length} stored={shared} format={WEIGHT_FORMAT}",
            unit="ms",
            ours=lambda: measure(is_hot=False),
            check=check,
            baseline=lambda: measure(is_hot=False, salt=f"cold{next(salts)}"),
            baseline_name="computing the whole prompt",
            ceiling=lambda: measure(is_hot=True),
        )

    def chat_cases(self, tiers: str) -> Iterator[BenchCase]:
        """Yield one case per turn of several chats; the device's KV blocks hold half of the
        conversations.
        """
        turn_len = QUICK_TURN_LEN if self._quick else TURN_LEN
        total = NUM_TURNS * turn_len
        num_blocks = 4 * total // BLOCK + 16
        arms: dict[str, _Instance] = {}
        times: dict[tuple[str, int], list[float]] = {}
        hits: dict[tuple[str, int], list[float]] = {}

        def play() -> None:
            """Run all conversations from their start on both sides, one turn of each conversation
            at a time.
            """
            texts = [self.draw(total) for _ in range(NUM_CONVERSATIONS)]
            for turn in range(NUM_TURNS):
                for text in texts:
                    prompt = text[: (turn + 1) * turn_len]
                    for arm, instance in arms.items():
                        took_ms, _, cached = instance.ask(prompt)
                        times.setdefault((arm, turn), []).append(took_ms)
                        hits.setdefault((arm, turn), []).append(cached / len(prompt))

        def check() -> str:
            if "without" not in arms:
                arms.clear()
                # With an SSD the memory tier is small: it holds two thirds of all blocks, so the
                # rest must be read from the SSD.
                small, large = (2**24, 2**27) if self._quick else (2**27, 2**31)
                has_ssd = tiers == "L1+L3+SSD"
                store = self.open_store(
                    f"store-{len(tiers)}", small if has_ssd else large, ssd=has_ssd
                )
                arms["with"] = self.open_instance(store, num_blocks)
                arms["without"] = self.open_instance(None, num_blocks)
                play()
            return "ok"

        def measure(arm: str, turn: int) -> float:
            if not times.get((arm, turn)):
                play()
            return times[arm, turn].pop()

        for turn in range(NUM_TURNS):

            def name_rates(turn: int = turn) -> str:
                rates = [statistics.mean(hits[arm, turn]) for arm in ("with", "without")]
                return f"L1 alone, hit rates {rates[0]:.2f} against {rates[1]:.2f},"

            def check_turn(turn: int = turn) -> str:
                result = check()
                ours, alone = (statistics.mean(hits[arm, turn]) for arm in ("with", "without"))
                if result == "ok" and turn and ours < alone:
                    return f"fewer hits with a store, {ours:.2f}, than without, {alone:.2f}"
                return result

            yield BenchCase(
                name=f"case=chat tiers={tiers} turn={turn + 1} tokens={(turn + 1) * turn_len}",
                unit="ms",
                ours=lambda turn=turn: measure("with", turn),
                check=check_turn,
                baseline=lambda turn=turn: measure("without", turn),
                baseline_name=name_rates,
                max_rounds=NUM_CONVERSATIONS,
            )
        for instance in arms.values():
            instance.close()


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases.

    Args:
        quick: a tiny model and short prompts.
    """
    disable_progress_bar()
    with contextlib.ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        scratch.chmod(0o700)
        bench = _Bench(scratch, opened, quick=quick)
        yield bench.prefix_case()
        for tiers in ("L1+L3", "L1+L3+SSD"):
            yield from bench.chat_cases(tiers)
        yield from make_interference_cases(
            bench.model,
            bench.cache,
            WEIGHT_FORMAT,
            bench.draw,
            QUICK_PROMPT_LEN if quick else PROMPT_LEN,
            quick=quick,
        )
