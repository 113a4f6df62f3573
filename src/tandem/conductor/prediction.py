"""The times that a request would see on each instance, from costs, loads and prefixes. Pure."""

import math
from dataclasses import dataclass

import numpy as np

from tandem.conductor.fleet import Fleet, FloatColumn, IntColumn

__all__ = ["TtftParts", "predict_tpot", "predict_ttft"]


@dataclass(frozen=True, slots=True)
class TtftParts:
    """The predicted time to first token, by row, in seconds.

    Attributes:
        transfer_s: to bring the prefix there.
        queue_s: until what is queued there is computed.
        prefill_s: of the tokens that it lacks.
        total_s: of the three.
        prefix_len: tokens of the prompt that need not be computed.
    """

    transfer_s: FloatColumn
    queue_s: FloatColumn
    prefill_s: FloatColumn
    total_s: FloatColumn
    prefix_len: IntColumn

    def select(self, rows: IntColumn) -> "TtftParts":
        """Return the parts of the selected rows."""
        return TtftParts(
            self.transfer_s[rows],
            self.queue_s[rows],
            self.prefill_s[rows],
            self.total_s[rows],
            self.prefix_len[rows],
        )


def predict_ttft(
    fleet: Fleet,
    prompt_len: int,
    hits: IntColumn,
    shared_len: int = 0,
    threshold: float = math.inf,
) -> TtftParts:
    """Predict the time to first token on every row of the fleet, whether it serves or not.

    Args:
        fleet: borrowed.
        prompt_len: tokens.
        hits: of the prompt, tokens that each row holds.
        shared_len: tokens of the prompt that any instance can load from elsewhere.
        threshold: that ``shared_len`` must exceed a local prefix by, as a factor, for that.
    """
    prefix = np.minimum(hits, prompt_len - 1)
    transfer_s = np.zeros(len(prefix))
    if shared_len and not math.isinf(threshold):
        shared_len = min(shared_len, prompt_len - 1)
        is_fetched = shared_len > np.maximum(threshold * prefix, prefix)
        np.divide(shared_len - prefix, fleet.load_tokens_per_s, out=transfer_s, where=is_fetched)
        prefix[is_fetched] = shared_len
    step_cost, token_cost, context_cost, decode_cost, kv_cost = fleet.costs
    # Integers are converted once: numpy converts them again in each operation with a float.
    budget, known = fleet.max_batch_tokens.astype(np.float64), prefix.astype(np.float64)
    # Each step that computes queued prompts also computes one token of every decoding request
    # there.
    step_s = step_cost + decode_cost * fleet.num_decoding + kv_cost * fleet.decode_tokens
    queued = fleet.queued_tokens
    queue_s = token_cost * queued + context_cost * fleet.queued_context
    queue_s += np.ceil(queued / budget) * step_s
    fresh = prompt_len - known
    context = 0.5 * (prompt_len * prompt_len - known * known)
    prefill_s = token_cost * fresh + context_cost * context + np.ceil(fresh / budget) * step_s
    return TtftParts(transfer_s, queue_s, prefill_s, transfer_s + queue_s + prefill_s, prefix)


def predict_tpot(
    fleet: Fleet,
    rows: IntColumn | slice,
    prompt_len: int,
    max_tokens: int,
    prefix_len: int | None = None,
) -> FloatColumn:
    """Predict the mean time per token on instances if each decoded one more request.

    Prompts that are queued there are computed between its tokens: at most a full step of them for
    each, and all of them together once.

    Args:
        fleet: borrowed.
        rows: of the instances, as an index of columns.
        prompt_len: tokens that its first decode reads.
        max_tokens: that it may generate; half of them are taken for what it will.
        prefix_len: tokens of the prompt that need not be computed there: the others come between
            the tokens of those that decode already, whose mean time is predicted; None: all.
    """
    step_cost, token_cost, context_cost, decode_cost, kv_cost = fleet.costs[:, rows]
    num_tokens = max(max_tokens / 2, 1.0)
    decode_s = step_cost + decode_cost * (fleet.num_decoding[rows] + 1)
    decode_s += kv_cost * (fleet.decode_tokens[rows] + (prompt_len + num_tokens / 2))
    queued = fleet.queued_tokens[rows]
    queued_context = fleet.queued_context[rows]
    if prefix_len is not None and prefix_len < prompt_len:
        queued = queued + (prompt_len - prefix_len)
        queued_context = queued_context + 0.5 * (prompt_len * prompt_len - prefix_len * prefix_len)
    queue_s = token_cost * queued + context_cost * queued_context
    # Add the time that queued prompts add to a decode step: at most one full step of their tokens.
    step_share = fleet.max_batch_tokens[rows] / np.maximum(queued, 1.0)
    return decode_s + queue_s * np.minimum(step_share, 1.0 / num_tokens)
