"""Endpoints that load and unload LoRA adapters while serving, in vLLM's and SGLang's forms.

Both need an admin key (``auth.ApiKeyGate``), and adapters are loaded only from the one configured
folder.
"""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tandem.core.adapter import AdapterSource
from tandem.core.errors import ConfigError, CorruptionError, PermissionDeniedError
from tandem.server.context import ServerContext
from tandem.server.protocol.adapters import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest

__all__ = ["load_adapter", "load_adapter_sglang", "unload_adapter", "unload_adapter_sglang"]

_load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)
_encode = msgspec.json.Encoder().encode


async def load_adapter(context: ServerContext, http: Request) -> Response:
    """Load a LoRA adapter, in vLLM's form."""
    name = await _load(context, http)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(context: ServerContext, http: Request) -> Response:
    """Unload a LoRA adapter, in vLLM's form; running requests keep it until they end."""
    name = await _unload(context, http)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def load_adapter_sglang(context: ServerContext, http: Request) -> Response:
    """Load a LoRA adapter, in SGLang's form."""
    await _load(context, http)
    return _answer(context)


async def unload_adapter_sglang(context: ServerContext, http: Request) -> Response:
    """Unload a LoRA adapter, in SGLang's form; running requests keep it until they end."""
    await _unload(context, http)
    return _answer(context)


def _answer(context: ServerContext) -> Response:
    loaded = {name: info.folder for name, info in context.engine.adapters.items()}
    reply = AdapterReply(success=True, loaded_adapters=loaded)
    return Response(_encode(reply), media_type="application/json")


async def _load(context: ServerContext, http: Request) -> str:
    request = await context.read_request(http, _load_decoder)
    context.models.check_adapter_name(request.lora_name)
    folder = _find_folder(context.adapter_folder, request.lora_path)
    try:
        await context.engine.load_adapter(AdapterSource(name=request.lora_name, folder=str(folder)))
    except CorruptionError as error:
        # A corrupt adapter file is the client's mistake: the client named the file. ConfigError is
        # answered 400, CorruptionError would be 500.
        raise ConfigError("server.load_adapter", error.what, field="lora_path") from error
    return request.lora_name


async def _unload(context: ServerContext, http: Request) -> str:
    request = await context.read_request(http, _unload_decoder)
    await context.engine.unload_adapter(request.lora_name)
    return request.lora_name


def _find_folder(root: Path | None, path: str) -> Path:
    """Return the resolved folder of a path, which must lie in the folder of adapters."""
    where, field = "server.load_adapter", "lora_path"
    if root is None:
        what = "no folder is set from which adapters may be loaded: set model.adapter_folder"
        raise PermissionDeniedError(where, what, field=field)
    try:
        real_root = root.resolve()
        real = (real_root / path).resolve()
    # Resolving fails for paths with a NUL character, a loop of links, or a name that is too long.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(where, f"lora_path is no path: {error}", field=field) from error
    if not real.is_relative_to(real_root):
        what = "lora_path leads out of the folder that adapters may be loaded from"
        raise ConfigError(where, what, field=field)
    return real
