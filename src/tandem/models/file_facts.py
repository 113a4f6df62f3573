"""Facts that a model's files tell of themselves, for lists of models: format and quantization."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.models.gguf.mixtures import MIXTURES
from tandem.models.loading.hub import DEMO_FOLDER, DEMO_NOTE
from tandem.models.sources.gguf_files import GgufFiles, find_gguf

__all__ = ["FileFacts", "read_file_facts"]

MAX_TEXT = 1024
"""Longest text of metadata that is told; a chat template is longer."""
NAMES = {mixture.file_type: mixture.name.upper() for mixture in MIXTURES.values()}
NAMES |= {0: "F32", 1: "F16", 32: "BF16"}
"""llama.cpp's names of ``general.file_type``. Source: llama.cpp, ``llama_ftype``."""


class FileFacts(NamedTuple):
    """Facts from the files of a model."""

    form: str
    """``gguf`` or ``safetensors``."""
    family: str = ""
    """Architecture by its name in a GGUF file; empty for safetensors."""
    quantization: str = ""
    """Name of the mixture of a GGUF file, such as Q4_K_M; empty for safetensors."""
    metadata: Mapping[str, Any] = MappingProxyType({})
    """Numbers and short texts of a GGUF file's metadata."""
    note: str = ""
    """A sentence for whoever begins to chat with the model; empty if there is none."""


def read_file_facts(place: Path) -> FileFacts:
    """Return what a model's files tell.

    Args:
        place: folder of a checkpoint, or its GGUF file.

    Raises: errors of ``GgufFiles.open``.
    """
    file = None if (place / "config.json").is_file() else find_gguf(place)
    if file is None:
        note = DEMO_NOTE if place.resolve() == DEMO_FOLDER.resolve() else ""
        return FileFacts("safetensors", note=note)
    files = GgufFiles.open(file)
    weights: Counter[str] = Counter()
    for tensor in files.tensors.values():
        weights[tensor.kind] += prod(tensor.shape)
    most = max(weights, key=lambda kind: weights[kind], default="")
    told = files.metadata.get("general.file_type")
    metadata = {
        key: value
        for key, value in files.metadata.items()
        if isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) < MAX_TEXT)
    }
    name = NAMES.get(told, most) if isinstance(told, int) else most
    return FileFacts("gguf", files.architecture, name, metadata)
