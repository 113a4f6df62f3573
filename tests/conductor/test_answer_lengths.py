"""Goal: how long an answer goes on is learnt from those that have ended.

Method: lengths drawn from a known distribution, and the shares of further draws beyond the limits.
"""

import random

import numpy as np
import pytest

from tandem.conductor.answer_lengths import (
    BROKEN_SHARE,
    FIRST_RISK,
    MAX_CLIENTS,
    MAX_RISK,
    MIN_RISK,
    AnswerLengths,
)


def draw(chance):
    """Three in ten answers are short, as in the public conversation trace."""
    drawn = chance.lognormvariate(3.0, 0.8) if chance.random() < 0.3 else chance.gauss(400, 90)
    return max(int(drawn), 1)


def learn(lengths, client, num_answers, max_tokens=10**6):
    chance = random.Random(1)
    for _ in range(num_answers):
        length = draw(chance)
        lengths.note_end(client, min(length, max_tokens), is_natural=length < max_tokens)
    return lengths


def find(lengths, client, num_tokens):
    places = np.array([lengths.find_place(client)], np.float64)
    return lengths.find_limits(places, np.array([float(num_tokens)]))[:, 0]


@pytest.mark.parametrize("num_tokens", [1, 10, 60, 300])
def test_few_end_earlier_or_later_than_told(num_tokens):
    chance, lengths = random.Random(2), learn(AnswerLengths(), "a", 2000)
    fresh = np.array([draw(chance) for _ in range(20_000)])
    fresh = fresh[fresh > num_tokens]
    few, many = find(lengths, "a", num_tokens)
    # A range of lengths is a fifth wide, and 500 answers count.
    assert (fresh < few).mean() <= 1.5 * FIRST_RISK
    assert (fresh > many).mean() <= 1.5 * FIRST_RISK
    assert (fresh < 1.5 * few).mean() >= 0.5 * FIRST_RISK
    assert (fresh > many / 1.5).mean() >= 0.5 * FIRST_RISK


def test_answers_that_reach_their_largest_length_are_not_short():
    lengths = learn(AnswerLengths(), "a", 300, max_tokens=4)
    assert find(lengths, "a", 1)[0] >= 3.5
    whole = AnswerLengths()
    for _ in range(200):
        whole.note_end("a", 1000, is_natural=False)
    assert find(whole, "a", 1)[0] > 1000


def test_a_client_is_like_all_until_it_is_known():
    lengths = learn(AnswerLengths(), "a", 1000)
    assert find(lengths, "b", 1) == pytest.approx(find(lengths, "a", 1), rel=0.2)
    for _ in range(200):
        lengths.note_end("b", 1000, is_natural=False)
    assert find(lengths, "b", 1)[0] > 300
    assert find(lengths, "a", 1)[0] < 20


def test_the_old_is_forgotten_and_memory_is_bounded():
    lengths = learn(AnswerLengths(), "a", 500)
    for _ in range(3000):
        lengths.note_end("a", 2000, is_natural=True)
    assert find(lengths, "a", 1)[0] > 200
    for number in range(2 * MAX_CLIENTS):
        lengths.note_end(f"c{number}", 5, is_natural=True)
    assert lengths.find_place("a") == 0
    assert len({lengths.find_place(f"c{n}") for n in range(2 * MAX_CLIENTS)}) == MAX_CLIENTS + 1


def test_lengths_without_meaning_change_nothing():
    lengths, fresh = AnswerLengths(), AnswerLengths()
    lengths.note_end("a", 0, is_natural=False)
    lengths.note_end("a", -1, is_natural=True)
    assert (find(lengths, "a", 1) == find(fresh, "a", 1)).all()
    lengths.note_end("a", 10**9, is_natural=True)
    assert np.isfinite(find(lengths, "a", 1)).all()


def test_the_risk_follows_the_promises_that_were_broken():
    def keep(share):
        lengths, chance = learn(AnswerLengths(), "a", 300), random.Random(1)
        for _ in range(3000):
            lengths.note_promise(is_kept=chance.random() >= share)
        return learn(lengths, "a", 1), lengths.risk

    careful, low = keep(0.1)
    bold, high = keep(0.0)
    assert low < 1.5 * MIN_RISK
    assert high == MAX_RISK
    assert find(careful, "a", 1)[0] < find(learn(AnswerLengths(), "a", 301), "a", 1)[0]
    assert find(bold, "a", 1)[0] > 100
    lengths = AnswerLengths()
    for _ in range(round(1 / BROKEN_SHARE) - 1):
        lengths.note_promise(is_kept=True)
    lengths.note_promise(is_kept=False)
    assert lengths.risk == pytest.approx(FIRST_RISK), "as many as may be"
