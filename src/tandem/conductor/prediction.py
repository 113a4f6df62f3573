"""Predicted latencies of a request on each instance, from costs, loads and cached prefixes.
Pure.
"""

import math
from dataclasses import dataclass

import numpy as np

from tandem.conductor.fleet import Fleet, FloatColumn, IntColumn

__all__ = ["TtftParts", "predict_tpot", "predict_ttft"]


@dataclass(frozen=True, slots=True)
class TtftParts:
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
    """Predict the mean time per token on instances, if each decoded one more request.

    Queued prompts are computed between its tokens. Each token waits for at most one full step of
    them, and all tokens together for the whole queue once.

    Args:
        fleet: state of the instances; not modified.
        rows: rows of the instances, as an index of columns.
        prompt_len: number of tokens that its first decode reads.
        max_tokens: largest number of tokens that it may generate; half of them are expected.
        prefix_len: number of prompt tokens that need not be computed there. The others are computed
            between the tokens of requests that decode already, and the result is those requests'
            time.
            None: the whole prompt need not be computed there.
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
    # Each decode step also waits for its share of the queued prompts' time: the whole queue spread
    # over the request's tokens, but at most one step full of prompt tokens.
    step_share = fleet.max_batch_tokens[rows] / np.maximum(queued, 1.0)
    return decode_s + queue_s * np.minimum(step_share, 1.0 / num_tokens)
