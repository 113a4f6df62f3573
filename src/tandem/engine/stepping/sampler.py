"""Choosing tokens from logits.

Hands each request's parameters to the native sampler, which owns the order of things: penalties,
logit bias and the mask of stop ids before ``min_tokens``; temperature; min_p, top_k, top_p; then
one draw by inverse transform (``native/kernels/sampling/sampling.h``). Each row is treated by
itself, so a request's tokens do not depend on what else is in the batch.

Shapes: R rows (requests), V vocabulary.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tandem._native import SamplingRule, ThreadPool
from tandem._native import gather_logprobs as gather_natively
from tandem._native import sample_tokens as sample_natively
from tandem.core.wire import TokenLogprob
from tandem.engine.stepping.messages import SampledToken
from tandem.engine.stepping.sampler_state import BROKEN_ROW, SamplerState, draw_uniform
from tandem.kernels.native import view_tensor

__all__ = ["gather_logprobs", "sample_tokens"]


NO_MASKS: Mapping[int, np.ndarray | None] = MappingProxyType({})


def mask_row(logits_V: Tensor, allowed: np.ndarray | None) -> None:
    """Set the logits of tokens that a grammar does not allow to -inf, in place.

    If ``allowed`` is None, because the grammar has failed, no token is left and the row is broken.
    """
    if allowed is None:
        logits_V.fill_(float("-inf"))
        return
    size = logits_V.shape[0]
    logits_V.masked_fill_(torch.as_tensor(allowed[:size] == 0), float("-inf"))


def sample_tokens(
    logits_RV: Tensor,
    states: Sequence[SamplerState],
    positions: Sequence[int],
    *,
    masks: Mapping[int, np.ndarray | None] = NO_MASKS,
    pool: ThreadPool | None = None,
) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits_RV: float32, CPU, dense rows; not modified.
        states: the requests' sampling states, one per row.
        positions: index in the request's output of the token to choose, one per row.
        masks: by row, the tokens that a grammar allows; None where the grammar has failed. Reported
            log-probabilities do not take them into account.
        pool: threads that share the rows if there are many.

    Returns: one result per row, with log-probabilities if the request asked for them. The token id
        is ``BROKEN_ROW`` if the logits are no distribution.
    """
    if not states:
        return []
    rules = [_find_rule(state) for state in states]
    # Draw no random number for greedy rows: computing it costs more than the rest of the row.
    draws = [
        draw_uniform(state.seed, position) if state.params.temperature > 0.0 else 0.0
        for state, position in zip(states, positions, strict=True)
    ]
    drawn_RV = logits_RV
    if masks:
        drawn_RV = logits_RV.clone()
        for row, allowed in masks.items():
            mask_row(drawn_RV[row], allowed)
    view = view_tensor(drawn_RV)
    token_ids = sample_natively(view, rules, draws, positions, pool)
    logprobs: dict[int, TokenLogprob] = {}
    wanting = [
        row
        for row, state in enumerate(states)
        if state.params.logprobs is not None and token_ids[row] != BROKEN_ROW
    ]
    if wanting:
        counts = [states[row].params.logprobs or 0 for row in wanting]
        picked_RV = logits_RV if len(wanting) == len(states) else logits_RV[wanting]
        chosen = [token_ids[row] for row in wanting]
        gathered = gather_logprobs(picked_RV, chosen, counts, pool=pool)
        logprobs = dict(zip(wanting, gathered, strict=True))
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def gather_logprobs(
    logits_RV: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    *,
    pool: ThreadPool | None = None,
    has_ranks: bool = False,
) -> list[TokenLogprob]:
    """Return the log-probabilities of each row's given token and of its ``num_top`` likeliest
    tokens; with ``has_ranks`` the token's rank among all too, which takes another pass over the
    row.

    Of equally likely tokens the lower id comes first. A row without a distribution gives NaN.
    """
    widest = min(max(num_top, default=0), logits_RV.shape[1])
    view = view_tensor(logits_RV)
    values, top_ids, top_values = gather_natively(view, token_ids, widest, pool)
    top = list(zip(top_ids, top_values, strict=True))
    ranks = [0] * len(token_ids)
    if has_ranks:
        ranks = [_rank_token(row, i) for row, i in zip(logits_RV, token_ids, strict=True)]
    return [
        TokenLogprob(
            token_id, value, top[row * widest : row * widest + min(count, widest)], ranks[row]
        )
        for row, (token_id, value, count) in enumerate(zip(token_ids, values, num_top, strict=True))
    ]


def _rank_token(logits_V: Tensor, token_id: int) -> int:
    """Return the rank of a token, 1 for the likeliest; of equally likely ones the lower id comes
    first.
    """
    own = logits_V[token_id]
    num_likelier = int((logits_V > own).count_nonzero())
    return 1 + num_likelier + int((logits_V[:token_id] == own).count_nonzero())


def _find_rule(state: SamplerState) -> SamplingRule:
    """Return the native sampling rule of a request, which is built at the first call."""
    if isinstance(state.rule, SamplingRule):
        return state.rule
    params = state.params
    rule = SamplingRule(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        # A complete grammar allows only end of text, so ``min_tokens`` must not forbid that token.
        min_tokens=0 if params.grammar else params.min_tokens,
        prompt_ids=state.prompt_ids if params.repetition_penalty != 1.0 else (),
        biases=list(params.logit_bias.items()),
        stop_ids=list(state.stop_ids),
    )
    for token_id in state.output_ids:
        rule.note_token(token_id)
    state.rule = rule
    return rule
