"""Adapters over HTTP: chosen by name, loaded and unloaded by an admin, from one folder alone."""

import pytest
import requests

from tandem.core.errors import CorruptionError
from tandem.server.edge.auth import ADMIN_PATHS

ADMIN = "admin-key"


@pytest.fixture
def served(serve_text, tmp_path):
    """A server whose folder of adapters has one, and a way to it as an admin."""
    (tmp_path / "adapters" / "first").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    server = serve_text(
        adapter_folder=tmp_path / "adapters", admin_api_key=(ADMIN,), api_key=("user-key",)
    )

    def call(method, path, body=None, key=ADMIN):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return requests.request(method, server.url + path, json=body, headers=headers, timeout=10)

    server.call = call
    return server


def load(server, name, path, route="/v1/load_lora_adapter"):
    return server.call("POST", route, {"lora_name": name, "lora_path": str(path)})


def test_requests_choose_by_name(served):
    """The engine gets the adapter's digest, the client its name; the model keeps its own names."""
    assert load(served, "poet", "first").status_code == 200
    digest = served.engine.adapters["poet"].digest
    asked = [
        ("/v1/completions", {"model": "poet", "prompt": "a"}, digest),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}, ""),
        ("/v1/completions", {"prompt": "a"}, ""),
        ("/generate", {"text": "a", "lora_path": "poet"}, digest),
        ("/generate", {"text": ["a", "b"], "lora_path": ["poet", "poet"]}, digest),
        ("/generate", {"text": "a"}, ""),
    ]
    for path, body, want in asked:
        served.engine.requests.clear()
        reply = served.call("POST", path, body, key="user-key")
        assert reply.status_code == 200, reply.text
        assert {request.adapter for request in served.engine.requests} == {want}, body
    answer = served.call("POST", "/v1/completions", {"model": "poet", "prompt": "a"}).json()
    assert answer["model"] == "poet"
    assert answer["system_fingerprint"] == served.engine.adapters["poet"].system_fingerprint
    refused = served.call("POST", "/generate", {"text": ["a", "b"], "lora_path": ["poet", None]})
    assert refused.status_code == 400


def test_models_name_their_parent(served):
    load(served, "poet", "first")
    cards = {card["id"]: card for card in served.call("GET", "/v1/models").json()["data"]}
    assert cards["tiny"]["parent"] is None
    assert cards["poet"]["parent"] == "tiny"
    assert cards["poet"]["root"].endswith("/adapters/first")
    assert served.call("GET", "/v1/models/poet").json() == cards["poet"]


def test_unloaded_names_are_not_the_models(served):
    """A name that is gone is an error, never the base model's answer."""
    assert load(served, "poet", "first").status_code == 200
    gone = served.call("POST", "/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert gone.status_code == 200
    for path, body in (
        ("/v1/completions", {"model": "poet", "prompt": "a"}),
        ("/generate", {"text": "a", "lora_path": "poet"}),
    ):
        reply = served.call("POST", path, body)
        assert reply.status_code == 404
        assert "poet" in reply.json()["error"]["message"]
    assert served.call("POST", "/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 404


def test_a_broken_file_is_the_clients_mistake(served, monkeypatch):
    """It asks for that file: 400 with what is wrong, and no reason to try again."""

    async def refuse(source):
        raise CorruptionError("models.read_adapter", "lora_A holds NaN")

    monkeypatch.setattr(served.engine, "load_adapter", refuse)
    reply = load(served, "poet", "first")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "lora_path"
    assert "lora_A holds NaN" in reply.json()["error"]["message"]


def test_sglangs_paths(served):
    loaded = load(served, "poet", "first", "/load_lora_adapter").json()
    assert loaded["success"]
    assert list(loaded["loaded_adapters"]) == ["poet"]
    left = served.call("POST", "/unload_lora_adapter", {"lora_name": "poet"}).json()
    assert left == {"success": True, "error_message": "", "loaded_adapters": {}}


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_only_admins_may(served, serve_text, tmp_path, path):
    body = {"lora_name": "poet", "lora_path": "first"}
    for key in (None, "user-key", "wrong"):
        assert served.call("POST", path, body, key=key).status_code == 401
    assert not served.engine.loaded
    without = serve_text(adapter_folder=tmp_path / "adapters")
    assert without.post(path, body).status_code == 403
    assert not without.engine.loaded
    assert served.call("GET", "/v1/models", key="user-key").status_code == 200


def test_paths_stay_in_the_folder(served, tmp_path):
    """Relative, absolute, by links, and what is no path at all."""
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "adapters" / "loop").symlink_to(tmp_path / "adapters" / "loop")
    bad = ["../outside", str(tmp_path / "outside"), "link", "link/x", "/etc", "a\0b", "loop", "~"]
    for path in [*bad, "x" * 1000, "first/../../outside"]:
        reply = load(served, "poet", path)
        is_inside = path in ("~", "loop") or path.startswith("xxx")
        assert reply.status_code == 400 or is_inside, path
    for source in served.engine.loaded:
        assert source.folder.startswith(str(tmp_path / "adapters")), source
    served.engine.adapters.clear()
    assert load(served, "poet", tmp_path / "adapters" / "first").status_code == 200


@pytest.mark.parametrize("name", ["", "a b", "tiny", "default", "x" * 257, "a\nb"])
def test_names_that_mislead(served, name):
    """A name that means the model itself, or that would break a log line, is refused."""
    assert load(served, name, "first").status_code in (400, 409)
    assert not served.engine.loaded


def test_no_folder_is_no_loading(serve_text):
    server = serve_text(admin_api_key=(ADMIN,))
    reply = requests.post(
        server.url + "/v1/load_lora_adapter",
        json={"lora_name": "poet", "lora_path": "first"},
        headers={"Authorization": f"Bearer {ADMIN}"},
        timeout=10,
    )
    assert reply.status_code == 403
    assert "adapter_folder" in reply.json()["error"]["message"]
