"""Goal: the native sampler draws what its definition says, whatever the company, threads and ISA.

Method: the same draw through the float64 oracle. A token counts as right if the oracle chooses it
for a draw, a top_p and a min_p that are off by no more than the derived error of a share of mass;
mutants of the parameters must be told apart. Log-probabilities are compared within their bound.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels import tolerance
from tandem.kernels.oracles import reference

ISAS = _native.kernel_isas()
every_isa = each("isa", ISAS)
LAST_DRAW = 1.0 - 2.0**-53


def sample(logits, *rules, draw=0.5, positions=None, **options):
    rules = [_native.SamplingRule(**fields) for fields in rules]
    draws = draw if isinstance(draw, list) else [draw] * len(rules)
    places = positions or [0] * len(rules)
    return _native.sample_tokens(_native.TensorView(logits), rules, draws, places, **options)


def list_right(logits, fields, draw):
    """The tokens that the oracle allows for a draw, given the errors of float32."""
    values, temperature = logits.double().numpy(), fields.get("temperature", 1.0)
    if temperature == 0.0:
        return {int(values.argmax())}
    error = tolerance.share_of_mass(values, temperature)
    right = set()
    nudges, top_p, min_p = (-error, 0.0, error), fields.get("top_p", 1.0), fields.get("min_p", 0.0)
    for p, q in itertools.product(nudges if top_p < 1.0 else (0.0,), nudges if min_p else (0.0,)):
        near = {"temperature": 1.0, **fields, "min_p": min(min_p * (1 + q), 1.0)}
        if top_p < 1.0:
            near["top_p"] = min(top_p * (1 + p), LAST_DRAW)
        order, mass = reference.keep_tokens(values, **near)
        first, last = (
            reference.choose_token(order, mass, min(max(draw + nudge, 0.0), 1.0))
            for nudge in (-error, error)
        )
        right.update(order[first : last + 1].tolist())
    return right


RULES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"top_k": 1},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.35},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]


@every_isa
@each("size", [1, 2, 63, 64, 65, 1000, 7001])
def test_sample(isa, size):
    generator = torch.Generator().manual_seed(size)
    for rule, scale, draw in itertools.product(RULES, (0.5, 4.0), (0.0, 0.31, 0.77, LAST_DRAW)):
        logits = torch.randn(1, size, generator=generator) * scale
        (token,) = sample(logits, rule, draw=draw, isa=isa)
        assert token in list_right(logits[0], rule, draw), (rule, scale, draw)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    draw=st.floats(0.0, LAST_DRAW),
    # Of few values, so that many are equal.
    levels=st.sampled_from([1, 2, 5, 1000]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.35, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 39, 100, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
)
def test_sample_with_equals(seed, size, draw, levels, **fields):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (1, size), generator=generator).float() / 100
    (token,) = sample(logits, fields, draw=draw)
    assert token in list_right(logits[0], fields, draw)


@each(
    ("rule", "mutant"),
    [
        ({}, {"temperature": 1.03}),
        ({"temperature": 0.0}, {"top_k": 2}),
        ({"top_k": 40}, {"top_k": 41}),
        ({"top_p": 0.8}, {"top_p": 0.81}),
        ({"min_p": 0.1}, {"min_p": 0.11}),
        ({"top_k": 40, "top_p": 0.8}, {"top_p": 0.8}),
        ({"top_k": 40, "top_p": 0.8}, {"top_k": 40}),
    ],
)
def test_sample_mutants(rule, mutant):
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(3)) * 2
    draws = [i / 400 for i in range(400)]
    wrong = sum(
        sample(logits, mutant, draw=draw)[0] not in list_right(logits[0], rule, draw)
        for draw in draws[::8] + draws[-10:]
    )
    assert wrong > 0


def test_shares_of_draws_are_the_probabilities():
    """Walking through all draws gives every token as often as it is likely."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    draws = [(i + 0.5) / 20000 for i in range(20000)]
    found = sample(logits.expand(20000, 50).contiguous(), *[{}] * 20000, draw=draws)
    shares = np.bincount(found, minlength=50) / 20000
    expected = np.exp(reference.log_softmax(logits.double().numpy()))[0]
    assert np.abs(shares - expected).max() <= 1 / 20000 + tolerance.share_of_mass(
        logits.double().numpy(), 1.0
    )


