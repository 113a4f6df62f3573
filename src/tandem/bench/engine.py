"""`tandem bench engine`: our engine against transformers' own forward with a cache.

Ours is whole engine steps (scheduling, block tables, forward, sampling, bookkeeping). The rival is
transformers at its fastest here: its experts implementations, float32 and bfloat16, one thread and
all are tried first, and each case is measured against the combination that won it. Both must give
the same greedy tokens in float32 before a time counts.

Ceilings: a prefill is compared to what a matrix multiplication of one expert-sized shape reaches
on the same threads, a decode step to reading the weights it needs once at the speed of a sum.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.core.clock import MonotonicClock
from tandem.core.spec import ModelSpec
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.models.config import ModelConfig
from tandem.models.families import describe_model
from tandem.models.hub import resolve_folder

__all__ = ["make_cases"]

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
"""Ours is measured in each; the rival always runs in whichever is faster for the case."""

PROMPT_LEN = 512
"""Tokens a prefill computes for each sequence."""
CONTEXT_LEN = 256
"""Tokens in the cache when decode steps are measured."""
DECODE_STEPS = 8
"""Steps per measurement; the contexts of both sides grow alike meanwhile."""
CHECK_TOKENS = 16
RIVALS = [
    (experts, dtype)
    for experts in ("grouped_mm", "batched_mm")
    for dtype in ("float32", "bfloat16")
]


class _Ours:
    """Our engine on one model, driven step by step."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        config = EngineConfig(kv_cache_gib=1.0, max_batch_tokens=8192, max_running=64)
        model = ModelConfig(path=str(folder), dtype=dtype)
        built = build_engine(model, config, MonotonicClock())
        self.engine: Engine = built.engine
        self.vocab_size = built.info.vocab_size
        self._ids = itertools.count()

    def add(self, prompt: list[int], max_tokens: int, salt: str = "") -> str:
        request_id = str(next(self._ids))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(
            AddRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling, cache_salt=salt)
        )
        return request_id

    def drain(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        while self.engine.has_requests:
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    def time_prefill(self, prompts: list[list[int]]) -> float:
        """Milliseconds until every prompt has its first token; nothing is cached before."""
        self.engine.flush_cache()
        for i, prompt in enumerate(prompts):
            # Salts keep prompts of one measurement from sharing what they have in common.
            self.add(prompt, 1, salt=str(i))
        return time_call(self.drain) * 1e3

    def time_decode(self, prompts: list[list[int]]) -> float:
        """Milliseconds of a decode step, the mean of a few."""
        self.engine.flush_cache()
        ids = [self.add(prompt, DECODE_STEPS + 2, salt=str(i)) for i, prompt in enumerate(prompts)]
        started: set[str] = set()
        while len(started) < len(ids):
            started |= {output.request_id for output in self.engine.step()}
        begin_s = time.perf_counter()
        for _ in range(DECODE_STEPS):
            self.engine.step()
        elapsed_s = time.perf_counter() - begin_s
        for request_id in ids:
            self.engine.cancel(request_id)
        self.drain()
        return elapsed_s / DECODE_STEPS * 1e3


class _Rival:
    """transformers with one experts implementation and dtype."""

    def __init__(self, folder: Path, experts: str, dtype: str) -> None:
        self.name = f"transformers {experts} {dtype}"
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            experts_implementation=experts,
            local_files_only=True,
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, DynamicCache]:
        cache = DynamicCache(config=self._model.config)
        output = self._model(
            torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].argmax(-1), cache

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, cache: DynamicCache, steps: int) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for _ in range(steps):
            output = self._model(tokens[:, None], past_key_values=cache, use_cache=True)
            tokens = output.logits[:, -1].argmax(-1)
            out.append(tokens)
        return out

    def time_prefill(self, prompts: list[list[int]]) -> float:
        return time_call(lambda: self.prefill(prompts)) * 1e3

    def time_decode(self, prompts: list[list[int]]) -> float:
        tokens, cache = self.prefill(prompts)
        return time_call(lambda: self.decode(tokens, cache, DECODE_STEPS)) / DECODE_STEPS * 1e3

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens, cache = self.prefill([prompt])
        rest = self.decode(tokens, cache, count - 1)
        return [int(tokens[0]), *(int(step[0]) for step in rest)]


