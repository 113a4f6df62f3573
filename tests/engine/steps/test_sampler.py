"""Sampling: each option against a naive float64 version, and the rules on seeds.

Method: distributions are compared by inverting the same draw in a plain Python loop, so a test
fails on a single wrong token, not on a statistic.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.wire import SamplingParams
from tandem.engine.stepping.sampler import gather_logprobs, sample_tokens
from tandem.engine.stepping.sampler_state import BROKEN_ROW, SamplerState, draw_uniform

VOCAB = 40


def naive_sample(logits: list[float], params: SamplingParams, draw: float) -> int:
    """The definition: sort, cut, renormalise, walk."""
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    total = sum(weights)
    if params.top_p == 1.0 and params.min_p == 0.0 and not params.top_k:
        order = list(range(len(logits)))
    else:
        order = sorted(range(len(logits)), key=lambda i: -logits[i])
    probs = {i: weights[i] / total for i in order}
    best = max(probs.values())
    kept = [i for i in order if probs[i] >= params.min_p * best]
    if params.top_k:
        kept = kept[: params.top_k]
    mass = sum(probs[i] for i in kept)
    nucleus, before = [], 0.0
    for i in kept:
        if before / mass < params.top_p or not nucleus:
            nucleus.append(i)
        before += probs[i]
    mass = sum(probs[i] for i in nucleus)
    walked = 0.0
    for i in nucleus:
        walked += probs[i]
        if walked > draw * mass:
            return i
    return nucleus[-1]


def state(seed: int = 0, **fields) -> SamplerState:
    return SamplerState(SamplingParams(**fields), seed)


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.35, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
)
def test_matches_the_definition(seed, temperature, top_p, top_k, min_p):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    one = state(seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    got = sample_tokens(logits[None], [one], [3])[0].token_id
    draw = draw_uniform(seed, 3)
    allowed = {
        naive_sample(logits.double().tolist(), one.params, min(max(draw + nudge, 0.0), 1 - 1e-12))
        for nudge in (-1e-5, 0.0, 1e-5)  # fp32 softmax against float64.
    }
    # A cut that falls within rounding of top_p may go either way.
    for p in (top_p - 1e-6, min(top_p + 1e-6, 1.0)):
        if top_p < 1.0:
            near = SamplingParams(temperature=temperature, top_p=p, top_k=top_k, min_p=min_p)
            allowed.add(naive_sample(logits.double().tolist(), near, draw))
    assert got in allowed


def test_wide_nucleus_reaches_past_the_candidates():
    logits = torch.zeros(1, 5000)  # Uniform: top_p = 0.9 keeps 4,500 tokens, candidates are 1,024.
    tokens = {
        sample_tokens(logits, [state(seed, top_p=0.9)], [0])[0].token_id for seed in range(200)
    }
    assert len(tokens) > 150
    assert max(tokens) > 1024


def test_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(9, 3000)
    mixed = [
        state(0, temperature=0.0),
        state(1),
        state(2, top_p=0.5),
        state(3, top_k=7),
        state(4, min_p=0.1),
        state(5, top_p=0.999),
        state(6, repetition_penalty=1.3),
        state(7, logit_bias={5: 100.0}),
        state(8, temperature=0.01),
    ]
    together = [t.token_id for t in sample_tokens(logits, mixed, [4] * 9)]
    alone = [sample_tokens(logits[i : i + 1], [mixed[i]], [4])[0].token_id for i in range(9)]
    assert together == alone
    assert together[7] == 5


def test_draws_depend_on_seed_and_position_alone():
    assert draw_uniform(7, 0) == draw_uniform(7, 0)
    values = [draw_uniform(seed, place) for seed in range(-50, 50) for place in range(50)]
    assert len(set(values)) == len(values)
    assert min(values) >= 0.0
    assert max(values) < 1.0
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_greedy_takes_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0]])
    assert sample_tokens(logits, [state(temperature=0.0)], [0])[0].token_id == 1


def test_penalties_count_prompt_and_output():
    """Each of two logits that only their penalties tell apart; noted before and after a step."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5)
    one = SamplerState(params, 0, prompt_ids=[0, 1])

    def best(*logits: float) -> int:
        return sample_tokens(torch.tensor([logits]), [one], [2])[0].token_id

    one.note_token(2)
    assert best(2.0, -9.0, -9.0, 1.01) == 3  # 2 / 2: seen in the prompt.
    assert best(-9.0, -0.5, -9.0, -1.01) == 1  # -0.5 * 2.
    assert best(-9.0, -9.0, 3.0, 0.99) == 2  # 3 / 2 - 0.5.
    one.note_token(2)
    assert best(-9.0, -9.0, 3.0, 0.51) == 3  # 3 / 2 - 2 * 0.5.
    one.note_token(3)
    assert best(-9.0, -9.0, 3.0, 1.99) == 2  # 1.99 / 2 - 0.5: now seen, too.
    again = SamplerState(params, 0, prompt_ids=[0, 1])
    for token in (2, 2, 3):
        again.note_token(token)  # Before its first step, as after a preemption.
    logits = torch.randn(1, VOCAB)
    assert sample_tokens(logits, [again], [3])[0] == sample_tokens(logits, [one], [3])[0]


