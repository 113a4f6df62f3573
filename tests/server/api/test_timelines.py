"""``GET /requests/{id}/timeline``: found by its own key alone, in flight and after the end, merged
with what instances tell, and bounded."""

import threading

import pytest

from tandem.core.timeline import InstanceTimeline, MissReason, PrefixMiss

KEYS = {"api_key": ("alpha", "beta")}
PROMPT = list(range(5, 45))


def bearer(key, **headers):
    return {"headers": {"Authorization": f"Bearer {key}", **headers}}


def tell(request_id, **fields):
    values = {"state": "finished", "age_s": 0.5, "prompt_tokens": 40, "output_tokens": 3}
    return InstanceTimeline(request_id=request_id, **(values | fields))


def ask(live, key=None, prompt=PROMPT, request_id=None, **fields):
    headers = {} if request_id is None else {"x-request-id": request_id}
    options = {"headers": headers} if key is None else bearer(key, **headers)
    body = {"prompt": prompt, "max_tokens": 3, **fields}
    reply = live.post("/v1/completions", body, **options)
    assert reply.status_code == 200, reply.text
    return reply


def read(live, name, **options):
    reply = live.get(f"/requests/{name}/timeline", **options)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_parts_are_merged(serve_text):
    live = serve_text()
    live.engine.timeline = lambda request_id: tell(
        request_id,
        instance="instance-0",
        miss=PrefixMiss(reason=MissReason.EVICTED, position=16),
    )
    reply = ask(live, n=2)
    told = read(live, reply.json()["id"])
    assert told == read(live, reply.headers["x-request-id"])
    assert told["path"] == "/v1/completions"
    assert told["is_ended"]
    assert len(told["choices"]) == 2
    for number, choice in enumerate(told["choices"]):
        assert choice["index"] == number
        assert 0 <= told["tokenized_s"] <= choice["submitted_s"] <= choice["first_token_s"]
        assert choice["first_token_s"] <= choice["end_s"] <= told["age_s"]
        assert (choice["finish_reason"], choice["output_tokens"]) == ("length", 3)
        (instance,) = choice["instances"]
        assert instance["miss"] == {"reason": "evicted", "position": 16}
    assert live.engine.asked_timelines[:2] == [r.request_id for r in live.engine.requests]


def test_nothing_of_the_prompt_or_the_answer_is_told(serve_text, tokenizer):
    live = serve_text()
    reply = ask(live, prompt="a secret of mine", cache_salt="my-salt")
    text = live.get(f"/requests/{reply.json()['id']}/timeline").text
    assert "secret" not in text
    assert "my-salt" not in text


def test_other_keys_and_unknown_ids_are_not_found(serve_text):
    live = serve_text(**KEYS)
    reply = ask(live, "alpha", request_id="mine")
    names = (reply.json()["id"], "mine")
    for name in names:
        assert read(live, name, **bearer("alpha"))["id"] == names[0]
        refused = live.get(f"/requests/{name}/timeline", **bearer("beta"))
        unknown = live.get("/requests/nobody/timeline", **bearer("beta"))
        assert refused.status_code == unknown.status_code == 404
        assert refused.json() == unknown.json()
        assert live.get(f"/requests/{name}/timeline").status_code == 401
    # Asking for another's id tells nothing of one's own either.
    ask(live, "beta", request_id="mine")
    assert read(live, "mine", **bearer("alpha"))["id"] == names[0]


@pytest.mark.parametrize(
    "name", ["%00", "..%2f..%2fetc", "a" * 5000, "%F0%9F%98%80", "x/timeline", "%ff", " "]
)
def test_strange_ids_are_not_found(serve_text, name):
    assert serve_text().get(f"/requests/{name}/timeline").status_code == 404


def test_names_with_slashes_are_found(serve_text):
    live = serve_text()
    ask(live, request_id="team/a/1")
    assert read(live, "team/a/1")["request_id"] == "team/a/1"


def test_a_request_in_flight_is_told(serve_text):
    live = serve_text()
    live.engine.pause_at = 0
    live.engine.timeline = lambda i: tell(i, state="waiting", output_tokens=1)
    asker = threading.Thread(target=ask, args=(live,), kwargs={"request_id": "now"})
    asker.start()
    try:
        while not live.engine.held:
            assert asker.is_alive()
        told = read(live, "now")
    finally:
        live.engine.pause_at = None
        asker.join(60)
    assert not told["is_ended"]
    assert told["choices"][0]["end_s"] is None
    assert told["choices"][0]["output_tokens"] == 1
    assert told["choices"][0]["instances"][0]["state"] == "waiting"
    assert read(live, "now")["is_ended"]


def test_without_the_instance_the_server_tells_its_part(serve_text):
    live = serve_text()
    ask(live, request_id="a")
    live.engine.info = None
    told = read(live, "a")
    assert told["choices"][0]["instances"] == []
    assert told["choices"][0]["finish_reason"] == "length"


def test_refused_requests_are_told(serve_text):
    live = serve_text()
    live.engine.max_running = 0
    reply = live.post("/v1/completions", {"prompt": PROMPT}, headers={"x-request-id": "refused"})
    assert reply.status_code == 503
    told = read(live, "refused")
    assert told["is_ended"]
    assert told["choices"][0]["finish_reason"] == "capacity"


def test_another_salt_is_named_as_the_reason(serve_text):
    live = serve_text(**KEYS)
    missed = PrefixMiss(reason=MissReason.NOT_STORED, position=0)
    live.engine.timeline = lambda i: tell(i, miss=missed, computed_tokens=40)

    def read_miss(name, key="alpha"):
        told = read(live, name, **bearer(key))
        return told["choices"][0]["instances"][0]["miss"]

    ask(live, "alpha", request_id="one", cache_salt="a")
    assert read_miss("one")["reason"] == "not_stored"
    ask(live, "alpha", request_id="two", cache_salt="b")
    assert read_miss("two") == {
        "reason": "other_identity",
        "position": 0,
        "detail": "cache_salt",
    }
    # What another key has asked is no reason that this one may learn.
    ask(live, "beta", request_id="three", cache_salt="c")
    assert read_miss("three", "beta")["reason"] == "not_stored"
    # With the same salt again, the salt is not the reason.
    ask(live, "alpha", request_id="four", cache_salt="a")
    assert read_miss("four")["reason"] == "not_stored"


def test_a_flood_keeps_memory_bounded(serve_text):
    live = serve_text(timelines=6)
    for number in range(20):
        ask(live, request_id=f"r{number}", n=2)
    ring = live.app.state.context.timelines
    assert len(ring) == 6
    assert len(ring._records) == 3
    assert len(ring._by_name) == 6
    assert read(live, "r19")["is_ended"]
    assert live.get("/requests/r16/timeline").status_code == 404
    for _ in range(10):
        ask(live, request_id="same")
    assert len(ring._by_name) == 2


def test_timelines_can_be_switched_off(serve_text):
    live = serve_text(timelines=0)
    ask(live, request_id="a")
    assert live.get("/requests/a/timeline").status_code == 404
