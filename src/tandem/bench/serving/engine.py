"""`tandem bench engine`: our engine against transformers' own forward pass with a cache.

Ours runs whole engine steps (scheduling, block tables, forward pass, sampling, bookkeeping). The
rival is transformers in its fastest combination for the case: all experts implementations, float32
and bfloat16, one thread and all threads are tried first. Before a time counts, both must give the
same greedy tokens in float32, and ours in the case's dtype must give logits near the rival's in
float32. Serving with adapters is compared with the model without them (``adapters``).

In a case named ``phase=around`` the model returns zeros, so that the step consists of scheduling,
block tables, sampling and bookkeeping; its baseline is a whole step of the demo model.

Ceilings: a prefill is compared with the rate of a matrix multiplication of an expert's size on the
same threads, a decode step with reading the needed weights once at the speed of a sum.
"""

import itertools
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.serving.adapters import make_adapter_cases
from tandem.bench.serving.driver import Dtype, EngineDriver, Phase, TransformersDriver
from tandem.core.spec import ModelSpec
from tandem.models.loading.hub import resolve_folder
from tandem.models.planning.planner import describe_model

__all__ = ["make_cases"]

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
"""Dtypes in which ours is measured; the rival runs in the one that is faster for the case."""

PROMPT_LEN = 512
"""Tokens that a prefill computes for each sequence."""
CONTEXT_LEN = 256
"""Tokens in the cache when decode steps are measured."""
AROUND_STEPS = 100
"""Steps of a measurement without the model: one takes some 60 us, so a few would be lost in the
clock's noise.
"""
CHECK_TOKENS = 16
LARGEST_ERROR = {"float32": 1e-4, "bfloat16": 0.02}
"""Largest allowed norm of the error of a token's logits, relative to their norm; bfloat16 rounds to
eight bits in every layer.
"""
RIVALS: list[tuple[str, Dtype]] = [
    (experts, dtype) for experts in ("grouped_mm", "batched_mm") for dtype in DTYPES
]


