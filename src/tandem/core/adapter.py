"""LoRA adapters in messages between the server and its instances.

A client names an adapter. Requests between processes carry its ``digest`` instead, so that two
different contents under one name cannot be confused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError

__all__ = ["AdapterInfo", "AdapterSource", "UnloadAdapter", "read_sources"]


class AdapterSource(msgspec.Struct, frozen=True, kw_only=True):
    """A request to load a LoRA adapter from a folder."""

    name: str
    """Name that clients use for the adapter."""
    folder: str
    """Absolute path of a folder in PEFT's format."""
    digest: str = ""
    """``AdapterInfo.digest`` that the content must have; empty: any content is accepted."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that an instance has loaded."""

    name: str
    folder: str
    digest: str
    """Hex SHA-256 over the adapter's weights and scales; requests name the adapter by it."""
    system_fingerprint: str
    """Fingerprint in answers computed with this adapter; see ``KvIdentity.system_fingerprint``."""
    rank: Annotated[int, Meta(ge=1)]
    """Largest LoRA rank of the adapter's matrices."""
    num_modules: Annotated[int, Meta(ge=1)]
    """Number of linear modules that the adapter changes."""
    size_bytes: Annotated[int, Meta(ge=0)]
    """Bytes of its LoRA factors in the model's dtype, without the padding that kernels want."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A command to refuse new requests for a LoRA adapter, and to free it after the last one."""

    digest: str


def read_sources(settings: Sequence[str]) -> tuple[AdapterSource, ...]:
    """Read settings that name LoRA adapters, each of the form NAME=FOLDER.

    Raises: ConfigError (another form, or a name twice).
    """
    sources: dict[str, AdapterSource] = {}
    for setting in settings:
        name, _, folder = setting.partition("=")
        if not (name and folder) or name in sources:
            why = "is there twice" if name in sources else "is not NAME=FOLDER"
            what = f"{setting!r} {why}: give --adapter NAME=FOLDER for each adapter"
            raise ConfigError("core.read_adapters", what, field="model.adapter")
        sources[name] = AdapterSource(name=name, folder=str(Path(folder).absolute()))
    return tuple(sources.values())
