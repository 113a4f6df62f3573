"""Goal: for each name that a GGUF file may give its splitting, text is split as the models' own
tokenizers split it, and nothing but what is known of llama.cpp's differs from that.

Method: digests of the tokens that llama.cpp gives are recorded by ``record_splittings.py``. Our
rule, changed by what is listed of llama.cpp (``imitate``), has the same, so no other difference is
left.
"""

import json
from collections import defaultdict

import pytest
from odd_strings import draw_boundaries
from record_splittings import RECORDED, list_names
from splittings_beside import NUM_FEW, digest, imitate, make_metadata, make_vocabularies

from tandem.models.gguf.tokenizer import build_tokenizer
from tandem.models.tokenizing.splittings import SPLITTINGS

NOT_KNOWN = {"gpt2", "glm5"}
"""Names that the recorded release does not know."""


@pytest.mark.parametrize("part", ["few", pytest.param("tokens", marks=pytest.mark.slow)])
def test_nothing_but_known_departures_differs(part, monkeypatch):
    recorded = json.loads(RECORDED.read_text())
    assert list(recorded) == list_names()
    assert {name for name, each in recorded.items() if each is None} == NOT_KNOWN
    by_rule = defaultdict(list)
    for name, each in recorded.items():
        if each is not None:
            assert SPLITTINGS[name].has_bos == each["begins"], name
            by_rule[imitate(name)].append(name)
    assert len(by_rule) > 25
    for rule, names in by_rule.items():
        monkeypatch.setitem(SPLITTINGS, "imitated", rule)
        found = digest(tokenize("imitated", is_few=part == "few"))
        assert {name for name in names if recorded[name][part] != found} == set()


def tokenize(name, *, is_few):
    """Return the tokens of the strings with both vocabularies, or of a few with the first."""
    texts = draw_boundaries()[: NUM_FEW if is_few else None]
    found = []
    for number in range(1 if is_few else len(make_vocabularies())):
        backend = build_tokenizer(make_metadata(name, number), "the file").backend
        found += [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]
    return found
