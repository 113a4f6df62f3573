"""The GGUF files of a model: one file or all parts of a split one, with their headers checked.

No file contains the name of another: the parts of a split model are found by their own names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.models.sources.gguf_header import (
    GgufHeader,
    GgufTensor,
    Value,
    map_gguf,
    read_gguf_header,
)

__all__ = ["GgufFiles", "find_gguf", "list_parts"]

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 4096

MAX_SMALL_WEIGHTS = 1 << 16


def find_gguf(path: Path) -> Path | None:
    """Return ``path`` if it is a GGUF file, or the only GGUF model in a folder.

    For a split model the first part is returned. None if the folder has no GGUF file, or has
    safetensors too.

    Raises: ConfigError (several models in a folder).
    """
    if path.is_file():
        return path
    if any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    models = {PART.sub(r"\g<stem>", file.name): file for file in reversed(files)}
    if len(models) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(
            "models.open_weights",
            f"{len(models)} models in GGUF in {path}, such as {names}: name one of the files",
        )
    return next(iter(models.values()), None)


def list_parts(path: Path) -> list[Path]:
    """Return all parts of the model to which a file belongs.

    Raises: ConfigError (the name is not that of a valid part); NotFoundError (a part is missing).
    """
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise ConfigError("models.open_weights", f"{path.name} is no part of {count}")
    names = [f"{match['stem']}-{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise NotFoundError(
            "models.open_weights", f"{missing[0]}, a part of the model, is missing in {path.parent}"
        )
    return [path.with_name(name) for name in names]


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """The headers of a GGUF model: those of its file, or of all its parts."""

    metadata: Mapping[str, Value]
    """Metadata of the model, from its first file."""
    tensors: Mapping[str, GgufTensor]
    paths: Mapping[str, Path]
    """File of each tensor."""

    @classmethod
    def open(cls, path: Path) -> "GgufFiles":
        """Read and check all headers; headers of unchanged files are cached in the process.

        Raises:
            NotFoundError: a part is missing.
            ConfigError: the parts do not belong together.
            CorruptionError, UnsupportedError: as for ``read_gguf_header``.
        """
        headers = [_read_cached(part, _read_state(part)) for part in list_parts(path)]
        tensors: dict[str, GgufTensor] = {}
        paths: dict[str, Path] = {}
        for i, header in enumerate(headers):
            _check_part(header, i, len(headers))
            for name, tensor in header.tensors.items():
                if name in tensors:
                    raise ConfigError(
                        "models.open_weights",
                        f"tensor {name!r} is in {paths[name].name} and in {header.path.name}",
                    )
                tensors[name], paths[name] = tensor, header.path
        wanted = headers[0].metadata.get("split.tensors.count", len(tensors))
        # The type is checked first, because a NumPy array would compare element by element.
        if type(wanted) is not int or wanted != len(tensors):
            raise CorruptionError(
                "models.open_weights",
                f"{headers[0].path.name} and its parts have {len(tensors)} of {wanted!r} tensors",
            )
        return cls(headers[0].metadata, tensors, paths)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.metadata.get("general.architecture"))

    def read_floats(self, name: str) -> list[float]:
        """Return the values of a small tensor.

        Raises: UnsupportedError (the tensor is not float32, or not small).
        """
        tensor, path = self.tensors[name], self.paths[name]
        if tensor.kind != "F32" or prod(tensor.shape) > MAX_SMALL_WEIGHTS:
            what = f"tensor {name!r} is {tensor.kind} {list(tensor.shape)}: a small F32 one is read"
            raise UnsupportedError("models.read_gguf", what)
        with map_gguf(path) as data:
            raw = data[tensor.begin : tensor.end]
        return np.frombuffer(raw, "<f4").tolist()


def _check_part(header: GgufHeader, index: int, count: int) -> None:
    stated = header.metadata.get("split.count", 1 if count == 1 else 0)
    number = header.metadata.get("split.no", 0)
    if type(stated) is not int or type(number) is not int or (stated, number) != (count, index):
        raise ConfigError(
            "models.open_weights",
            f"{header.path.name} says that it is part {number!r} of {stated!r}, counted from 0: "
            f"by its name it is part {index} of {count}",
        )


FileState = tuple[int, int, int]


def _read_state(path: Path) -> FileState:
    if not path.is_file():
        raise NotFoundError("models.open_weights", f"{path} does not exist")
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns


@lru_cache(maxsize=64)
def _read_cached(path: Path, state: FileState) -> GgufHeader:
    del state
    return read_gguf_header(path)
