"""Goal: a configuration whose fields are away from their defaults runs as transformers runs it.

Method: random tiny models, written by transformers; our logits in float32, in pieces and token by
token, within the bound of its own eager code in float64. What is refused is refused by name.
"""

from collections import Counter

import pytest
import torch
from loading import load_checkpoint
from odd_configs import MODEL_TYPES, list_untouched, make_odd

from quick import rest_slow
from tandem.core.errors import TandemError
from tandem.models.proof.prove import is_dynamic, prove_config
from tandem.models.proof.tiny import make_references, make_tiny, make_tokens, save_tiny

MOST_REFUSED = 0.2
NUM_ODD = 12
"""Of each family, in the slow test: 17 x 12 = 204 configurations."""


def find_excess(config, folder, open_session, seed: int) -> float:
    """Return how many times the bound the worst logit is off; the best of three sets of weights.

    A near tie of a router may go the other way in float32; a wrong model fails with all weights.
    """
    found = []
    for attempt in range(3):
        eager, tokens = make_tiny(config, seed + attempt), make_tokens(config, seed + attempt)
        place = folder / str(attempt)
        save_tiny(eager, place)
        (reference,) = make_references(eager, [tokens], is_stepwise=is_dynamic(config))
        session = open_session(load_checkpoint(place, dtype="float32"))
        ids = tokens.tolist()
        pieces = [ids[:1], ids[1:30], ids[30:47], *([i] for i in ids[47:])]
        found.append(reference.find_excess(torch.cat([session.run(piece) for piece in pieces])))
        if found[-1] <= 1:
            break
    return min(found)


@pytest.mark.parametrize(
    "model_type",
    rest_slow(["gpt_oss", "deepseek_v3", "qwen3_next"], MODEL_TYPES),
)
def test_a_family_with_every_field_moved(model_type, tmp_path, open_session):
    """Nine families rotated a part of each head where transformers rotates all of it."""
    config = make_odd(model_type, 0)
    assert find_excess(config, tmp_path, open_session, 0) <= 1
    assert list_untouched(model_type) == []


@pytest.mark.parametrize("model_type", rest_slow(["phi3"], ["llama", "phi3"]))
def test_a_proof_tells_which_share_of_a_head_is_rotated(model_type):
    """A class that rotates all of it is proved, and the field is known to be unread."""
    proof = prove_config(make_odd(model_type, 0))
    assert proof.problem == ""
    shares = [f.outcome for f in proof.flips if f.field.endswith("partial_rotary_factor")]
    assert set(shares) == {"noticed" if model_type == "phi3" else "unread"}


@pytest.mark.slow
def test_two_hundred_odd_configurations(tmp_path, open_session):
    """None is wrong; few are refused."""
    wrong, outcomes = [], Counter()
    for model_type in MODEL_TYPES:
        for seed in range(1, NUM_ODD + 1):
            config = make_odd(model_type, seed)
            name = f"{model_type}-{seed}"
            try:
                excess = find_excess(config, tmp_path / name, open_session, seed)
            except TandemError as error:
                outcomes[f"refused: {error.what}"] += 1
                continue
            outcomes["right" if excess <= 1 else "wrong"] += 1
            if excess > 1:
                wrong.append((name, excess, config.to_dict()))
    print(dict(outcomes))
    assert not wrong
    assert outcomes["right"] >= (1 - MOST_REFUSED) * NUM_ODD * len(MODEL_TYPES)
