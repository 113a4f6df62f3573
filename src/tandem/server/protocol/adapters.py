"""Requests and responses of loading adapters, with the field names of vLLM and SGLang."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.server.protocol import fields

__all__ = ["AdapterReply", "LoadAdapterRequest", "UnloadAdapterRequest"]


_NAME = Meta(extra_json_schema={"pattern": "^[\\w.:/@+-]{1,256}$"})
"""The same as ``ModelNames.check_adapter_name`` has it."""


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter and /load_lora_adapter."""

    lora_name: Annotated[fields.Name, _NAME]
    """The name that requests use for it."""
    lora_path: fields.Name
    """Within the folder of adapters: relative to it, or absolute."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: fields.Name


class AdapterReply(msgspec.Struct, kw_only=True):
    """SGLang's answer to both."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Folders by name, of all that are loaded now."""
