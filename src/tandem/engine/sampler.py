"""Choosing tokens from logits.

Owns the sampling order: logit bias and penalties, the mask of stop ids before ``min_tokens``,
temperature, min_p, top_k, top_p, then one draw by inverse transform. Each row is treated by
itself, so a request's tokens do not depend on what else is in the batch.

Shapes: R rows (requests), V vocabulary, K candidates.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.wire import SamplingParams, TokenLogprob
from tandem.engine.sampling import BROKEN_ROW, SampledToken, SamplerState, draw_uniform

__all__ = ["gather_logprobs", "sample_tokens"]

NUM_CANDIDATES = 1024
"""Tokens sorted before a full sort is tried. A nucleus wider than this is rare, and a row's need
for the full sort is decided by that row alone, which keeps it independent of the batch."""


def sample_tokens(
    logits_RV: Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> list[SampledToken]:
    """Choose one token per row.

    Args:
        logits_RV: float32, CPU; not modified.
        states: one per row.
        positions: index of the token to choose in its request's output, one per row.
    Returns: one result per row, with log-probabilities where the request asked for them;
        ``BROKEN_ROW`` as token id where the logits hold NaN.
    """
    if not states:
        return []
    adjusted_RV = _adjust_logits(logits_RV, states, positions)
    values_R, greedy_R = adjusted_RV.max(dim=-1)
    token_ids: list[int] = greedy_R.tolist()
    drawing = [row for row, state in enumerate(states) if state.params.temperature > 0.0]
    if drawing:
        all_rows = len(drawing) == len(states)
        drawn = _draw(
            adjusted_RV if all_rows else adjusted_RV[drawing],
            [states[row].params for row in drawing],
            [draw_uniform(states[row].seed, positions[row]) for row in drawing],
        )
        for row, token_id in zip(drawing, drawn, strict=True):
            token_ids[row] = token_id
    for row, value in enumerate(values_R.tolist()):
        if math.isnan(value):  # max() propagates NaN.
            token_ids[row] = BROKEN_ROW
    results = [SampledToken(token_id) for token_id in token_ids]
    wanting = [
        row
        for row, state in enumerate(states)
        if state.params.logprobs is not None and token_ids[row] != BROKEN_ROW
    ]
    if wanting:
        counts = [states[row].params.logprobs or 0 for row in wanting]
        logprobs = gather_logprobs(logits_RV[wanting], [token_ids[row] for row in wanting], counts)
        for row, logprob in zip(wanting, logprobs, strict=True):
            results[row].logprob = logprob
    return results


def gather_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Return each row's log-probability of its token and of its ``num_top`` likeliest tokens."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    index_R1 = torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1)
    chosen: list[float] = logprobs_RV.gather(1, index_R1).squeeze(1).tolist()
    widest = min(max(num_top, default=0), logits_RV.shape[1])
    top: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if widest:
        values_RK, ids_RK = torch.topk(logprobs_RV, widest, dim=-1)
        top = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(ids_RK.tolist(), values_RK.tolist(), strict=True)
        ]
    return [
        TokenLogprob(token_id, value, best[:count])
        for token_id, value, best, count in zip(token_ids, chosen, top, num_top, strict=True)
    ]


def _adjust_logits(
    logits_RV: Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> Tensor:
    """Apply what edits single logits; copies only if some row needs it."""
    vocab_size = logits_RV.shape[1]
    out_RV = logits_RV
    for row, (state, position) in enumerate(zip(states, positions, strict=True)):
        params = state.params
        holds_end_back = position < params.min_tokens
        if not (state.has_penalties or params.logit_bias or holds_end_back):
            continue
        if out_RV is logits_RV:
            out_RV = logits_RV.clone()
        row_V = out_RV[row]
        if state.has_penalties:
            _apply_penalties(row_V, state)
        for token_id, bias in params.logit_bias.items():
            if 0 <= token_id < vocab_size:
                row_V[token_id] += bias
        if holds_end_back:
            row_V[[i for i in state.stop_ids if 0 <= i < vocab_size]] = -math.inf
    return out_RV


def _apply_penalties(row_V: Tensor, state: SamplerState) -> None:
    """Edit one row in place: repetition as in CTRL (arXiv:1909.05858), the others as OpenAI's."""
    params = state.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*state.prompt_ids, *state.output_counts}), dtype=torch.int64)
        values = row_V[seen]
        penalty = params.repetition_penalty
        row_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if state.output_counts:
        ids = torch.tensor(list(state.output_counts), dtype=torch.int64)
        counts = torch.tensor(list(state.output_counts.values()), dtype=row_V.dtype)
        row_V[ids] -= counts * params.frequency_penalty + params.presence_penalty