def test_rows_are_bitwise_independent():
    """Of company, threads, strides and ISA."""
    logits = torch.randn(48, 9000, generator=torch.Generator().manual_seed(2)) * 3
    rules = RULES * 4
    draws = torch.rand(48, generator=torch.Generator().manual_seed(5), dtype=torch.float64).tolist()
    together = sample(logits, *rules, draw=draws)
    pool = _native.ThreadPool(3, oversubscribe=True)
    assert sample(logits, *rules, draw=draws, pool=pool) == together
    padded = torch.full((48, 9010), math.nan)
    padded[:, :9000] = logits
    assert sample(padded[:, :9000], *rules, draw=draws) == together
    for isa in ISAS:
        assert sample(logits, *rules, draw=draws, isa=isa) == together
    alone = [sample(logits[i : i + 1], rules[i], draw=draws[i])[0] for i in range(48)]
    assert alone == together
    ids = together
    values = _native.gather_logprobs(_native.TensorView(logits), ids, 5)
    assert _native.gather_logprobs(_native.TensorView(logits), ids, 5, pool) == values
    for isa in ISAS:
        assert _native.gather_logprobs(_native.TensorView(logits), ids, 5, isa=isa) == values


@every_isa
def test_rows_without_a_distribution(isa):
    rows = torch.randn(6, 130)
    rows[0, 129] = math.nan
    rows[1, 7] = math.inf
    rows[2] = -math.inf
    rows[3, :129] = -math.inf
    rows[4] = torch.finfo(torch.float32).max
    rows[5, 1:] = -torch.finfo(torch.float32).max
    for rule in RULES:
        found = sample(rows, *[rule] * 6, draw=0.99, isa=isa)
        assert found[:4] == [-1, -1, -1, 129], rule
        assert 0 <= found[4] < 130
        assert found[5] == 0
    values, _, top = _native.gather_logprobs(_native.TensorView(rows), [0] * 6, 2, isa=isa)
    assert [math.isnan(value) for value in values] == [True] * 3 + [False] * 3
    assert [math.isnan(value) for value in top[::2]] == [True] * 3 + [False] * 3
    assert values[3] == -math.inf
    assert values[4] == pytest.approx(-math.log(130))


def test_equals_go_to_the_lower_id():
    logits = torch.zeros(1, 5000)
    assert sample(logits, {"temperature": 0.0}) == [0]
    assert sample(logits, {"top_k": 10}, draw=LAST_DRAW) == [9]
    assert sample(logits, {"top_p": 0.5}, draw=LAST_DRAW) == [2499]
    logits[0, 77] = -0.0  # Equal to 0.
    assert sample(logits, {"top_k": 78}, draw=LAST_DRAW) == [77]
    _, ids, _ = _native.gather_logprobs(_native.TensorView(logits), [0], 4)
    assert ids == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randperm(500, generator=generator).float()[None]
    for fields in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        found = sample(logits, {"temperature": temperature, **fields}, draw=LAST_DRAW)
        assert found == [int(logits.argmax())]