def test_min_tokens_holds_the_end_back():
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    one = SamplerState(SamplingParams(temperature=0.0, min_tokens=2), 0, frozenset({0}))
    assert sample_tokens(logits, [one], [1])[0].token_id == 1
    assert sample_tokens(logits, [one], [2])[0].token_id == 0


def test_logprobs_are_of_the_untouched_model():
    logits = torch.randn(1, VOCAB)
    one = state(1, logprobs=3, logit_bias={4: 100.0}, temperature=0.1)
    result = sample_tokens(logits, [one], [0])[0]
    expected = torch.log_softmax(logits, -1)[0]
    assert result.token_id == 4
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(expected[4]))
    assert [token for token, _ in result.logprob.top] == expected.topk(3).indices.tolist()


def test_ranks_are_among_all_tokens():
    """Of equally likely tokens the lower id comes first, as among the likeliest."""
    logits = torch.randint(0, 9, (40, 50), generator=torch.Generator().manual_seed(3)).float()
    targets = list(range(40))
    found = gather_logprobs(logits, targets, [50] * 40, has_ranks=True)
    for one in found:
        assert [token for token, _ in one.top][one.rank - 1] == one.token_id
    assert len({one.rank for one in found}) > 10
    assert {one.rank for one in gather_logprobs(logits, targets, [0] * 40)} == {0}


def test_prompt_logprobs_of_each_row():
    logits = torch.randn(3, VOCAB)
    expected = torch.log_softmax(logits, -1)
    found = gather_logprobs(logits, [3, 0, 39], [0, 2, 100])
    assert [one.token_id for one in found] == [3, 0, 39]
    assert [one.logprob for one in found] == pytest.approx(
        [float(expected[row, token]) for row, token in enumerate((3, 0, 39))]
    )
    assert [len(one.top) for one in found] == [0, 2, VOCAB]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"logprobs": 2}])
def test_nan_is_reported_and_harms_no_neighbour(fields):
    logits = torch.randn(2, VOCAB)
    expected = sample_tokens(logits[1:], [state(1, **fields)], [0])[0].token_id
    logits[0, 3] = math.nan
    results = sample_tokens(logits, [state(0, **fields), state(1, **fields)], [0, 0])
    assert results[0].token_id == BROKEN_ROW
    assert results[1].token_id == expected


def test_tiny_temperature_is_greedy():
    logits = torch.randn(1, VOCAB) * 50
    got = sample_tokens(logits, [state(temperature=1e-6)], [0])[0].token_id
    assert got == int(logits.argmax())