class _Bench:
    """One model; ours and all rivals are loaded once, when the first case needs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[Dtype, _Ours] = {}

    @cached_property
    def spec(self) -> ModelSpec:
        return describe_model(self._folder)

    @cached_property
    def threads(self) -> int:
        return _native.recommend_threads(_native.read_topology()).threads

    def ours(self, dtype: Dtype) -> _Ours:
        if dtype not in self._engines:
            self._engines[dtype] = _Ours(self._folder, dtype)
        return self._engines[dtype]

    @cached_property
    def rivals(self) -> list[_Rival]:
        return [_Rival(self._folder, *kind) for kind in RIVALS]

    def case(
        self, model: str, dtype: Dtype, phase: Literal["prefill", "decode"], batch: int
    ) -> BenchCase:
        """Make one case; nothing is loaded before its check, which also picks the rival."""
        length = PROMPT_LEN if phase == "prefill" else CONTEXT_LEN
        prompts: list[list[int]] = []
        chosen: list[tuple[_Rival, int]] = []

        def measure(side: _Ours | _Rival) -> float:
            return side.time_prefill(prompts) if phase == "prefill" else side.time_decode(prompts)

        def measure_rival(rival: _Rival, threads: int) -> float:
            torch.set_num_threads(threads)  # Our runner sets its own with every step.
            return measure(rival)

        def check() -> str:
            generator = torch.Generator().manual_seed(batch)
            shape = (batch, length)
            prompts[:] = torch.randint(0, self.spec.vocab_size, shape, generator=generator).tolist()
            problem = self._compare_tokens(prompts[0])
            if problem is not None:
                return problem
            measure(self.ours(dtype))
            # The first call of a rival pays for its warm-up.
            kinds = itertools.product(self.rivals, sorted({1, self.threads}))
            chosen[:] = [min(kinds, key=lambda kind: min(measure_rival(*kind) for _ in range(2)))]
            return "ok"

        return BenchCase(
            name=f"model={model} dtype={dtype} phase={phase} batch={batch}",
            unit="ms",
            ours=lambda: measure(self.ours(dtype)),
            check=check,
            baseline=lambda: measure_rival(*chosen[0]),
            baseline_name=lambda: f"{chosen[0][0].name} threads={chosen[0][1]}",
            ceiling=lambda: self._measure_ceiling(phase, batch * length),
        )

    def _compare_tokens(self, prompt: list[int]) -> str | None:
        """Greedy tokens of both in float32: None if equal, or both."""
        exact = self.ours("float32")
        exact.engine.flush_cache()
        request_id = exact.add(prompt, CHECK_TOKENS)
        got = exact.drain()[request_id]
        rival = next(r for r in self.rivals if "float32" in r.name)
        want = rival.generate(prompt, CHECK_TOKENS)
        return None if got == want else f"greedy tokens differ: {got} and {want}"

    def _measure_ceiling(self, phase: str, num_tokens: int) -> float:
        """Milliseconds that the machine's limit allows, from one measurement of that limit."""
        torch.set_num_threads(self.threads)
        if phase == "decode":
            weights = torch.ones(self.spec.num_active_parameters)
            return time_call(weights.sum) * 1e3
        flops = 2.0 * self.spec.num_active_parameters * num_tokens
        size = 1024
        a, b = torch.ones(size, size), torch.ones(size, size)
        return time_call(lambda: a @ b) / (2.0 * size**3) * flops * 1e3


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; ``quick`` leaves out the prefill of 16 prompts and a second dtype."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        demo = _Bench(resolve_folder("demo"))
        for batch, dtype in itertools.product((1, 16), DTYPES[:1] if quick else DTYPES):
            yield demo.case("demo", dtype, "decode", batch)
        for batch, dtype in itertools.product((1,) if quick else (1, 16), DTYPES):
            yield demo.case("demo", dtype, "prefill", batch)
        deep = _Bench(_make_deep_model(Path(scratch)))
        yield deep.case("tiny48", "float32", "decode", 1)


def _make_deep_model(folder: Path) -> Path:
    """Write 48 layers of tiny width with random weights: what is measured is overhead."""
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
