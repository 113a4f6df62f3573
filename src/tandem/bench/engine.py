"""`tandem bench engine`: our engine against transformers' own forward with a cache.

Ours is whole engine steps (scheduling, block tables, forward, sampling, bookkeeping). The rival is
transformers at its fastest here: all combinations of its experts implementations and of float32
and bfloat16 are tried first, and each case is measured against the one that won for it. Both run
with the same number of threads, and both must give the same greedy tokens before a time counts.

Ceilings: a prefill is compared to what a matrix multiplication of one expert-sized shape reaches
on the same threads, a decode step to reading the weights it needs once at the speed of a sum.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tandem.bench.harness import BenchCase, time_call
from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.models.config import ModelConfig
from tandem.models.hub import resolve_folder

__all__ = ["make_cases"]

PROMPT_LEN = 512
"""Tokens a prefill computes for each sequence."""
CONTEXT_LEN = 256
"""Tokens in the cache when decode steps are measured."""
DECODE_STEPS = 8
"""Steps per measurement; the contexts of both sides grow alike meanwhile."""
CHECK_TOKENS = 16
RIVALS = [
    (experts, dtype)
    for experts in ("grouped_mm", "batched_mm", "eager")
    for dtype in ("float32", "bfloat16")
]


class _Ours:
    """Our engine on one model, driven step by step."""

    def __init__(self, folder: Path, dtype: str) -> None:
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
    """One model, ours and all rivals loaded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._ours: _Ours | None = None
        self._rivals: list[_Rival] = []

    def load(self) -> None:
        if self._ours is None:
            self._ours = _Ours(self._folder, "auto")
            self._rivals = [_Rival(self._folder, *kind) for kind in RIVALS]

    @property
    def ours(self) -> _Ours:
        self.load()
        assert self._ours is not None
        return self._ours

    def make_prompts(self, batch: int, length: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(batch)
        vocab_size = self._config.vocab_size
        ids = torch.randint(0, vocab_size, (batch, length), generator=generator)
        return ids.tolist()

    def case(self, words: str, phase: str, batch: int) -> BenchCase:
        """Make one case; the rival is chosen when its check runs."""
        length = PROMPT_LEN if phase == "prefill" else CONTEXT_LEN
        prompts = self.make_prompts(batch, length)
        chosen: list[_Rival] = []

        def timer(side: _Ours | _Rival) -> float:
            run = side.time_prefill if phase == "prefill" else side.time_decode
            return run(prompts)

        def check() -> str:
            self.load()
            problem = self.compare_tokens(prompts[0])
            if problem is not None:
                return problem
            timer(self.ours)
            best = min(self._rivals, key=lambda rival: min(timer(rival) for _ in range(3)))
            chosen.append(best)
            return "ok"

        return BenchCase(
            name=words,
            unit="ms",
            ours=lambda: timer(self.ours),
            check=check,
            baseline=lambda: timer(chosen[0]),
            baseline_name=lambda: chosen[0].name,
            ceiling=self._make_ceiling(phase, batch, length),
        )

    def compare_tokens(self, prompt: list[int]) -> str | None:
        """Greedy tokens of both, in float32: equal, or where they differ."""
        exact = self.ours if self._config_is_small() else _Ours(self._folder, "float32")
        exact.engine.flush_cache()
        request_id = exact.add(prompt, CHECK_TOKENS)
        got = exact.drain()[request_id]
        rival = next(r for r in self._rivals if r.name == "transformers eager float32")
        want = rival.generate(prompt, CHECK_TOKENS)
        return None if got == want else f"greedy tokens differ: {got} and {want}"

    def _config_is_small(self) -> bool:
        from tandem.models.families import describe_model

        return describe_model(self._folder).dtype == "float32"

    def _make_ceiling(self, phase: str, batch: int, length: int) -> Callable[[], float]:
        from tandem.models.families import describe_model

        spec = describe_model(self._folder)
        if phase == "decode":
            # Weights that a step must touch at least: those of one token.
            weights = torch.ones(spec.num_active_parameters)
            return lambda: time_call(weights.sum) * 1e3
        flops = 2.0 * spec.num_active_parameters * batch * length
        a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
        return lambda: time_call(lambda: a @ b) * flops / (2.0 * 1024**3) * 1e3


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases; ``quick`` leaves the 48-layer model's baseline sweep in, it is small."""
    with tempfile.TemporaryDirectory() as scratch:
        demo = _Bench(resolve_folder("demo"))
        for phase, batch in itertools.product(("prefill", "decode"), (1, 16)):
            if quick and phase == "prefill" and batch == 16:
                continue
            yield demo.case(f"model=demo phase={phase} batch={batch}", phase, batch)
        deep = _Bench(_make_deep_model(Path(scratch)))
        yield deep.case("model=tiny48 phase=decode batch=1", "decode", 1)


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
