"""A model in the serving engine, run in this process: greedy answers, and log-probabilities of
texts.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.adapter import AdapterSource
from tandem.core.clock import MonotonicClock
from tandem.core.errors import make_error
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.adapters import AdapterTable
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig, KvDtype
from tandem.finetune.data.examples import IGNORED_LABEL, Example
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.config import ModelConfig

__all__ = ["ServedModel"]

MAX_RUNNING = 16
"""Largest number of answers that are generated at the same time."""
BLOCK_SIZE = 64
SCORED_TOKENS = 256
"""Tokens computed at a time when log-probabilities of the whole vocabulary are needed."""


class ServedModel:
    """A checkpoint, with or without an adapter, run as `tandem serve` does. Not thread-safe.

    Args:
       config: the model to load and its formats.
       kv_dtype: number format of KV.
       lengths: tokens of each prompt with its answer, which decide how much memory KV gets.
       adapter: folder of a LoRA adapter in PEFT's format; None is the model without one.

    Raises: the errors of ``build_engine`` and ``AdapterTable.load``.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: KvDtype,
        lengths: Sequence[int],
        adapter: Path | None = None,
    ) -> None:
        longest = sorted((_count_blocks(n) + 1 for n in lengths), reverse=True)
        settings = EngineConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=sum(longest[:MAX_RUNNING]),
            max_running=MAX_RUNNING,
            kv_dtype=kv_dtype,
        )
        built = build_engine(config, settings, MonotonicClock())
        self._engine, self._model = built.engine, built.take_operators()
        self._kv_dtype: str = kv_dtype
        self._adapter = ""
        if adapter is not None:
            adapters = self._model.enable_adapters(1)
            table = AdapterTable(adapters, built.engine, built.identity, None)
            source = AdapterSource(name=adapter.name, folder=str(adapter.resolve()))
            self._adapter = table.load(source).digest

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._model.weight_bytes

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        end_ids: Sequence[int],
        on_answer: Callable[[], None],
    ) -> list[list[int]]:
        """Return the greedy answers, many generated at the same time (see ``EvaluatedModel``).

        Raises: TandemError, as a server would answer.
        """
        context = self._model.spec.max_position_embeddings
        answers: list[list[int]] = [[] for _ in prompts]
        waiting, live = deque(range(len(prompts))), 0
        while waiting or live:
            while waiting and live < MAX_RUNNING:
                number = waiting.popleft()
                left = min(max_tokens, context - len(prompts[number]))
                sampling = SamplingParams(
                    max_tokens=left, temperature=0.0, stop_token_ids=tuple(end_ids)
                )
                request = AddRequest(
                    request_id=str(number),
                    prompt_ids=prompts[number],
                    sampling=sampling,
                    adapter=self._adapter,
                )
                self._engine.add(request)
                live += 1
            for output in self._engine.step():
                if output.error_text is not None:
                    code = output.error_code or "internal"
                    raise make_error(code, "evaluation.answer", output.error_text)
                answers[int(output.request_id)] += output.token_ids
                if output.finish_reason is not None:
                    live -= 1
                    on_answer()
        return answers

    def compute_logprobs(self, example: Example) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the log-probabilities of a row's labelled tokens (see ``EvaluatedModel``).

        Runs the model's steps over KV allocated for this row; no request may be running.
        """
        ids, labels = list(example.token_ids), torch.tensor(example.labels[1:])
        table = list(range(_count_blocks(len(ids))))
        cache = self._model.allocate_kv(len(table), block_size=BLOCK_SIZE, kv_dtype=self._kv_dtype)
        states = self._model.allocate_states(1)
        for start in range(0, len(ids) - 1, SCORED_TOKENS):
            end = min(start + SCORED_TOKENS, len(ids) - 1)
            chunk = SequenceChunk(
                ids[start:end], start, table, "all", adapter=self._adapter, state_slot=0
            )
            batch = PagedBatch.build([chunk], BLOCK_SIZE)
            hidden = self._model.compute_hidden(batch, cache, states=states)
            wanted = labels[start:end]
            is_scored = wanted != IGNORED_LABEL
            if is_scored.any():
                logits = self._model.project(hidden[is_scored])
                yield wanted[is_scored], functional.log_softmax(logits, -1)


def _count_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
