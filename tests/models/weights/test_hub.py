"""Goal: hub ids resolve to cached snapshots, offline; what is not there is named."""

import pytest

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.models.loading.hub import pull, resolve_folder

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def add_snapshot(cache, model_id, *files):
    repository = cache / ("models--" + model_id.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_cached_snapshot_is_found(cache):
    folder = add_snapshot(cache, "org/tiny", "config.json", "model.safetensors")
    assert resolve_folder("org/tiny") == folder
    assert resolve_folder("org/tiny", revision=COMMIT) == folder
    assert pull("org/tiny") == folder


def test_folder_wins_over_the_hub(cache, tmp_path):
    assert resolve_folder(tmp_path) == tmp_path


def test_absent_offline(cache):
    """Each command advises what would help, never itself."""
    with pytest.raises(NotFoundError, match="tandem pull org/tiny"):
        resolve_folder("org/tiny")
    with pytest.raises(NotFoundError, match="the hub cannot be reached") as caught:
        pull("org/tiny")
    assert "tandem pull" not in str(caught.value)


def test_unknown_revision_offline(cache):
    add_snapshot(cache, "org/tiny", "config.json")
    with pytest.raises(NotFoundError, match="org/tiny"):
        resolve_folder("org/tiny", revision="b" * 40)


@pytest.mark.parametrize("name", ["no/such/folder", "../up", "word", "bad name/x", "", "/absolute"])
def test_what_is_neither_folder_nor_id(name, cache):
    if name:
        with pytest.raises(NotFoundError):
            resolve_folder(name)
    with pytest.raises(ConfigError, match="org/name"):
        pull(name)


def test_repository_without_safetensors(cache):
    add_snapshot(cache, "org/old", "config.json", "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="no safetensors"):
        pull("org/old")


def test_progress_reports_bytes_and_draws_nothing(capfd):
    from tandem.models.loading.hub import _make_progress_class

    calls = []
    make_bar = _make_progress_class(lambda *call: calls.append(call))
    with make_bar(total=100, unit="B", desc="weights") as bar:
        bar.update(40)
        bar.update(60)
    with make_bar(total=3, unit="it", desc="files") as bar:
        bar.update(1)
    assert calls == [(40, 100, "weights"), (100, 100, "weights")]
    assert capfd.readouterr() == ("", "")