def _draw(logits_RV: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    temperature_R1 = torch.tensor([p.temperature for p in params], dtype=torch.float32).unsqueeze(1)
    # The largest logit is taken off first: a tiny temperature then gives -inf, never inf - inf.
    shifted_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    probs_RV = torch.softmax(shifted_RV / temperature_R1, dim=-1)
    picks: dict[int, int] = {}
    plain = [r for r, p in enumerate(params) if p.top_p == 1.0 and p.min_p == 0.0 and not p.top_k]
    if plain:
        picks.update(zip(plain, _invert(probs_RV[plain], [draws[r] for r in plain]), strict=True))
    truncated = [row for row in range(len(params)) if row not in picks]
    if truncated:
        num_candidates = min(NUM_CANDIDATES, probs_RV.shape[1])
        values_RK, ids_RK = torch.topk(probs_RV[truncated], num_candidates, dim=-1)
        kept_RK = _keep(values_RK, [params[r] for r in truncated])
        chosen = _invert(kept_RK, [draws[r] for r in truncated])
        ids = ids_RK.gather(1, torch.tensor(chosen).unsqueeze(1)).squeeze(1).tolist()
        picks.update(zip(truncated, ids, strict=True))
        if num_candidates < probs_RV.shape[1]:
            # A last candidate that is still kept means that the set may reach further.
            for row, last in zip(truncated, kept_RK[:, -1].tolist(), strict=True):
                if last > 0.0 and params[row].top_k != num_candidates:
                    picks[row] = _draw_wide(probs_RV[row : row + 1], params[row], draws[row])
    return [picks[row] for row in range(len(params))]


def _draw_wide(probs_1V: Tensor, params: SamplingParams, draw: float) -> int:
    values_1V, ids_1V = torch.sort(probs_1V, dim=-1, descending=True, stable=True)
    return int(ids_1V[0, _invert(_keep(values_1V, [params]), [draw])[0]])


def _keep(values_RK: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what min_p, top_k and top_p exclude; ``values_RK`` is sorted, so a prefix stays."""
    num_candidates = values_RK.shape[1]
    min_p_R1 = torch.tensor([p.min_p for p in params], dtype=torch.float32).unsqueeze(1)
    top_k_R1 = torch.tensor([p.top_k or num_candidates for p in params]).unsqueeze(1)
    kept_RK = values_RK * (values_RK >= min_p_R1 * values_RK[:, :1])
    kept_RK = kept_RK * (torch.arange(num_candidates) < top_k_R1)
    # With top_p = 1 all is kept, though rounding may cumulate to 1 before the last token. Mass
    # is counted among what min_p and top_k left, except that the tail outside the candidates
    # must count too while nothing was cut: softmax sums to 1 then, and that is the total.
    if any(p.top_p < 1.0 for p in params):
        limit_R1 = torch.tensor(
            [math.inf if p.top_p == 1.0 else p.top_p for p in params]
        ).unsqueeze(1)
        is_cut_R1 = torch.tensor([p.min_p > 0.0 or p.top_k > 0 for p in params]).unsqueeze(1)
        total_R1 = torch.where(is_cut_R1, kept_RK.sum(dim=-1, keepdim=True), 1.0)
        before_RK = (kept_RK.cumsum(dim=-1) - kept_RK) / total_R1
        is_kept_RK = before_RK < limit_R1
        is_kept_RK[:, 0] = True
        kept_RK = kept_RK * is_kept_RK
    return kept_RK


def _invert(mass_RK: Tensor, draws: Sequence[float]) -> list[int]:
    """Return per row the first index whose cumulated mass exceeds its draw's share of the total."""
    total_RK = mass_RK.cumsum(dim=-1, dtype=torch.float64)
    target_R1 = torch.tensor(draws, dtype=torch.float64).unsqueeze(1) * total_RK[:, -1:]
    picks_R = torch.searchsorted(total_RK, target_R1, right=True).squeeze(1)
    # Rows with NaN search to the end; the caller reports them, the index must only be valid.
    return picks_R.clamp_(max=mass_RK.shape[1] - 1).tolist()
