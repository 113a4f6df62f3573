"""The model answers to every name that clearly means it.

Method: the names that benchmark clients send, against a server started as a user starts it.
"""

import os
from pathlib import Path

import httpx
import pytest

from tandem.cli.asking.local_server import read_card
from tandem.models.loading.hub import DEMO_FOLDER, DEMO_NOTE
from tandem.server.api.names import find_names


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "models" / "qwen3"
    path.mkdir(parents=True)
    return path


def ask(live, **fields):
    return live.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})


def test_a_folder_is_asked_for_by_path_base_name_default_or_nothing(serve_text, folder):
    live = serve_text(model=f"{folder}/", folder=folder)
    for name in (str(folder), f"{folder}/", "qwen3", "default", "", None):
        reply = ask(live, model=name)
        assert reply.status_code == 200, name
        assert reply.json()["model"] == "qwen3"
    assert ask(live).status_code == 200
    assert live.post("/generate", {"text": "a", "model": str(folder)}).status_code == 200
    for name in ("qwen", "models/qwen3", "/qwen3", "/", str(folder.parent), "qwen3/x"):
        reply = ask(live, model=name)
        assert reply.status_code == 404, name
        assert reply.json()["error"]["param"] == "model"
        assert "qwen3" in reply.json()["error"]["message"]


def test_the_demo_tells_what_it_is_for(serve_text, folder):
    """To whoever begins to chat, at a terminal or elsewhere; other models have nothing to tell."""
    for place, note in ((DEMO_FOLDER, DEMO_NOTE), (folder, "")):
        live = serve_text(folder=place)
        (card,) = live.get("/v1/models").json()["data"]
        assert card["note"] == note
        with httpx.Client(base_url=live.url, trust_env=False) as client:
            assert [read_card(client, name).note for name in ("tiny", "other", None)] == [
                note,
                "",
                "",
            ]
            assert read_card(client, "tiny").default_sampling == card["default_sampling"]
    with httpx.Client(base_url="http://127.0.0.1:1", trust_env=False) as client:
        assert read_card(client, "tiny").note == ""


def test_models_lists_one_name_and_its_folder(serve_text, folder):
    live = serve_text(model=str(folder), folder=folder)
    (card,) = live.get("/v1/models").json()["data"]
    assert (card["id"], card["root"]) == ("qwen3", str(folder))
    assert live.get(f"/v1/models/{folder}").json() == card
    assert live.get("/v1/models/default").json() == card
    info = live.get("/model_info").json()
    assert (info["model_path"], info["served_model_name"]) == (str(folder), "qwen3")


def test_served_model_names_are_what_is_listed(serve_text, folder):
    live = serve_text(model=str(folder), folder=folder, served_model_name=("chat", "team/chat"))
    assert [card["id"] for card in live.get("/v1/models").json()["data"]] == ["chat", "team/chat"]
    assert ask(live, model="team/chat").json()["model"] == "team/chat"
    assert ask(live, model=str(folder)).json()["model"] == "chat"
    assert ask(live, model="qwen3").status_code == 200
    assert ask(live, model="team").status_code == 404


def test_names_of_links_relative_folders_and_hub_ids(folder, monkeypatch):
    link = folder.parent / "link"
    link.symlink_to(folder)
    names = find_names(str(link), (), link)
    assert names.served == ("link",)
    assert names.root == str(link)
    assert all(names.find(name) for name in ("link", "qwen3", str(link), str(folder)))
    monkeypatch.chdir(folder)
    names = find_names(".", (), Path())
    assert names.served == ("qwen3",)
    assert names.root == os.getcwd()
    assert names.find(str(folder)) == names.find("./") == "qwen3"
    names = find_names("org/tiny", (), folder)
    assert names.served == ("tiny",)
    assert names.find("org/tiny") == "tiny"
    assert names.root == str(folder)