@every_isa
def test_logprobs(isa, count_outside):
    generator = torch.Generator().manual_seed(9)
    for size, scale in itertools.product((1, 64, 100, 7777), (0.1, 3.0, 100.0)):
        logits = torch.randn(3, size, generator=generator) * scale
        count = min(size, 20)
        view = _native.TensorView(logits)
        values, ids, top = _native.gather_logprobs(view, [0, size // 2, size - 1], count, isa=isa)
        expected = reference.log_softmax(logits.double().numpy())
        bound = tolerance.log_softmax(expected)
        chosen = expected[[0, 1, 2], [0, size // 2, size - 1]]
        assert count_outside(torch.tensor(values, dtype=torch.float64), chosen, bound[:, 0]) == 0
        order = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :count]
        assert np.array_equal(np.reshape(ids, (3, count)), order)
        best = np.take_along_axis(expected, order, -1)
        got = torch.tensor(top, dtype=torch.float64).view(3, count)
        assert count_outside(got, best, np.broadcast_to(bound, best.shape)) == 0
        assert count_outside(got * 1.001 + 1e-4, best, np.broadcast_to(bound, best.shape)) > 0


def edited(logits, position=0, notes=(), **fields):
    """The logits as a rule's edits leave them, read back through their log-probabilities."""
    size = len(logits)
    rule = _native.SamplingRule(temperature=1.0, **fields)
    for token in notes:
        rule.note_token(token)
    # One token is left at a time: the rest is pushed away by draws, so each is found by its mass.
    view = _native.TensorView(logits[None])
    draws = [(i + 0.5) / 4000 for i in range(4000)]
    found = [_native.sample_tokens(view, [rule], [draw], [position])[0] for draw in draws]
    return np.bincount(found, minlength=size) / 4000


def test_penalties_follow_their_formulae():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.0, 0.3])
    notes = [2, 2, 4]
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    found = edited(logits, notes=notes, prompt_ids=[0, 1, 1, 99, -3], **fields)
    want = reference.edit_logits(
        logits.double().numpy(), [0, 1], notes, repetition=2.0, frequency=0.5, presence=0.25
    )
    expected = np.exp(reference.log_softmax(want[None]))[0]
    assert np.abs(found - expected).max() < 1 / 4000 + tolerance.share_of_mass(want, 1.0)
    for name in fields:
        less = {key: value for key, value in fields.items() if key != name}
        other = edited(logits, notes=notes, prompt_ids=[0, 1], **less)
        assert np.abs(other - expected).max() > 0.01


def test_biases_and_held_back_ids():
    logits = torch.tensor([9.0, 1.0, 0.0])
    rule = {"temperature": 0.0, "min_tokens": 2, "stop_ids": [0, 7, -1]}
    assert sample(logits[None], rule, positions=[1]) == [1]
    assert sample(logits[None], rule, positions=[2]) == [0]
    assert sample(logits[None], {**rule, "biases": [(2, 5.0), (9, 100.0)]}, positions=[0]) == [2]
    everything = {"min_tokens": 1, "stop_ids": [0, 1, 2]}
    assert sample(logits[None], everything) == [-1]
    assert logits.tolist() == [9.0, 1.0, 0.0]


def test_refusals():
    logits = torch.zeros(2, 8)
    good = {"top_k": 1}
    for bad in (logits[0], logits.bfloat16(), logits.t(), torch.zeros(2, 0)):
        with pytest.raises(ShapeError):
            sample(bad, good, good)
        with pytest.raises(ShapeError):
            _native.gather_logprobs(_native.TensorView(bad), [0] * len(bad))
    for draw in ([0.5], [0.5, 1.0], [-0.1, 0.5], [math.nan, 0.5]):
        with pytest.raises(ShapeError):
            sample(logits, good, good, draw=draw)
    with pytest.raises(ShapeError):
        sample(logits, good)
    with pytest.raises(ShapeError):
        sample(logits, good, good, positions=[1])
    with pytest.raises(ConfigError):
        sample(logits, good, good, isa="mmx")
    for fields in (
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ):
        with pytest.raises(ConfigError):
            sample(logits, fields, good)
    view = _native.TensorView(logits)
    for ids, num_top in (([0], 0), ([0, 8], 0), ([-1, 0], 0), ([0, 0], 9)):
        with pytest.raises(ShapeError):
            _native.gather_logprobs(view, ids, num_top)
    assert sample(torch.zeros(0, 8)) == []
    assert _native.gather_logprobs(_native.TensorView(torch.zeros(0, 8)), [], 3) == ([], [], [])
