"""`tandem bench families`: what a decode step of each family costs beside its operators.

Random models of each family that CI proves, of a few layers, with the sizes below and the family's
own switches. Ours is a whole decode step of the model; the baseline is the same operators' calls,
recorded in a step and made again in a loop, on the same buffers: what is between the two is what
the step adds in Python. The aim is a ratio of at least 1 / 1.05.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.model import write_random_weights
from tandem.kernels.cpu import step as step_module
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.cpu.linear import PackedLinear
from tandem.kernels.head_matrix import PackedHeads, TensorHeads
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.rope import Rope
from tandem.models.families import FAMILIES
from tandem.models.loader import CausalModel, load_model
from tandem.models.planner import plan_model

__all__ = ["make_cases"]

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": 64,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
CONTEXT, BLOCK_SIZE, BATCHES = 128, 64, (1, 8)
REPEATS = 11

Call = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, a family after the other.

    Args:
        quick: tiny models, and a batch of one.
    """
    for model_type, family in FAMILIES.items():
        if family.config_type:
            continue  # The same classes as another's.
        with tempfile.TemporaryDirectory() as scratch:
            bench = _Bench(Path(scratch), model_type, quick=quick)
            for batch in BATCHES[:1] if quick else BATCHES:
                yield bench.case(batch)


class _Bench:
    """One random model."""

    def __init__(self, folder: Path, model_type: str, *, quick: bool) -> None:
        self._folder = folder
        self._model_type = model_type
        self._sizes = SIZES | (QUICK if quick else {})
        self._model: CausalModel | None = None

    def case(self, batch: int) -> BenchCase:
        """Make the case of a number of sequences that decode together."""
        state: dict[str, Any] = {}

        def check() -> str:
            state["step"], state["operators"] = self._prepare(batch)
            return "ok" if len(state["operators"]) > 4 * self._sizes["num_hidden_layers"] else "few"

        return BenchCase(
            name=f"family={self._model_type} phase=decode batch={batch}",
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
        if getattr(config, "sliding_window", None) is None:
            values.pop("sliding_window", None)
        if getattr(config, "layer_types", None):
            kinds = list(dict.fromkeys(config.layer_types))
            count = values["num_hidden_layers"]
            values["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        config = type(config)(**values, dtype="bfloat16")
        write_random_weights(self._folder, config)
        plan = plan_model(self._folder, dtype="bfloat16")
        # What is measured is Python's: one thread, as others would only wait for each other.
        return load_model(plan, _native.ThreadPool(1))

    def _prepare(self, batch: int) -> tuple[Callable[[], object], list[Call]]:
        """Return a decode step, and the operators' calls of one."""
        model = self._model = self._load() if self._model is None else self._model
        num_blocks = CONTEXT // BLOCK_SIZE + 1
        cache = model.allocate_kv(batch * num_blocks, block_size=BLOCK_SIZE)
        tables = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(batch)]
        prompt = [3 + i % 200 for i in range(CONTEXT)]
        prompts = [SequenceChunk(prompt, 0, table) for table in tables]
        model.forward(PagedBatch.build(prompts, BLOCK_SIZE), cache)
        chunks = [SequenceChunk([5], CONTEXT, table) for table in tables]
        paged = PagedBatch.build(chunks, BLOCK_SIZE)
        model.forward(paged, cache)
        calls: list[Call] = []
        with _record(calls):
            model.forward(paged, cache)
        return partial(model.forward, paged, cache), calls + _list_ends(model, paged)


def _time_best(function: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of some calls: others of the machine come between."""
    torch.set_num_threads(1)
    return 1e3 * min(time_call(function) for _ in range(REPEATS))


def _list_ends(model: CausalModel, batch: PagedBatch) -> list[Call]:
    """Return the calls before and after the layers."""
    skeleton = model.skeleton
    hidden = skeleton.model.embed_tokens(batch.token_ids)
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
    """The native core, noting what a step calls."""

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
    """A planned attention, noting its calls."""

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
    """Note every operator's call of a step until the block ends."""
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
