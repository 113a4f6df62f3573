"""Goal: GGUF models of a hub are named as people name them, fetched alone, listed and deleted.

Method: repositories as lists of files; a made-up cache of huggingface_hub in a folder; the commands
in this process.
"""

import json
from pathlib import Path

import pytest
from folder_hub import serve_folder_hub

from tandem.core.errors import NotFoundError
from tandem.models.loading.hub import resolve_folder
from tandem.models.loading.hub_choice import HubName, choose_gguf, list_choices, parse_hub_name

GIB = 1 << 30
FILES = {
    "README.md": 10,
    "model-Q4_K_M.gguf": 5 * GIB,
    "model-Q8_0.gguf": 9 * GIB,
    "UD-IQ2_XXS/model-UD-IQ2_XXS-00001-of-00002.gguf": 2 * GIB,
    "UD-IQ2_XXS/model-UD-IQ2_XXS-00002-of-00002.gguf": GIB,
    "mmproj-model-F16.gguf": GIB,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_names_of_a_hub():
    for text, found in {
        "org/name": HubName("org/name", ""),
        "org/name:Q4_K_M": HubName("org/name", "Q4_K_M"),
        "hf.co/org/name:latest": HubName("org/name", ""),
        "https://huggingface.co/org/na.me-1/": HubName("org/na.me-1", ""),
        "name": None,
        "a/b/c": None,
        "../x": HubName("../x", ""),
        "org/name:": None,
    }.items():
        assert parse_hub_name(text) == found, text


def test_a_file_is_chosen_by_its_tag_or_name():
    choices = list_choices(FILES)
    assert [choice.tag for choice in choices] == ["UD-IQ2_XXS", "Q4_K_M", "Q8_0"]
    name = HubName("org/name", "q4_k_m")
    assert choose_gguf(name, choices).files == ("model-Q4_K_M.gguf",)
    parts = choose_gguf(HubName("org/name", "UD-IQ2_XXS"), choices)
    assert [Path(file).name[-19:] for file in parts.files] == [
        "-00001-of-00002.gguf"[1:],
        "-00002-of-00002.gguf"[1:],
    ]
    assert parts.size_bytes == 3 * GIB
    found = choose_gguf(HubName("org/name", ""), choices, "model-UD-IQ2_XXS-00002-of-00002.gguf")
    assert found == parts
    only = {name: size for name, size in FILES.items() if "Q8" in name}
    assert choose_gguf(HubName("org/name", ""), list_choices(only)).tag == "Q8_0"


@pytest.mark.parametrize(("tag", "file"), [("", ""), ("Q5_0", ""), ("", "other.gguf")])
def test_an_open_choice_lists_what_there_is_with_sizes(tag, file):
    with pytest.raises(NotFoundError) as caught:
        choose_gguf(HubName("org/name", tag), list_choices(FILES), file)
    text = str(caught.value)
    assert "Q4_K_M" in text
    assert "5.37 GB" in text
    assert "3.22 GB" in text
    assert "2 parts" in text
    assert (tag or file or "org/name:UD-IQ2_XXS") in text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with a checkpoint of safetensors, and a repository with two GGUF files."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("tandem.models.loading.packaged.ROOT", tmp_path / "packaged")
    for repo, names in {
        "org/plain": ("config.json", "model.safetensors"),
        "org/gguf": ("m-Q4_0.gguf", "m-Q8_0.gguf"),
    }.items():
        folder = tmp_path / f"models--{repo.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        (folder / "blobs").mkdir()
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for number, name in enumerate(names):
            blob = folder / "blobs" / f"{number:064}"
            blob.write_bytes(b"x" * (100 + number))
            (snapshot / name).symlink_to(blob)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_kept_models_are_listed_resolved_and_deleted(run, cache):
    def names():
        status, out, errors = run("list", "--json")
        assert status == 0, errors
        return {model["name"]: model["size_bytes"] for model in json.loads(out)}

    assert names() == {"org/gguf:Q4_0": 100, "org/gguf:Q8_0": 101, "org/plain": 201}
    assert resolve_folder("org/plain").name == COMMIT
    assert resolve_folder("hf.co/org/gguf:q8_0").name == "m-Q8_0.gguf"
    with pytest.raises(NotFoundError, match="name one, as org/gguf:Q4_0"):
        resolve_folder("org/gguf")
    with pytest.raises(NotFoundError, match="`tandem pull org/gguf:Q6_K`"):
        resolve_folder("org/gguf:Q6_K")
    status, out, _ = run("rm", "org/gguf:Q8_0")
    assert (status, out) == (0, "deleted org/gguf:Q8_0, 101 B\n")
    assert resolve_folder("org/gguf").name == "m-Q4_0.gguf"
    assert len(list((cache / "models--org--gguf" / "blobs").iterdir())) == 1
    assert run("rm", "org/plain")[0] == 0
    assert names() == {"org/gguf:Q4_0": 100}
    status, _, errors = run("rm", "org/plain")
    assert status == 1
    assert "tandem list" in errors


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of one repository, with an empty cache: what is fetched from it."""
    from huggingface_hub import constants

    folder = tmp_path / "repository"
    folder.mkdir()
    for name in ("README.md", "m-Q4_0.gguf", "m-Q8_0.gguf"):
        (folder / name).write_text(name)
    with serve_folder_hub("org/gguf", folder) as (url, fetched):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        form = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("tandem.models.loading.packaged.ROOT", tmp_path / "packaged")
        yield fetched


def test_a_file_of_a_repository_is_pulled_and_served_by_its_name(run, hub, monkeypatch):
    """`serve -hf` is `pull`, and then `serve` of the same name; no other file is fetched."""
    served = []
    monkeypatch.setattr(
        "tandem.cli.planning.serving.show_serving",
        lambda settings, **_: served.append(resolve_folder(settings.model.path).name),
    )
    for line, file in (
        (("-hf", "org/gguf:Q8_0"), "m-Q8_0.gguf"),
        (("org/gguf:Q8_0",), "m-Q8_0.gguf"),
        (("-hf", "org/gguf", "-hff", "m-Q4_0.gguf"), "m-Q4_0.gguf"),
    ):
        status, out, errors = run("serve", *line, "--dry-run")
        assert (status, out, served.pop()) == (0, "", file), errors
    assert hub == ["m-Q8_0.gguf", "m-Q4_0.gguf"]
    status, _, errors = run("serve", "-hf", "org/gguf", "--dry-run")
    assert (status, "name one, as org/gguf:Q4_0" in errors) == (1, True)
    status, _, errors = run("serve", "demo", "-hf", "org/gguf:Q8_0")
    assert (status, "give one of them" in errors) == (1, True)
    status, out, _ = run("pull", "org/gguf:Q8_0")
    assert (status, out.rstrip()[-11:]) == (0, "m-Q8_0.gguf")
    assert hub == ["m-Q8_0.gguf", "m-Q4_0.gguf"], "what is here is not fetched again"


def test_a_model_is_shown_by_its_files(run):
    status, out, errors = run("show", "demo", "--json")
    assert status == 0, errors
    facts = json.loads(out)
    assert facts["format"] == "safetensors"
    assert facts["context"] == 2048
    assert facts["chat template"] is True


def test_words_of_other_programs_lead_to_ours(run):
    for word, meant in {"train": "finetune", "quantize": "convert", "merge": "export"}.items():
        status, _, errors = run(word, "x")
        assert status == 2
        assert f"Did you mean '{meant}'?" in errors
    assert run("--version")[1].startswith("tandem ")
    for word, same in {"pull": "pull", "run": "chat", "ls": "list"}.items():
        assert run("help", word)[1].startswith(run(same, "--help")[1][:80])
    status, _, errors = run("run", "no-such-model", "--prompt", "x")
    assert status == 1
    assert "no-such-model" in errors
