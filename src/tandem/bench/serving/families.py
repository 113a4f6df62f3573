"""`tandem bench families`: how much longer a step of each model family takes than the operators in
it.

Random models of each family that CI tests, with the family's own settings: two layers with the
sizes of a published model (``size=published``), or four small layers (``size=toy``). Ours is a
whole step of the model, prefill or decode. The baseline repeats the step's operator calls, recorded
before, in a loop on the same buffers; the difference is the step's overhead. The aim is a ratio of
at least 1 / 1.05.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem import _native
from tandem.bench.harness import BenchCase
from tandem.bench.serving.family_sizes import PUBLISHED_SIZES, TOY_SIZES
from tandem.bench.serving.model import write_random_weights
from tandem.kernels.cpu import step as step_module
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.operators.rope import Rope
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.weights.head_matrix import PackedHeads, TensorHeads
from tandem.models.families import FAMILIES
from tandem.models.loading.loader import CausalModel, load_model
from tandem.models.planning.planner import plan_model

__all__ = ["make_cases"]

QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
CONTEXT, BLOCK_SIZE = 128, 64
STEPS = {"decode batch=1": (1, 1), "decode batch=8": (8, 1), "prefill tokens=256": (1, 256)}
"""Steps by name: (sequences, tokens of each); tokens of a decode follow a context."""
MIN_REPEATS, REPEATS_S = 5, 0.1

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, family by family.

    Args:
       quick: tiny models, and a batch of one.
    """
    for model_type, family in FAMILIES.items():
        if family.config_type:
            continue  # This family has the same classes as another one.
        has_sizes = not quick and model_type in PUBLISHED_SIZES
        for size in ("published", "toy") if has_sizes else ("toy",):
            sizes = TOY_SIZES | QUICK if quick else TOY_SIZES
            if size == "published":
                sizes = PUBLISHED_SIZES[model_type][1]
            with tempfile.TemporaryDirectory() as scratch:
                bench = _Bench(Path(scratch), model_type, sizes)
                for step in list(STEPS)[:1] if quick else STEPS:
                    yield bench.case(size, step)


class _Bench:
    """One random model of a family, whose steps are measured."""

    def __init__(self, folder: Path, model_type: str, sizes: dict[str, Any]) -> None:
        self._folder = folder
        self._model_type = model_type
        self._sizes = sizes
        self._model: CausalModel | None = None

    def case(self, size: str, step: str) -> BenchCase:
        """Return the case of a step, a prefill or a decode; ``size`` is a part of its name."""
        state: dict[str, Any] = {}

        def check() -> str:
            state["step"], state["operators"] = self._prepare(*STEPS[step])
            return "ok" if len(state["operators"]) > 4 * self._sizes["num_hidden_layers"] else "few"

        return BenchCase(
            name=f"family={self._model_type} size={size} phase={step}",
            unit="ms",
            ours=lambda: _time_best(state["step"]),
            check=check,
            baseline=lambda: _time_best(partial(_replay, state["operators"])),
            baseline_name="its operators alone",
        )

    def _load(self) -> CausalModel:
        config = CONFIG_MAPPING[self._model_type]()
        known = type(config).__dataclass_fields__.keys() | type(config).attribute_map.keys()
        values: dict[str, Any] = {k: v for k, v in self._sizes.items() if k in known}
        if "kv_lora_rank" in known:
            # In configurations with latent attention head_dim is only the rotated part of a head,
            # which also has a field of its own.
            values.pop("head_dim", None)
        if getattr(config, "sliding_window", None) is None:
            values.pop("sliding_window", None)
        if getattr(config, "layer_types", None):
            kinds = list(dict.fromkeys(config.layer_types))
            count = values["num_hidden_layers"]
            values["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        config = type(config)(**values, dtype="bfloat16")
        write_random_weights(self._folder, config)
        plan = plan_model(self._folder, dtype="bfloat16")
        # This bench measures Python's time per step, so one thread is enough: further threads would
        # only wait for each other.
        return load_model(plan, _native.ThreadPool(1))

    def _prepare(
        self, num_sequences: int, num_tokens: int
    ) -> tuple[Callable[[], object], list[Call]]:
        """Return a function that runs a step, and the operator calls of one step."""
        model = self._model = self._load() if self._model is None else self._model
        start = CONTEXT if num_tokens == 1 else 0
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        cache = model.allocate_kv(num_sequences * num_blocks, block_size=BLOCK_SIZE)
        firsts = range(0, num_sequences * num_blocks, num_blocks)
        tables = [list(range(first, first + num_blocks)) for first in firsts]
        ids = [3 + i % 200 for i in range(max(CONTEXT, num_tokens))]
        if start:
            prompts = [SequenceChunk(ids[:start], 0, table) for table in tables]
            model.forward(PagedBatch.build(prompts, BLOCK_SIZE), cache)
        chunks = [SequenceChunk(ids[:num_tokens], start, table) for table in tables]
        paged = PagedBatch.build(chunks, BLOCK_SIZE)
        model.forward(paged, cache)
        calls: list[Call] = []
        with _record(calls):
            model.forward(paged, cache)
        return partial(model.forward, paged, cache), calls + _list_ends(model, paged)


def _time_best(function: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of several calls.

    CPU time is measured: on one thread it equals the elapsed time on an idle machine, and other
    processes do not add to it.
    """
    torch.set_num_threads(1)
    times: list[float] = []
    end_s = time.process_time() + REPEATS_S
    while len(times) < MIN_REPEATS or time.process_time() < end_s:
        begin_s = time.process_time()
        function()
        times.append(time.process_time() - begin_s)
    return 1e3 * min(times)


def _list_ends(model: CausalModel, batch: PagedBatch) -> list[Call]:
    """Return the operator calls of a step before and after its layers: embedding, last norm and
    head.
    """
    skeleton = model.skeleton
    hidden = skeleton.model.embed_tokens(batch.token_ids).index_select(0, batch.logit_rows)
    return [
        (skeleton.model.embed_tokens, (batch.token_ids,), {}),
        (skeleton.model.norm, (hidden,), {}),
        (skeleton.lm_head, (hidden,), {}),
    ]


@torch.inference_mode()
def _replay(calls: list[Call]) -> None:
    for function, args, kwargs in calls:
        function(*args, **kwargs)


class _RecordedCore:
    """The native core (our C++ module), recording in ``calls`` the functions that a step calls."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        made = _note(getattr(_native, name), self._calls)
        if name != "PlannedAttention":
            return made

        def plan(*args: Any) -> Any:
            return _RecordedPlan(made(*args), self._calls)

        return plan


class _RecordedPlan:
    """A planned attention (the native operator, prepared for one batch), recording its calls in
    ``calls``.
    """

    def __init__(self, plan: _native.PlannedAttention, calls: list[Call]) -> None:
        self.attend = _note(plan.attend, calls)
        self.store = _note(plan.store, calls)


def _note(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append((function, args, kwargs))
        return function(*args, **kwargs)

    return call


@contextmanager
def _record(calls: list[Call]) -> Iterator[None]:
    """Record every call of an operator that a step makes inside the ``with`` block, in
    ``calls``.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(step_module, "_native", _RecordedCore(calls)))
        for kind, name in (
            (PackedLinear, "run"),
            (PackedExperts, "run"),
            (TensorHeads, "run"),
            (PackedHeads, "run"),
            (Rope, "compute"),
        ):
            original = getattr(kind, name)

            def run(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                calls.append((partial(_original, self), args, kwargs))
                return _original(self, *args, **kwargs)

            stack.enter_context(patch.object(kind, name, run))
        yield
