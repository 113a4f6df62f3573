"""The runner that computes with torch, on a ``CausalModel`` and its block-major KV cache."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.wire import TokenLogprob
from tandem.engine.runner import SequenceResult
from tandem.engine.sampler import gather_logprobs, sample_tokens
from tandem.engine.sampler_state import SamplerState
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import ScheduledSequence, StepPlan
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.models.loading.loader import CausalModel

__all__ = ["TorchRunner"]


class TorchRunner:
    """Runs a ``CausalModel`` on its device.

    Args:
        model: not owned; not called from elsewhere meanwhile.
        kv_cache: of the scheduler's blocks; owned.
        threads: that torch computes with.
    """

    def __init__(self, model: CausalModel, kv_cache: PagedKvCache, *, threads: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._threads = threads

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        states: Mapping[str, SamplerState],
        on_layer: Callable[[int], None] | None = None,
    ) -> dict[str, SequenceResult]:
        """See ``Runner.run``."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        for copy in plan.copies:
            self._kv_cache.copy_block(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
        chunks = [_make_chunk(sequence) for sequence in plan.sequences]
        batch = PagedBatch.build(chunks, self._kv_cache.layout.block_size)
        logits_RV = self._model.forward(batch, self._kv_cache, on_layer)
        return _read_logits(plan, states, logits_RV, self._kv_cache.pool)


def _make_chunk(sequence: ScheduledSequence) -> SequenceChunk:
    if _predicts_prompt(sequence):
        wants = "all"
    else:
        wants = "last" if sequence.wants_sample else "none"
    end = sequence.start + sequence.num_tokens
    return SequenceChunk(
        token_ids=sequence.request.get_tokens(sequence.start, end),
        start=sequence.start,
        block_table=list(sequence.block_table),
        wants=wants,
        adapter=sequence.request.adapter,
    )


def _predicts_prompt(sequence: ScheduledSequence) -> bool:
    """Whether some of its tokens predict tokens of the prompt whose log-probability is asked."""
    request = sequence.request
    wants = request.sampling.prompt_logprobs is not None
    return wants and sequence.start < request.prompt_len - 1


def _read_logits(
    plan: StepPlan,
    states: Mapping[str, SamplerState],
    logits_RV: Tensor,
    pool: ThreadPool | None,
) -> dict[str, SequenceResult]:
    results: dict[str, SequenceResult] = {}
    sampling: list[Request] = []
    sample_rows: list[int] = []
    num_rows = 0
    for sequence in plan.sequences:
        request = sequence.request
        result = results[request.request_id] = SequenceResult()
        if _predicts_prompt(sequence):
            rows_RV = logits_RV[num_rows : num_rows + sequence.num_tokens]
            result.prompt_logprobs = _read_prompt(sequence, rows_RV, pool)
            num_rows += sequence.num_tokens
        elif sequence.wants_sample:
            num_rows += 1
        if sequence.wants_sample:
            sampling.append(request)
            sample_rows.append(num_rows - 1)
    if sampling:
        picked_RV = logits_RV if len(sample_rows) == num_rows else logits_RV[sample_rows]
        sampled = sample_tokens(
            picked_RV,
            [states[request.request_id] for request in sampling],
            [len(request.output_ids) for request in sampling],
            pool=pool,
        )
        for request, token in zip(sampling, sampled, strict=True):
            results[request.request_id].sampled = token
    return results


def _read_prompt(
    sequence: ScheduledSequence, rows_RV: Tensor, pool: ThreadPool | None
) -> list[TokenLogprob]:
    """Position i predicts prompt token i + 1; positions past the prompt predict output."""
    request = sequence.request
    end = min(sequence.start + sequence.num_tokens, request.prompt_len - 1)
    targets = request.prompt_ids[sequence.start + 1 : end + 1]
    count = request.sampling.prompt_logprobs or 0
    return gather_logprobs(rows_RV[: len(targets)], targets, [count] * len(targets), pool=pool)
