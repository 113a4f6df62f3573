"""Both sides of a model benchmark, driven step by step: our engine, and transformers.

Ours runs whole engine steps: scheduling, block tables, forward pass, sampling, bookkeeping. The
rival is transformers' own forward pass with a ``DynamicCache``, in one experts implementation and
dtype.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from tandem import _native
from tandem.bench.harness import time_call
from tandem.core.clock import MonotonicClock
from tandem.core.state_layout import NO_SLOT
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.kernels.states import StateCache
from tandem.models.config import ModelConfig
from tandem.models.proof.tiny import name_cache

__all__ = [
    "DECODE_STEPS",
    "Dtype",
    "EngineDriver",
    "Phase",
    "TransformersDriver",
    "score_reference",
]

Dtype = Literal["auto", "float32", "bfloat16"]
Phase = Literal["prefill", "decode"]

MAX_ROWS = 64
"""Most sequences in a step."""
DECODE_STEPS = 8
"""Steps per measurement; the contexts of both sides grow by the same number of tokens."""


class _TimedRule:
    """A native gated delta rule (the operator of a recurrent layer) that adds up the seconds of its
    calls.
    """

    def __init__(self, rule: _native.GatedDelta) -> None:
        self._rule = rule
        self.seconds = 0.0

    def run(self, *arguments: Any) -> None:
        begin_s = time.perf_counter()
        self._rule.run(*arguments)
        self.seconds += time.perf_counter() - begin_s


class EngineDriver:
    """Our engine running one model.

    Args:
       folder: folder of the checkpoint.
       dtype: dtype of activations.
       expert_format: weight format of routed experts.
       linear_format: weight format of the other matrices.
       num_adapters: most adapters loaded at once; 0 for none.
       rules: file of rules that take precedence over the built-in ones.
       packed_cache: folder of packed weights, as in the setting ``model.packed_cache``.
    """

    def __init__(
        self,
        folder: Path,
        dtype: Dtype,
        expert_format: str = "auto",
        linear_format: str = "auto",
        num_adapters: int = 0,
        rules: Path | None = None,
        packed_cache: str = "off",
    ) -> None:
        config = EngineConfig(kv_cache_gib=1.0, max_batch_tokens=8192, max_running=MAX_ROWS)
        model = ModelConfig(
            path=str(folder),
            dtype=dtype,
            expert_format=expert_format,
            linear_format=linear_format,
            packed_cache=packed_cache,
            rules="" if rules is None else str(rules),
        )
        built = build_engine(model, config, MonotonicClock())
        self.engine: Engine = built.engine
        self._model = built.take_operators()
        if num_adapters:
            self.adapters = self._model.enable_adapters(num_adapters)
        self._rules: list[_TimedRule] = []
        self._ids = itertools.count()

    def add(self, prompt: list[int], max_tokens: int, salt: str = "", adapter: str = "") -> str:
        """Submit a greedy request; return its id."""
        request_id = str(next(self._ids))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(
            AddRequest(
                request_id=request_id,
                prompt_ids=prompt,
                sampling=sampling,
                cache_salt=salt,
                adapter=adapter,
            )
        )
        return request_id

    def drain(self) -> dict[str, list[int]]:
        """Run steps until no request is left; return the tokens by request id."""
        tokens: dict[str, list[int]] = {}
        while self.engine.has_requests:
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    def score(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] of a prompt, float32."""
        block_size = 64
        cache = self._model.allocate_kv(-(-len(prompt) // block_size), block_size=block_size)
        states = self._model.allocate_states(1)
        slot = NO_SLOT if states is None else 0
        chunk = SequenceChunk(prompt, 0, list(range(cache.num_blocks)), "all", state_slot=slot)
        return self._model.forward(PagedBatch.build([chunk], block_size), cache, states=states)

    def silence_model(self) -> None:
        """Make every later forward pass return zeros, so that a step costs only the work around the
        model.
        """
        model, width = self._model, self._model.spec.hidden_size
        hidden = torch.zeros(MAX_ROWS, width, dtype=model.dtype)
        logits = torch.zeros(MAX_ROWS, model.spec.vocab_size)

        def compute_hidden(
            batch: PagedBatch,
            kv_cache: PagedKvCache,
            on_layer: Callable[[int], None] | None = None,
            states: StateCache | None = None,
            loads: KvArrivals | None = None,
        ) -> torch.Tensor:
            return hidden[: len(batch.logit_rows)]

        def project(hidden_RD: torch.Tensor) -> torch.Tensor:  # noqa: N803
            return logits[: len(hidden_RD)]

        model.compute_hidden = compute_hidden
        model.project = project

    def watch_rules(self) -> None:
        """Make the gated delta rules (the operators of the recurrent layers) of all layers measure
        their calls from now on.
        """
        for module in self._model.skeleton.modules():
            if isinstance(module, GatedDelta):
                rule = _TimedRule(module.rule.native)
                # `native` is a cached property: assigning to it replaces the value that later calls
                # read.
                module.rule.native = rule  # pyright: ignore[reportAttributeAccessIssue]
                self._rules.append(rule)

    def take_rule_ms(self) -> float:
        """Return the milliseconds that gated delta rules took since the last call of this method.

        This counts convolution, gates, recurrence and gated norm of all layers. Call
        ``watch_rules`` first.
        """
        seconds = sum(rule.seconds for rule in self._rules)
        for rule in self._rules:
            rule.seconds = 0.0
        return seconds * 1e3

    def measure(
        self, phase: Phase, prompts: list[list[int]], adapters: list[str] | None = None
    ) -> float:
        """Return the milliseconds of a prefill of all prompts, or of a decode step after them.

        ``adapters`` names one adapter per prompt; None uses the model without adapters.
        """
        time_phase = self.time_prefill if phase == "prefill" else self.time_decode
        return time_phase(prompts, adapters)

    def _add_all(
        self, prompts: list[list[int]], max_tokens: int, adapters: list[str] | None
    ) -> list[str]:
        # Each prompt of a measurement gets its own salt, so that prompts do not share cached
        # blocks.
        used = adapters or [""] * len(prompts)
        return [
            self.add(prompt, max_tokens, str(i), adapter)
            for i, (prompt, adapter) in enumerate(zip(prompts, used, strict=True))
        ]

    def time_prefill(self, prompts: list[list[int]], adapters: list[str] | None = None) -> float:
        """Return the milliseconds until every prompt has its first token, with nothing cached
        before.
        """
        self.engine.flush_cache()
        self._add_all(prompts, 1, adapters)
        return time_call(self.drain) * 1e3

    def time_turn(self, history: list[int], message: list[int]) -> tuple[float, float]:
        """Return the milliseconds to the first token after a message: with the history cached, and
        without.
        """
        self.engine.flush_cache()
        self.add(history, 1)
        [answer] = self.drain().values()
        prompt = [*history, *answer, *message]
        self.add(prompt, 1)
        cached = time_call(self.drain) * 1e3
        return cached, self.time_prefill([prompt])

    def time_decode(
        self,
        prompts: list[list[int]],
        adapters: list[str] | None = None,
        num_steps: int = DECODE_STEPS,
    ) -> float:
        """Return the milliseconds of a decode step, averaged over ``num_steps``."""
        self.engine.flush_cache()
        ids = self._add_all(prompts, num_steps + 2, adapters)
        started: set[str] = set()
        while len(started) < len(ids):
            started |= {output.request_id for output in self.engine.step()}
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            self.engine.step()
        elapsed_s = time.perf_counter() - begin_s
        for request_id in ids:
            self.engine.cancel(request_id)
        self.drain()
        return elapsed_s / num_steps * 1e3


def score_reference(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Return transformers' logits [tokens, vocabulary] of a prompt, in bfloat16.

    The model is loaded in a process that ends afterwards, since it may not fit in memory beside the
    models that are compared.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        return torch.from_numpy(child.submit(_score_reference, folder, prompt).result())


def _score_reference(folder: Path, prompt: list[int]) -> NDArray[np.float32]:
    return TransformersDriver(folder, "grouped_mm", "bfloat16").score(prompt).numpy()


class TransformersDriver:
    """The rival: a model in transformers, with one experts implementation and dtype."""

    def __init__(self, folder: Path, experts: str, dtype: Dtype) -> None:
        self.name = f"transformers {experts} {dtype}"
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            experts_implementation=experts,
            local_files_only=True,
        ).eval()

    @torch.inference_mode()
    def score(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] of a prompt, float32."""
        return self._model(torch.tensor([prompt]), use_cache=False).logits[0].float()

    def measure(self, phase: Phase, prompts: list[list[int]], threads: int) -> float:
        """Return the milliseconds of a prefill of all prompts, or of a decode step after them."""
        torch.set_num_threads(threads)  # Our runner changes torch's thread count in every step.
        return self.time_prefill(prompts) if phase == "prefill" else self.time_decode(prompts)

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, DynamicCache]:
        """Run one forward pass over the prompts; return the first token of each, and the KV
        cache.
        """
        cache = DynamicCache(config=self._model.config)
        output = self._model(
            torch.tensor(prompts),
            use_cache=True,
            logits_to_keep=1,
            **name_cache(self._model, cache),
        )
        return output.logits[:, -1].argmax(-1), cache

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, cache: DynamicCache, steps: int) -> list[torch.Tensor]:
        """Run ``steps`` greedy decode steps after a prefill; return the tokens of each step."""
        out: list[torch.Tensor] = []
        for _ in range(steps):
            output = self._model(tokens[:, None], use_cache=True, **name_cache(self._model, cache))
            tokens = output.logits[:, -1].argmax(-1)
            out.append(tokens)
        return out

    def time_prefill(self, prompts: list[list[int]]) -> float:
        """Return the milliseconds of one forward pass over all prompts."""
        return time_call(lambda: self.prefill(prompts)) * 1e3

    def time_decode(self, prompts: list[list[int]]) -> float:
        """Return the milliseconds of a decode step, averaged over a few."""
        tokens, cache = self.prefill(prompts)
        return time_call(lambda: self.decode(tokens, cache, DECODE_STEPS)) / DECODE_STEPS * 1e3

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Return ``count`` tokens of the greedy continuation."""
        tokens, cache = self.prefill([prompt])
        rest = self.decode(tokens, cache, count - 1)
        return [int(tokens[0]), *(int(step[0]) for step in rest)]
