"""Settings of several models behind one address, and the file that lists them."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from tandem.core.config import SIZE_PATTERN, YamlLoader, parse_size
from tandem.core.errors import ConfigError

__all__ = ["HostedSpec", "HubConfig", "HubFile", "load_hub_file"]

Size = Annotated[str, Meta(pattern=SIZE_PATTERN)]


class HubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server with several models."""

    file: Annotated[
        str,
        Meta(
            description="YAML file of several models behind this address, which are loaded when "
            "they are asked for and sleep to make room; instead of model.path."
        ),
    ] = ""


class HostedSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one model of a server with several."""

    path: Annotated[str, Meta(min_length=1)]
    """Path or hub id of the model, as given to `tandem serve`."""
    memory: Size = ""
    """Memory that it needs while awake; empty: the size of its weights plus engine.kv_cache_gib."""
    is_pinned: bool = msgspec.field(default=False, name="pinned")
    """True if the model is never put to sleep to make room for another."""
    settings: dict[str, Any] = {}
    """Settings as in a file for ``--config``; they override those of the server."""

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes; 0 if it is empty."""
        return parse_size(self.memory)


class HubFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models of an address. The first one answers requests that concern no model."""

    models: Annotated[dict[str, HostedSpec], Meta(min_length=1, max_length=100)]
    memory: Size = ""
    """Memory for all awake models together; empty: no limit."""

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes; 0 if it is empty."""
        return parse_size(self.memory)


def load_hub_file(file: Path) -> HubFile:
    """Read the file that lists the models of an address.

    Raises: ConfigError (names the place in the file).
    """
    try:
        values = yaml.load(file.read_text(), YamlLoader)  # noqa: S506 - a safe one
        return msgspec.convert(values, type=HubFile)
    except OSError as error:
        what = f"{file}: {error.strerror}: give a file"
    except UnicodeDecodeError:
        what = f"{file} is not UTF-8 text"
    except yaml.YAMLError as error:
        what = f"{file} is no YAML: {' '.join(str(error).split())}"
    except msgspec.ValidationError as error:
        what = f"{file}: {error}"
    raise ConfigError("hub.read", what, field="hub.file")
