"""The runner that computes with torch, on a ``CausalModel`` and its block-major KV cache."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.errors import TandemError
from tandem.core.wire import Pooling, TokenLogprob
from tandem.engine.stepping.expert_log import ExpertLog
from tandem.engine.stepping.grammar import Grammars, Mask
from tandem.engine.stepping.messages import (
    Logits,
    Phase,
    SampledToken,
    SequenceResult,
    StateCopy,
    StepInput,
    StepResult,
    StepSequence,
)
from tandem.engine.stepping.pooling import HiddenSum, encode_vector
from tandem.engine.stepping.runner import LostBlocksError, StepHandle
from tandem.engine.stepping.sampler import gather_logprobs, sample_tokens
from tandem.engine.stepping.sampler_state import BROKEN_ROW, SamplerState
from tandem.engine.tiers.mirror import KvMirror
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.kernels.states import StateCache
from tandem.models.loading.loader import CausalModel
from tandem.models.own.caches import CacheSlots
from tandem.models.own.model import OwnModel

__all__ = ["TorchRunner"]

WANTED_ROWS = {Logits.NONE: "none", Logits.LAST: "last", Logits.ALL: "all"}


class TorchRunner:
    """A runner that executes a ``CausalModel`` on its device.

    Args:
        model: not owned; nothing else may call it meanwhile.
        kv_cache: memory of the scheduler's blocks; owned.
        threads: number of threads that torch computes with.
        states: memory of the scheduler's state slots; owned. None: the model has no state.
        grammars: compiles requests' grammars; owned. None: no request has one.
        experts: counts the experts that tokens choose; None: nothing is counted.
        mirror: host memory that lower tiers load into, if the KV cache is a device's; each step
            first copies new blocks from it to the device. None: lower tiers write the KV cache
            itself.
        is_overlapped: if True, steps run on a thread of their own, from ``begin`` on; otherwise on
            the thread that calls ``finish``.
    """

    def __init__(
        self,
        model: CausalModel | OwnModel,
        kv_cache: PagedKvCache,
        *,
        threads: int,
        states: StateCache | CacheSlots | None = None,
        grammars: Grammars | None = None,
        is_overlapped: bool = False,
        experts: ExpertLog | None = None,
        mirror: KvMirror | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._state_cache = states
        self._threads = threads
        self._grammars = grammars
        self._experts = experts
        self._mirror = mirror
        self._samplers: dict[int, SamplerState] = {}
        """Sampling state of each live sequence by its id, from its ``SequenceStart`` message on."""
        self._sums: dict[int, HiddenSum] = {}
        """Sums of hidden states by sequence id, of sequences whose mean is wanted."""
        self._worker = ThreadPoolExecutor(1, "step") if is_overlapped else None

    def begin(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepHandle:
        """Begin a step; see ``Runner.begin``."""
        if self._worker is None:
            return partial(self._run, step, on_layer)
        return self._worker.submit(self._run, step, on_layer).result

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for a step; see ``Runner.finish``."""
        return handle()

    def _run(self, step: StepInput, on_layer: Callable[[int], None] | None) -> StepResult:
        latents = self._kv_cache.latents
        try:
            return self._run_step(step, on_layer)
        except TandemError as error:
            lost = frozenset[int]() if latents is None else latents.take_lost_blocks()
            if not lost:
                raise
            raise LostBlocksError(error.what, lost) from error

    @torch.inference_mode()
    def _run_step(self, step: StepInput, on_layer: Callable[[int], None] | None) -> StepResult:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        for sequence_id in step.ends:
            self._samplers.pop(sequence_id, None)
            if self._grammars is not None:
                self._grammars.close(sequence_id)
            self._sums.pop(sequence_id, None)
        for start in step.starts:
            self._samplers[start.sequence_id] = SamplerState.create(start)
            if start.params.grammar:
                assert self._grammars is not None, "a grammar without a vocabulary"
                self._grammars.open(start.sequence_id, start.params.grammar)
        for slot in step.unused_slots:
            assert isinstance(self._state_cache, CacheSlots), "slots that have memory of their own"
            self._state_cache.drop(slot)
        masks = self._begin_masks(step)
        loads = None if self._mirror is None else self._mirror.begin(step)
        for copy in step.copies:
            self._kv_cache.copy_block(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
        for copy in step.window_copies:
            assert self._kv_cache.windows is not None, "a block of no layer"
            windows = self._kv_cache.windows
            windows.copy_block(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
        self._copy_states(step.state_loads)
        chunks = [_make_chunk(sequence) for sequence in step.sequences]
        batch = PagedBatch.build(chunks, self._kv_cache.layout.block_size, self._model.device)
        hidden_RD = self._compute_hidden(batch, on_layer, loads)
        self._copy_states(step.state_saves)
        if self._experts is not None and self._model.choices is not None:
            is_output = batch.find_output_rows() if self._experts.writes_trace else None
            self._experts.note(self._model.choices.numpy(force=True), is_output)
        hidden_RD, vectors = self._take_pooled(step, hidden_RD)
        logits_RV = self._model.context.fetch(self._model.project(hidden_RD))
        result = self._read_logits(step, logits_RV, masks)
        for given in result.sequences:
            vector = vectors.get(given.sequence_id)
            if vector is not None:
                _give_vector(given, vector)
        return result

    def _compute_hidden(
        self,
        batch: PagedBatch,
        on_layer: Callable[[int], None] | None,
        loads: KvArrivals | None,
    ) -> Tensor:
        model, states = self._model, self._state_cache
        if isinstance(model, OwnModel):
            assert isinstance(states, CacheSlots), "no slots of cache objects"
            return model.compute_hidden(batch, states)
        assert not isinstance(states, CacheSlots), "cache objects of operators"
        return model.compute_hidden(batch, self._kv_cache, on_layer, states, loads)

    def _take_pooled(
        self, step: StepInput, hidden_RD: Tensor
    ) -> tuple[Tensor, dict[int, NDArray[np.floating]]]:
        """Split the hidden states: return the rows whose logits are wanted, and the pooled
        vectors.
        """
        if all(sequence.pooled is None for sequence in step.sequences):
            return hidden_RD, {}
        vectors: dict[int, NDArray[np.floating]] = {}
        kept: list[int] = []
        end_row = 0
        for sequence in step.sequences:
            first_row, end_row = end_row, end_row + _count_rows(sequence)
            if first_row == end_row or _count_logits(sequence):
                kept += range(first_row, end_row)
                continue
            assert sequence.pooled is not None
            rows_TD = self._model.context.fetch(hidden_RD[first_row:end_row]).float().numpy()
            vector = rows_TD[-1]
            if sequence.pooled.kind is Pooling.MEAN:
                total = self._sums.setdefault(sequence.sequence_id, HiddenSum())
                vector = total.add(sequence.start, rows_TD)
            if sequence.pooled.is_end:
                vectors[sequence.sequence_id] = vector
        return hidden_RD[kept], vectors

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        for copy in copies:
            assert self._state_cache is not None, "a state of a model without one"
            self._state_cache.copy(copy.source, copy.target)

    def _begin_masks(self, step: StepInput) -> dict[int, Mask]:
        """Begin to compute the grammar masks of the tokens that the step will draw, by sequence
        id.
        """
        masks: dict[int, Mask] = {}
        if self._grammars is None:
            return masks
        for sequence in step.sequences:
            sequence_id = sequence.sequence_id
            if sequence.sampling is None or not self._grammars.has(sequence_id):
                continue
            if sequence.phase is Phase.VERIFY:
                continue  # Each row's mask depends on the token sampled for the row before it.
            tokens = self._samplers[sequence_id].output_ids[: sequence.sampling.position]
            masks[sequence_id] = self._grammars.begin_mask(sequence_id, tokens)
        return masks

    def _read_logits(
        self, step: StepInput, logits_RV: Tensor, masks: Mapping[int, Mask]
    ) -> StepResult:
        """Return log-probabilities of prompt tokens and sampled tokens of each sequence."""
        pool = self._model.context.pool
        late = self._grammars.find_late(masks) if self._grammars is not None else set[int]()
        results: list[SequenceResult] = []
        drawing: list[tuple[SequenceResult, SamplerState, int]] = []
        sample_rows: list[int] = []
        end_row = 0
        for sequence in step.sequences:
            result = SequenceResult(sequence.sequence_id)
            results.append(result)
            first_row, end_row = end_row, end_row + _count_logits(sequence)
            if sequence.pooled is not None and end_row > first_row:
                _give_vector(result, logits_RV[first_row].numpy())
            if sequence.scored_ids:
                rows_RV = logits_RV[first_row:end_row]
                result.prompt_logprobs = _score(sequence, rows_RV, pool)
            if sequence.sampling is None:
                continue
            sampler = self._samplers[sequence.sequence_id]
            position = sequence.sampling.position
            if sequence.phase is Phase.VERIFY:
                rows_RV = logits_RV[first_row:end_row]
                result.tokens = self._verify(sequence, sampler, position, rows_RV)
            elif sequence.sequence_id in late:
                result.is_late = True
            else:
                drawing.append((result, sampler, position))
                sample_rows.append(end_row - 1)
        if drawing:
            picked_RV = logits_RV if len(sample_rows) == end_row else logits_RV[sample_rows]
            _, samplers, positions = zip(*drawing, strict=True)
            allowed = {
                row: masks[result.sequence_id].result()
                for row, (result, _, _) in enumerate(drawing)
                if result.sequence_id in masks
            }
            sampled = sample_tokens(picked_RV, samplers, positions, masks=allowed, pool=pool)
            for (result, sampler, _), token in zip(drawing, sampled, strict=True):
                result.tokens = [token]
                if token.token_id != BROKEN_ROW:
                    sampler.note_token(token.token_id)
                    if result.sequence_id in masks:
                        assert self._grammars is not None
                        self._grammars.expect_mask(result.sequence_id, sampler.output_ids)
        return StepResult(results)

    def _verify(
        self, sequence: StepSequence, sampler: SamplerState, position: int, rows_RV: Tensor
    ) -> list[SampledToken]:
        """Sample row by row, as long as the token drawn equals the draft token that the next row
        follows.

        The tokens are those of a decode without drafts, because a draw depends on seed and position
        alone.
        """
        pool, grammars = self._model.context.pool, self._grammars
        has_grammar = grammars is not None and grammars.has(sequence.sequence_id)
        tokens: list[SampledToken] = []
        drafts = sequence.token_ids[1:]
        for row in range(len(rows_RV)):
            masks: dict[int, np.ndarray | None] = {}
            if has_grammar:
                assert grammars is not None
                known = sampler.output_ids[: position + row]
                masks[0] = grammars.begin_mask(sequence.sequence_id, known).result()
            [token] = sample_tokens(
                rows_RV[row : row + 1], [sampler], [position + row], masks=masks, pool=pool
            )
            tokens.append(token)
            if token.token_id == BROKEN_ROW:
                break
            sampler.note_token(token.token_id)
            if row == len(drafts) or token.token_id != drafts[row]:
                break
        return tokens


def _make_chunk(sequence: StepSequence) -> SequenceChunk:
    windows = sequence.window_blocks
    return SequenceChunk(
        token_ids=sequence.token_ids,
        start=sequence.start,
        block_table=np.frombuffer(sequence.block_table, np.int32),
        wants=WANTED_ROWS[sequence.logits],
        adapter=sequence.adapter,
        prompt_len=sequence.prompt_len,
        state_slot=sequence.state_slot,
        window_first=sequence.window_first,
        window_blocks=np.frombuffer(windows, np.int32) if windows else (),
    )


def _count_rows(sequence: StepSequence) -> int:
    """Return for how many positions of a sequence the step needs the model's last hidden states."""
    match sequence.logits:
        case Logits.NONE:
            return 0
        case Logits.LAST:
            return 1
        case Logits.ALL:
            return len(sequence.token_ids)


def _count_logits(sequence: StepSequence) -> int:
    """Return for how many positions of a sequence the model must compute logits.

    Zero if its hidden states are pooled instead.
    """
    is_hidden = sequence.pooled is not None and sequence.pooled.kind is not Pooling.SCORE
    return 0 if is_hidden else _count_rows(sequence)


def _give_vector(result: SequenceResult, vector: NDArray[np.floating]) -> None:
    if np.isfinite(vector).all():
        result.pooled = encode_vector(vector)
    else:
        result.tokens = [SampledToken(BROKEN_ROW)]


def _score(sequence: StepSequence, rows_RV: Tensor, pool: ThreadPool | None) -> list[TokenLogprob]:
    """Return the log-probabilities of the prompt's tokens that the first rows predict."""
    targets = sequence.scored_ids
    num_top = [sequence.num_top] * len(targets)
    return gather_logprobs(rows_RV[: len(targets)], targets, num_top, pool=pool, has_ranks=True)
