"""Conversion of plans and requests to the plain values of a ``StepInput``; errors of failed
steps.
"""

from collections.abc import Iterable

from tandem.core.errors import ConfigError, InternalError, TandemError
from tandem.core.wire import Pooling, SamplingParams, StepRecord
from tandem.engine.scheduling.plan import ScheduledSequence, StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.stepping.messages import (
    Logits,
    Phase,
    PooledRows,
    SamplingRow,
    SequenceStart,
    StepSequence,
    pack_block_ids,
)

__all__ = [
    "describe_broken_row",
    "describe_failure",
    "describe_sequence",
    "describe_start",
    "describe_step",
]


def describe_sequence(sequence: ScheduledSequence) -> StepSequence:
    """Return what a step computes of a scheduled sequence, as a message for the runner."""
    request = sequence.request
    start, end = sequence.start, sequence.start + sequence.num_tokens
    # The logits of a prompt position score the next prompt token. Those of the last position
    # predict output and score nothing.
    num_scored = request.prompt_len - 1 - start
    is_scored = request.sampling.prompt_logprobs is not None and num_scored > 0
    pooled = None
    if request.sampling.pooling is not None:
        pooled = PooledRows(request.sampling.pooling, end == request.prompt_len)
    if is_scored or (pooled is not None and pooled.kind is Pooling.MEAN):
        logits = Logits.ALL
    elif sequence.wants_sample or (pooled is not None and pooled.is_end):
        logits = Logits.LAST
    else:
        logits = Logits.NONE
    return StepSequence(
        sequence_id=request.sequence_id,
        phase=sequence.phase,
        start=start,
        token_ids=request.get_tokens(start, end),
        block_table=request.packed_table,
        logits=logits,
        sampling=SamplingRow(len(request.output_ids)) if sequence.wants_sample else None,
        adapter=request.adapter,
        scored_ids=request.prompt_ids[start + 1 : end + 1] if is_scored else [],
        num_top=request.sampling.prompt_logprobs or 0,
        state_slot=request.state_notes.slot,
        prompt_len=request.prompt_len,
        pooled=pooled,
        window_first=sequence.window.first,
        window_blocks=pack_block_ids(blocks) if (blocks := sequence.window.blocks) else b"",
    )


def describe_start(request: Request, seed: int, stop_ids: Iterable[int]) -> SequenceStart:
    """Return the sampling state of a request before its first sample on a runner."""
    params = request.sampling
    repeats = params.repetition_penalty != 1.0
    return SequenceStart(
        sequence_id=request.sequence_id,
        params=params,
        seed=seed,
        stop_ids=tuple(stop_ids),
        prompt_ids=request.prompt_ids if repeats else [],
        output_ids=list(request.output_ids) if params.has_penalties or params.grammar else [],
    )


def describe_step(plan: StepPlan, seconds: float) -> StepRecord:
    """Return a record of a step's work and duration, from which later durations are estimated."""
    prefill_tokens = num_decodes = decode_tokens = 0
    prefill_context = 0.0
    for sequence in plan.sequences:
        if sequence.phase is Phase.PREFILL:
            prefill_tokens += sequence.num_tokens
            prefill_context += sequence.num_tokens * (sequence.start + 0.5 * sequence.num_tokens)
        else:
            num_decodes += 1
            decode_tokens += sequence.start + sequence.num_tokens
    return StepRecord(prefill_tokens, prefill_context, num_decodes, decode_tokens, seconds)


def describe_failure(error: Exception) -> InternalError:
    """Return the error with which requests end when the model fails in their step."""
    cause = error.what if isinstance(error, TandemError) else error
    return InternalError("engine.step", f"the model failed: {cause}")


def describe_broken_row(params: SamplingParams) -> TandemError:
    """Return the error for logits without a distribution (NaN, or nothing left to choose).

    It names the grammar, the penalties or the model as the cause, as the parameters suggest.
    """
    if params.grammar:
        what = (
            "the grammar allows no token here, or reached the limits of its parser: use a simpler "
            "schema or grammar"
        )
        return ConfigError("engine.sample", what, field="response_format")
    if params.has_penalties or params.logit_bias:
        what = (
            "no token can be chosen: the logits are not finite numbers after penalties and "
            "logit_bias: leave these out, and if that does not help, the model is at fault"
        )
        return ConfigError("engine.sample", what, field="repetition_penalty")
    return InternalError("engine.sample", "the model's logits are not numbers")