class _Bench:
    """One model, in our engine and in all rivals, each loaded once for the first case that needs
    it.
    """

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder = folder
        self._quick = quick
        self._engines: dict[Dtype, EngineDriver] = {}

    @cached_property
    def spec(self) -> ModelSpec:
        return describe_model(self._folder)

    @cached_property
    def threads(self) -> int:
        return _native.recommend_threads(_native.read_topology()).threads

    def ours(self, dtype: Dtype) -> EngineDriver:
        if dtype not in self._engines:
            self._engines[dtype] = EngineDriver(self._folder, dtype)
        return self._engines[dtype]

    @cached_property
    def rivals(self) -> list[TransformersDriver]:
        kinds = [kind for kind in RIVALS if not self._quick or kind[1] == "float32"]
        return [TransformersDriver(self._folder, *kind) for kind in kinds]

    def case(self, model: str, dtype: Dtype, phase: Phase, batch: int) -> BenchCase:
        """Return the case of one model, dtype, phase and batch; loading, and choosing the fastest
        rival, are left to its check.
        """
        length = PROMPT_LEN if phase == "prefill" else CONTEXT_LEN
        prompts: list[list[int]] = []
        chosen: list[tuple[TransformersDriver, int]] = []

        def measure() -> float:
            return self.ours(dtype).measure(phase, prompts)

        def measure_rival(rival: TransformersDriver, threads: int) -> float:
            return rival.measure(phase, prompts, threads)

        def check() -> str:
            generator = torch.Generator().manual_seed(batch)
            shape = (batch, length)
            prompts[:] = torch.randint(0, self.spec.vocab_size, shape, generator=generator).tolist()
            problem = self._compare_tokens(prompts[0]) or self._compare_logits(prompts[0], dtype)
            if problem is not None:
                return problem
            measure()
            # Each rival is measured twice and the lower time counts, since its first call includes
            # its warm-up.
            threads = {self.threads} if self._quick else {1, self.threads}
            kinds = itertools.product(self.rivals, sorted(threads))
            chosen[:] = [min(kinds, key=lambda kind: min(measure_rival(*kind) for _ in range(2)))]
            return "ok"

        return BenchCase(
            name=f"model={model} dtype={dtype} phase={phase} batch={batch}",
            unit="ms",
            ours=measure,
            check=check,
            baseline=lambda: measure_rival(*chosen[0]),
            baseline_name=lambda: f"{chosen[0][0].name} threads={chosen[0][1]}",
            ceiling=lambda: self._measure_ceiling(phase, batch * length),
        )

    def around_case(self, batch: int) -> BenchCase:
        """Return the case of a decode step whose model returns zeros, so that only the work around
        the model is measured.
        """
        drivers: list[EngineDriver] = []
        prompts: list[list[int]] = []

        def check() -> str:
            shape, vocab_size = (batch, CONTEXT_LEN), self.spec.vocab_size
            prompts[:] = torch.randint(0, vocab_size, shape).tolist()
            driver = EngineDriver(self._folder, "float32")
            driver.silence_model()
            drivers.append(driver)
            return "ok" if driver.drain() == {} else "a step without requests gave tokens"

        return BenchCase(
            name=f"model=demo dtype=float32 phase=around batch={batch}",
            unit="ms",
            ours=lambda: drivers[0].time_decode(prompts, num_steps=AROUND_STEPS),
            check=check,
            baseline=lambda: self.ours("float32").time_decode(prompts, num_steps=AROUND_STEPS),
            baseline_name="the whole step of the demo model",
        )

    def _compare_tokens(self, prompt: list[int]) -> str | None:
        """Compare greedy tokens of both sides in float32; return None if equal, else
        both as text.
        """
        exact = self.ours("float32")
        exact.engine.flush_cache()
        request_id = exact.add(prompt, CHECK_TOKENS)
        got = exact.drain()[request_id]
        rival = next(r for r in self.rivals if "float32" in r.name)
        want = rival.generate(prompt, CHECK_TOKENS)
        return None if got == want else f"greedy tokens differ: {got} and {want}"

    def _compare_logits(self, prompt: list[int], dtype: Dtype) -> str | None:
        """Compare our logits in ``dtype`` with the rival's in float32; return None if near, else
        the error as text.
        """
        want = next(r for r in self.rivals if "float32" in r.name).score(prompt)
        got = self.ours(dtype).score(prompt)
        # The median token's error counts: where two experts score nearly alike, a rounding may send
        # a token to the other expert.
        error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
        return None if error < LARGEST_ERROR[dtype] else f"logits differ by {error:.4f}"

    def _measure_ceiling(self, phase: str, num_tokens: int) -> float:
        """Return the milliseconds of a phase (prefill or decode) at the machine's limit, from one
        measurement of that limit.
        """
        torch.set_num_threads(self.threads)
        if phase == "decode":
            weights = torch.ones(self.spec.num_active_parameters)
            return time_call(weights.sum) * 1e3
        flops = 2.0 * self.spec.num_active_parameters * num_tokens
        size = 1024
        a, b = torch.ones(size, size), torch.ones(size, size)
        return time_call(lambda: a @ b) / (2.0 * size**3) * flops * 1e3


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; ``quick`` leaves out 16 prompts, bfloat16, and rivals that seldom win."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        batches, dtypes = ((1,), DTYPES[:1]) if quick else ((1, 16), DTYPES)
        demo = _Bench(resolve_folder("demo"), quick=quick)
        for batch, dtype in itertools.product(batches, dtypes):
            yield demo.case("demo", dtype, "decode", batch)
        for batch, dtype in itertools.product(batches, dtypes):
            yield demo.case("demo", dtype, "prefill", batch)
        for batch in (1,) if quick else (1, 16, 64):
            yield demo.around_case(batch)
        deep = _Bench(_make_deep_model(Path(scratch)), quick=quick)
        for dtype in dtypes:
            yield deep.case("tiny48", dtype, "decode", 1)
    yield from make_adapter_cases(quick=quick)


def _make_deep_model(folder: Path) -> Path:
    """Write a model of 48 very small layers with random weights, whose time is mostly overhead."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
