"""The slowdown of decoding requests by long prompts, with separate prefill instances and without.

Two deployments of one model run at the same time on the same cores and are loaded in turn:
``--prefill 1 --decode 1``, each instance on half of the cores, against one unified instance on all.
Some requests decode while prompts arrive, each as soon as the one before has its first token. The
figures are the 99th percentile of the time between tokens of the decoding requests, from the first
prompt's arrival to the last prompt's first token, and the median time to first token of the
prompts.
"""

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tandem.bench.harness import BenchCase
from tandem.core.errors import InternalError
from tandem.core.loop_calls import LoopThread
from tandem.core.wire import AddRequest, FinishReason, SamplingParams
from tandem.engine.cluster.client import ClusterClient, make_specs
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.config import EngineConfig
from tandem.engine.process.fork_server import ForkServer
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import ProcessLauncher
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig

__all__ = ["make_interference_cases"]

BLOCK = 64
NUM_DECODES, QUICK_NUM_DECODES = 8, 2
NUM_PROMPTS = 2
DECODE_PROMPT_LEN = 32
MAX_DECODE_TOKENS = 4096
CHECK_TOKENS = 8
CALL_TIMEOUT_S = 1800.0
T = TypeVar("T")


class _Serving:
    """A cluster that serves requests, on its own event loop, which also runs between
    measurements.
    """

    def __init__(self, model: Path, cache: str, weight_format: str, config: ClusterConfig) -> None:
        common = InstanceSpec(
            model=ModelConfig(
                path=str(model),
                dtype="bfloat16",
                expert_format=weight_format,
                linear_format=weight_format,
                packed_cache=cache,
            ),
            engine=EngineConfig(block_size=BLOCK, num_kv_blocks=1024, prefix_cache=True),
            rpc=RpcConfig(),
            log_level="error",
        )
        self._thread = LoopThread("bench")
        self._fork_server = ForkServer()
        self._call(self._fork_server.__aenter__())
        self._cluster = ClusterClient(
            make_specs(config, common),
            config,
            is_staggered=True,
            make_launcher=partial(ProcessLauncher, self._fork_server),
        )
        self._ids = itertools.count()
        self._call(self._cluster.__aenter__())
        self._call(self._cluster.wait_ready())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(work, CALL_TIMEOUT_S)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # The processes end with this one in any case.
            self._call(self._cluster.__aexit__(None, None, None))
            self._call(self._fork_server.__aexit__(None, None, None))
        self._thread.close(CALL_TIMEOUT_S)

    def ask(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the greedy tokens of prompts that are served together."""

        async def serve() -> list[list[int]]:
            streams = [await self._submit(prompt, num_tokens) for prompt in prompts]
            return [[t async for o in stream for t in o.token_ids] for stream in streams]

        return self._call(serve())

    def measure(self, decodes: list[list[int]], prompts: list[list[int]]) -> tuple[float, float]:
        """Return the 99th percentile of the time between tokens and the median time to first token,
        in milliseconds.
        """
        return self._call(self._measure(decodes, prompts))

    async def _submit(self, prompt: list[int], num_tokens: int) -> Any:
        request = AddRequest(
            request_id=str(next(self._ids)),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        )
        return await self._cluster.submit(request)

    async def _measure(
        self, decodes: list[list[int]], prompts: list[list[int]]
    ) -> tuple[float, float]:
        await self._cluster.flush_cache()
        moments: list[list[float]] = [[] for _ in decodes]
        running = asyncio.Event()

        async def follow(index: int, stream: Any) -> None:
            async for output in stream:
                if output.finish_reason is FinishReason.ERROR:
                    raise InternalError("bench.cluster", str(output.error_text))
                moments[index].append(time.perf_counter())
                if all(len(each) > 2 for each in moments):
                    running.set()

        streams = [await self._submit(prompt, MAX_DECODE_TOKENS) for prompt in decodes]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(i, s)) for i, s in enumerate(streams)]
            await running.wait()
            begin_s, firsts = time.perf_counter(), list[float]()
            for prompt in prompts:
                sent_s = time.perf_counter()
                stream = await self._submit(prompt, 2)
                async for _ in stream:
                    firsts.append(time.perf_counter() - sent_s)
                    break
                await stream.cancel()
            end_s = time.perf_counter()
            if any(task.done() for task in tasks):
                raise InternalError("bench.cluster", "a decode ended before the prompts were done")
            for stream in streams:
                await stream.cancel()
        # A gap between two tokens counts, at its full length, if it overlaps the time in which the
        # prompts were served.
        gaps = [
            (later - earlier) * 1e3
            for each in moments
            for earlier, later in itertools.pairwise(each)
            if later > begin_s and earlier < end_s
        ]
        return statistics.quantiles(gaps, n=100, method="inclusive")[98], (
            statistics.median(firsts) * 1e3
        )


def make_interference_cases(
    model: Path,
    cache: str,
    weight_format: str,
    draw: Callable[[int], list[int]],
    prompt_len: int,
    *,
    quick: bool,
) -> Iterator[BenchCase]:
    """Yield the two cases; both figures come from one measurement, made by the first case.

    Args:
       model: folder of a checkpoint.
       cache: folder of its packed weights, shared by all instances.
       weight_format: weight format of experts and matrices.
       draw: returns random token ids.
       prompt_len: tokens of the prompts that arrive.
       quick: fewer requests decode.
    """
    arms: dict[str, _Serving] = {}
    spare: dict[tuple[str, int], list[float]] = {}
    num_decodes = QUICK_NUM_DECODES if quick else NUM_DECODES
    with contextlib.ExitStack() as opened:

        def check() -> str:
            if not arms:
                for name, config in (
                    ("unified", ClusterConfig(unified=1)),
                    ("apart", ClusterConfig(prefill=1, decode=1)),
                ):
                    arms[name] = _Serving(model, cache, weight_format, config)
                    opened.callback(arms[name].close)
            prompts = [draw(prompt_len // 4), draw(DECODE_PROMPT_LEN)]
            truth = arms["unified"].ask(prompts, CHECK_TOKENS)
            if arms["apart"].ask(prompts, CHECK_TOKENS) != truth:
                return "tokens differ between the two"
            return "ok"

        def measure(arm: str, metric: int) -> float:
            kept = spare.setdefault((arm, metric), [])
            if not kept:
                decodes = [draw(DECODE_PROMPT_LEN) for _ in range(num_decodes)]
                prompts = [draw(prompt_len) for _ in range(NUM_PROMPTS)]
                for which, value in enumerate(arms[arm].measure(decodes, prompts)):
                    spare.setdefault((arm, which), []).append(value)
            return spare[arm, metric].pop(0)

        for metric, name in enumerate(("p99-between-tokens", "median-first-token")):
            yield BenchCase(
                name=(
                    f"case=interference metric={name} decodes={num_decodes} prompt={prompt_len} "
                    f"format={weight_format}"
                ),
                unit="ms",
                ours=lambda metric=metric: measure("apart", metric),
                check=check,
                baseline=lambda metric=metric: measure("unified", metric),
                baseline_name="one unified instance on all cores",
            )
