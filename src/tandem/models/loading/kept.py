"""The models that were pulled: which there are, and their removal."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.core.errors import NotFoundError
from tandem.models.loading.hub_choice import list_choices, parse_hub_name
from tandem.models.loading.packaged import PACKAGED, find_packaged

__all__ = ["KeptModel", "list_kept", "remove_kept"]


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model in a cache of this user."""

    name: str
    """By which it is served: a hub id, perhaps with the tag of a GGUF file, or a packaged name."""
    path: str
    """Its folder, or its GGUF file; of several parts the first."""
    size_bytes: int
    fetched: str
    """Time of the last change, in ISO 8601."""
    files: tuple[str, ...] = ()
    """All parts of a GGUF model."""


def list_kept() -> list[KeptModel]:
    """Return all models that were pulled, by name."""
    found = [*_list_packaged(), *_list_hub()]
    return sorted(found, key=lambda model: model.name)


def remove_kept(name: str) -> list[KeptModel]:
    """Delete what was pulled under a name: a packaged model, a GGUF file, or all of a repository.

    Returns: what was deleted.

    Raises: NotFoundError (nothing of that name is kept).
    """
    asked = parse_hub_name(name)
    kept = list_kept()
    wanted = name if asked is None else ":".join(filter(None, asked))
    gone = [model for model in kept if model.name.lower() == wanted.lower()]
    is_all = asked is not None and not asked.tag
    if is_all:
        gone = [model for model in kept if model.name.partition(":")[0] == wanted]
    if not gone:
        what = f"no model {name} was pulled: `tandem list` lists them"
        raise NotFoundError("models.remove", what)
    if name in PACKAGED:
        shutil.rmtree(Path(gone[0].path).parent)
    elif is_all:
        for repo in _scan().repos:
            if repo.repo_id == wanted and repo.repo_type == "model":
                shutil.rmtree(repo.repo_path)
    else:
        for file in gone[0].files:
            blob = Path(file).resolve()
            Path(file).unlink()
            blob.unlink(missing_ok=True)
    return gone


def _list_packaged() -> Iterator[KeptModel]:
    for name, model in PACKAGED.items():
        file = find_packaged(model)
        if file is not None:
            state = file.stat()
            yield KeptModel(name, str(file), state.st_size, _tell(state.st_mtime))


def _list_hub() -> Iterator[KeptModel]:
    cache = _scan()
    for repo in () if cache is None else cache.repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        revision = max(repo.revisions, key=lambda each: each.last_modified)
        folder = revision.snapshot_path
        paths = {str(each.file_path.relative_to(folder)): each for each in revision.files}
        fetched = _tell(revision.last_modified)
        if any(name.endswith(".safetensors") for name in paths):
            yield KeptModel(repo.repo_id, str(folder), revision.size_on_disk, fetched)
            continue
        for choice in list_choices({name: each.size_on_disk for name, each in paths.items()}):
            name = f"{repo.repo_id}:{choice.tag}" if choice.tag else repo.repo_id
            files = tuple(str(folder / file) for file in choice.files)
            yield KeptModel(name, files[0], choice.size_bytes, fetched, files)


def _scan() -> Any:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _tell(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
