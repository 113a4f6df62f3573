"""Goal: a request has the terms of its headers, key, model and server, in this order."""

import hashlib

import pytest

from tandem.core.errors import ConfigError, OverloadError
from tandem.core.wire import Slo
from tandem.server.config import ServerConfig, load_api_keys, load_terms
from tandem.server.objectives import TermsTable, parse_terms


def test_each_objective_comes_from_the_nearest_that_names_it(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# keys\nsecret-a ttft_ms=300 priority=-2 weight=2.5\nsecret-b\n")
    config = ServerConfig(
        api_key_file=str(path), slo=("ttft_ms=900,tpot_ms=80", "model=big,ttft_ms=2000")
    )
    assert load_api_keys(config) == ("secret-a", "secret-b")
    table = load_terms(config)
    a = hashlib.sha256(b"secret-a").hexdigest()

    def find(model, client, **headers):
        terms = table.find(model, client, lambda name: headers.get(name.split("-")[2]))
        return (terms.slo.ttft_s, terms.slo.tpot_s, terms.priority, terms.weight)

    assert find("small", "somebody") == (0.9, 0.08, 0, 1.0)
    assert find("big", "somebody") == (2.0, 0.08, 0, 1.0)
    assert find("big", a) == (0.3, 0.08, -2, 2.5)
    assert find("big", a, ttft="150", tpot="7.5") == (0.15, 0.0075, -2, 2.5)
    assert TermsTable().find("m", a, lambda _: None).slo == Slo()


@pytest.mark.parametrize("word", ["ttft_ms", "ttft_ms=0", "tpot_ms=nan", "wait=3", "weight=0"])
def test_other_words_are_refused(word):
    with pytest.raises(ConfigError):
        parse_terms([word], "server.slo")
    with pytest.raises(ConfigError):
        TermsTable([word])


def test_two_entries_of_one_model_are_refused():
    for entries in (
        ["ttft_ms=1", "ttft_ms=2"],
        ["ttft_ms=1,tpot_ms=2", "tpot_ms=2"],
        ["model=a", "ttft_ms=1", "model=a", "tpot_ms=2"],
    ):
        with pytest.raises(ConfigError, match="once"):
            TermsTable(entries)


def test_words_that_a_flag_has_split_belong_together():
    """`--server.slo model=a,ttft_ms=1,tpot_ms=2` comes as a list of words."""
    table = TermsTable(["ttft_ms=900", "tpot_ms=80", "model=big", "ttft_ms=2000"])
    assert table.find("small", "", lambda _: None).slo == Slo(ttft_s=0.9, tpot_s=0.08)
    assert table.find("big", "", lambda _: None).slo == Slo(ttft_s=2.0, tpot_s=0.08)


def test_objectives_of_a_model_are_found_by_the_name_that_was_asked_for(serve_text):
    live = serve_text(slo=("ttft_ms=900000", "model=tiny,tpot_ms=3600000"))
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "request_id": "mine"}
    assert live.post("/v1/completions", body).ok
    assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).ok
    assert [request.slo.tpot_s for request in live.engine.requests] == [3600.0, 3600.0]


def test_refused_for_its_objectives_is_429_with_a_time(serve_text, monkeypatch):
    live = serve_text(slo=("tpot_ms=3600000",))
    sent = {"x-slo-ttft-ms": "60000"}
    body = {"prompt": "a", "max_tokens": 3}
    assert live.post("/v1/completions", body, headers=sent).status_code == 200
    [request] = live.engine.requests
    assert 50.0 < request.slo.ttft_s <= 60.0, "what has passed since the arrival is taken off"
    assert request.slo.tpot_s == 3600.0
    assert live.post("/v1/completions", body, headers={"x-slo-ttft-ms": "x"}).status_code == 400
    assert live.post("/v1/completions", body, headers={"x-slo-ttft-ms": "0.01"}).ok

    async def refuse(_):
        raise OverloadError("fake.submit", "too much", retry_after_s=7)

    monkeypatch.setattr(live.engine, "submit", refuse)
    answer = live.post("/v1/completions", body, headers=sent)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["error"]["code"] == "overload"
    page = live.get("/metrics").text
    for outcome in ("met", "missed_ttft", "rejected"):
        assert f'outcome="{outcome}"}} 1.0' in page
