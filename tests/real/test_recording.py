"""Goal: what the other tests take for llama.cpp's answers is what its library gives today.

Method: the scripts that wrote the records run again. Logits depend on the machine's instruction set
by rounding, tokens do not.
"""

import json
import subprocess

import pytest
import record_llama
import record_splittings
from llama_cpp import fetch_library

pytestmark = pytest.mark.slow
MAX_DISTANCE, MAX_RATIO = 0.05, 0.005
"""Of the logarithms of the likeliest tokens' probabilities, and of perplexities."""


@pytest.fixture(scope="module")
def library():
    try:
        return fetch_library()
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        pytest.skip(f"llama.cpp's library cannot be fetched: {error}")


def test_splittings_are_the_recorded_ones(library):
    recorded = json.loads(record_splittings.RECORDED.read_text())
    assert record_splittings.record_splittings(library) == recorded


def test_real_models_give_what_is_recorded(library, model):
    name, path = model
    record = json.loads(record_llama.RECORDED.read_text())
    recorded = record["models"][name]
    found = record_llama.record(library, path, record["text"])
    assert found.keys() == recorded.keys()
    for key in ("strings", "begin", "prompt", "num_text_tokens"):
        assert found[key] == recorded[key], key
    # The text ends where two tokens are about as likely, which may be at another place.
    pairs = list(zip(found["greedy"], recorded["greedy"], strict=False))
    assert len(pairs) >= 2
    assert all(left == right for left, right in pairs)
    logprobs, wanted = dict(found["logprobs"]), dict(recorded["logprobs"])
    likeliest = [token for token, _ in recorded["logprobs"][:4]]
    for token in likeliest:
        assert logprobs[token] == pytest.approx(wanted[token], abs=MAX_DISTANCE), token
    assert found["perplexity"] == pytest.approx(recorded["perplexity"], rel=MAX_RATIO)
