"""Predicted latencies of a request on each instance, from costs, loads and cached prefixes.
Pure.
"""

import math
from typing import NamedTuple

import numpy as np

from tandem.conductor.fleet import Fleet, FloatColumn, IntColumn

__all__ = [
    "Delays",
    "TtftParts",
    "predict_delays",
    "predict_row_tpot",
    "predict_tpot",
    "predict_ttft",
]


class TtftParts(NamedTuple):
    """The predicted time to first token by row, in seconds.

    Attributes:
        transfer_s: time to load the prefix.
        queue_s: time until the queued tokens are computed.
        prefill_s: time to compute the remaining tokens of the prompt.
        total_s: sum of the three.
        prefix_len: number of prompt tokens that need not be computed.
    """

    transfer_s: FloatColumn
    queue_s: FloatColumn
    prefill_s: FloatColumn
    total_s: FloatColumn
    prefix_len: IntColumn

    def select(self, rows: IntColumn) -> "TtftParts":
        """Return the parts of the predicted times for these rows of the fleet only."""
        return TtftParts(
            self.transfer_s.take(rows),
            self.queue_s.take(rows),
            self.prefill_s.take(rows),
            self.total_s.take(rows),
            self.prefix_len.take(rows),
        )


def predict_ttft(
    fleet: Fleet,
    prompt_len: int,
    hits: IntColumn,
    shared_len: int = 0,
    threshold: float = math.inf,
) -> TtftParts:
    """Predict the time to first token for the instance of every row of the fleet, whether it serves
    or not.

    Args:
        fleet: state of the instances; not modified.
        prompt_len: number of tokens of the prompt.
        hits: number of the prompt's tokens whose KV each row has.
        shared_len: number of the prompt's tokens that any instance can load from elsewhere.
        threshold: factor by which ``shared_len`` must exceed a row's own prefix to be loaded.
    """
    prefix = np.minimum(hits, prompt_len - 1)
    transfer_s = np.zeros(len(prefix))
    if shared_len and not math.isinf(threshold):
        shared_len = min(shared_len, prompt_len - 1)
        is_fetched = shared_len > np.maximum(threshold * prefix, prefix)
        np.divide(shared_len - prefix, fleet.load_tokens_per_s, out=transfer_s, where=is_fetched)
        prefix[is_fetched] = shared_len
    step_cost, token_cost, context_cost, decode_cost, kv_cost = fleet.costs
    # Convert integers once, because numpy would convert them again in each operation with a float.
    budget, known = fleet.max_batch_tokens.astype(np.float64), prefix.astype(np.float64)
    # Each step that computes queued prompts also computes one token of every decoding request
    # there.
    step_s = decode_cost * fleet.num_decoding
    step_s += step_cost
    step_s += kv_cost * fleet.decode_tokens
    queued = fleet.queued_tokens
    queue_s = token_cost * queued
    queue_s += context_cost * fleet.queued_context
    queue_s += np.ceil(queued / budget) * step_s
    fresh = prompt_len - known
    prefill_s = token_cost * fresh
    prefill_s += context_cost * (0.5 * (prompt_len * prompt_len - known * known))
    prefill_s += np.ceil(fresh / budget) * step_s
    total_s = transfer_s + queue_s
    total_s += prefill_s
    return TtftParts(transfer_s, queue_s, prefill_s, total_s, prefix)


def predict_tpot(fleet: Fleet, prompt_len: int, max_tokens: int) -> FloatColumn:
    """Predict the mean time per token for the instance of every row of the fleet, whether it serves
    or not, if it decoded one more request.

    Queued prompts are computed between its tokens. Each token waits for at most one full step of
    them, and all tokens together for the whole queue once.

    Args:
        fleet: state of the instances; not modified.
        prompt_len: number of tokens that its first decode reads.
        max_tokens: largest number of tokens that it may generate; half of them are expected.
    """
    step_cost, token_cost, context_cost, decode_cost, kv_cost = fleet.costs
    num_tokens = max(max_tokens / 2, 1.0)
    decode_s = fleet.num_decoding + 1
    decode_s *= decode_cost
    decode_s += step_cost
    decode_s += kv_cost * (fleet.decode_tokens + (prompt_len + num_tokens / 2))
    queued = fleet.queued_tokens
    queue_s = token_cost * queued
    queue_s += context_cost * fleet.queued_context
    # Each decode step also waits for its share of the queued prompts' time: the whole queue spread
    # over the request's tokens, but at most one step full of prompt tokens.
    share = fleet.max_batch_tokens / np.maximum(queued, 1.0)
    np.minimum(share, 1.0 / num_tokens, out=share)
    queue_s *= share
    decode_s += queue_s
    return decode_s


def predict_row_tpot(
    fleet: Fleet, row: int, prompt_len: int, max_tokens: int, *, has_queue: bool = True
) -> float:
    """Predict the mean time per token on one instance, as ``predict_tpot`` does.

    Args:
        fleet: state of the instances; not modified.
        row: row of the instance.
        prompt_len: number of tokens that its first decode reads.
        max_tokens: largest number of tokens that it may generate; half of them are expected.
        has_queue: False if its own prompt is computed there after the queued ones, so that they
            come before its first token.
    """
    # Computed with Python's numbers: an operation of numpy on one element takes ten times as long.
    step_cost, token_cost, context_cost, decode_cost, kv_cost = fleet.costs[:, row].tolist()
    queued, queued_context, num_decoding, decode_tokens = fleet.load[:4, row].tolist()
    num_tokens = max(max_tokens / 2, 1.0)
    decode_s = step_cost + decode_cost * (num_decoding + 1)
    decode_s += kv_cost * (decode_tokens + (prompt_len + num_tokens / 2))
    if not has_queue:
        return decode_s
    queue_s = token_cost * queued + context_cost * queued_context
    step_share = int(fleet.max_batch_tokens[row]) / max(queued, 1.0)
    return decode_s + queue_s * min(step_share, 1.0 / num_tokens)


class Delays(NamedTuple):
    """The predicted times by which requests of an instance delay each other, in seconds."""

    step_s: float = 0.0
    """A step of the instance that decodes a new request, with it and without prompts."""
    queue_s: float = 0.0
    """The prompts that are queued where its prompt is computed."""
    prompt_s: float = 0.0
    """Its prompt."""
    full_s: float = 0.0
    """A full step of short prompts where its prompt is computed, beyond what else is in the step.
    """


def predict_delays(
    fleet: Fleet, prefill: int, decode: int, prompt_len: int, prefix_len: int
) -> Delays:
    """Predict how a new request delays others, and they it.

    Args:
        fleet: state of the instances; not modified.
        prefill: row of the instance that computes its prompt.
        decode: row of the instance that decodes it.
        prompt_len: number of tokens of the prompt.
        prefix_len: number of prompt tokens that need not be computed.
    """
    step_cost, _, _, decode_cost, kv_cost = fleet.costs[:, decode].tolist()
    _, token_cost, context_cost, _, _ = fleet.costs[:, prefill].tolist()
    context = 0.5 * (prompt_len * prompt_len - prefix_len * prefix_len)
    queued, queued_context = fleet.queued_tokens[prefill], fleet.queued_context[prefill]
    return Delays(
        step_cost
        + decode_cost * (float(fleet.num_decoding[decode]) + 1)
        + kv_cost * (float(fleet.decode_tokens[decode]) + prompt_len),
        token_cost * float(queued) + context_cost * float(queued_context),
        token_cost * (prompt_len - prefix_len) + context_cost * context,
        token_cost * float(fleet.max_batch_tokens[prefill]),
    )
