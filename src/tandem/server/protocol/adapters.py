"""Requests and responses of loading adapters, with the field names of vLLM and SGLang."""

import msgspec

from tandem.server.protocol import fields

__all__ = ["AdapterReply", "LoadAdapterRequest", "UnloadAdapterRequest"]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter and /load_lora_adapter."""

    lora_name: fields.Name
    """What requests call it."""
    lora_path: fields.Name
    """Within the folder of adapters: relative to it, or absolute."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: fields.Name


class AdapterReply(msgspec.Struct, kw_only=True):
    """What SGLang answers to both."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Folders by name, of all that are loaded now."""
