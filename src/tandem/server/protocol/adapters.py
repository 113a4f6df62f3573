"""Requests and responses of loading adapters, with the field names of vLLM and SGLang."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.server.protocol import fields

__all__ = ["AdapterReply", "LoadAdapterRequest", "UnloadAdapterRequest"]


_NAME = Meta(extra_json_schema={"pattern": "^[\\w.:/@+-]{1,256}$"})
"""Pattern of adapter names, the same as in ``ModelNames.check_adapter_name``."""


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/load_lora_adapter and /load_lora_adapter."""

    lora_name: Annotated[fields.Name, _NAME]
    """Name under which requests will ask for the adapter."""
    lora_path: fields.Name
    """Path in the folder of adapters, relative to it or absolute."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: fields.Name


class AdapterReply(msgspec.Struct, kw_only=True):
    """SGLang's answer to loading and unloading."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Folders of all loaded adapters by name."""
