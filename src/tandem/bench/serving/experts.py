"""`tandem bench experts`: the cost of counting the chosen experts, against the step that chooses
them.

Ours is the CPU time of counting the choices of a step, over 10,000 steps of one token each; the
baseline is the CPU time of a whole decode step of one sequence, sampling included. A ratio of 100
means that counting costs one per cent. The demo model has the shortest steps of all served models,
so its relative cost is the highest.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from tandem.bench.harness import BenchCase
from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import BuiltEngine, build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.stepping.expert_log import ExpertLog
from tandem.models.config import ModelConfig

__all__ = ["make_cases"]

NUM_STEPS, QUICK_STEPS = 10_000, 500
DECODES, QUICK_DECODES = 500, 50
PROMPT = [5 + i for i in range(16)]
SHAPES = {"demo": (6, 8, 2), "qwen3-30b-a3b": (48, 128, 8)}
"""Sizes by model: layers, experts, experts per token."""
MICROSECONDS = 1e6


def _draw_choices(shape: tuple[int, int, int]) -> list[np.ndarray]:
    num_layers, num_experts, top_k = shape
    generator = np.random.default_rng(0)
    return [generator.integers(0, num_experts, (num_layers, 1, top_k)) for _ in range(64)]


def _time_counting(shape: tuple[int, int, int], num_steps: int) -> float:
    steps = _draw_choices(shape)
    log = ExpertLog(list(range(shape[0])), shape[1])
    begin = time.process_time()
    for step in range(num_steps):
        log.note(steps[step % len(steps)])
    return (time.process_time() - begin) / num_steps * MICROSECONDS


def _time_decodes(built: BuiltEngine, num_steps: int) -> float:
    params = SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
    built.engine.add(AddRequest(request_id="bench", prompt_ids=PROMPT, sampling=params))
    built.engine.step()
    begin, done = time.process_time(), 0
    while built.engine.has_requests:
        built.engine.step()
        done += 1
    return (time.process_time() - begin) / done * MICROSECONDS


def _check_counts(shape: tuple[int, int, int]) -> str:
    steps = _draw_choices(shape)
    log = ExpertLog(list(range(shape[0])), shape[1])
    for choices in steps:
        log.note(choices)
    told = [sum(layer) for layer in log.read().counts]
    return "ok" if told == [len(steps) * shape[2]] * shape[0] else f"choices of layers: {told}"


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases.

    Args:
        quick: fewer steps.
    """
    num_steps, num_decodes = (QUICK_STEPS, QUICK_DECODES) if quick else (NUM_STEPS, DECODES)
    config = EngineConfig(num_kv_blocks=16, max_model_len=1024, threads=1)
    built: list[BuiltEngine] = []

    def time_decodes() -> float:
        if not built:
            built.append(build_engine(ModelConfig(path="demo"), config, MonotonicClock()))
        return _time_decodes(built[0], num_decodes)

    for name, shape in SHAPES.items():
        baseline: Callable[[], float] | None = time_decodes if name == "demo" else None
        yield BenchCase(
            name=f"shape={name} tokens=1",
            unit="us of CPU",
            ours=lambda shape=shape: _time_counting(shape, num_steps),
            check=lambda shape=shape: _check_counts(shape),
            baseline=baseline,
            baseline_name=None if baseline is None else "a decode step",
        )
