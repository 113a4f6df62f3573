"""Ollama's endpoints about models: tags, show, ps and version."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.wire import InstanceInfo
from tandem.server.context import ServedModel, ServerContext
from tandem.server.dialects.ollama import find_ollama_model, format_time, write_ollama_error
from tandem.server.protocol.ollama import (
    Details,
    OllamaModel,
    OllamaVersion,
    ProcessList,
    RunningModel,
    ShowReply,
    ShowRequest,
    TagList,
)
from tandem.server.text.middle import has_middle_tokens

__all__ = ["get_ollama_version", "list_running", "list_tags", "show_model"]

_encode = msgspec.json.Encoder().encode
_show_decoder = msgspec.json.Decoder(ShowRequest)
_API_VERSION = "0.12.11"
"""Version of Ollama whose API is implemented; clients compare it before they use newer parts."""
_FOREVER = "2318-12-31T23:59:59Z"
"""Time at which the model is reported to be unloaded; Ollama also reports a distant date for
never."""


def _answer(reply: msgspec.Struct) -> Response:
    return Response(_encode(reply), media_type="application/json")


async def get_ollama_version(_: ServerContext, __: Request) -> Response:
    """Return the version of Ollama's API."""
    return _answer(OllamaVersion(_API_VERSION))


async def list_tags(context: ServerContext, _: Request) -> Response:
    """List the models in Ollama's form."""
    return _answer(TagList([OllamaModel(**each) for each in _describe_all(context)]))


async def list_running(context: ServerContext, _: Request) -> Response:
    """List the models in memory in Ollama's form; none while they load."""
    info = context.engine.info
    if info is None:
        return _answer(ProcessList([]))
    models = [
        RunningModel(**each, expires_at=_FOREVER, size_vram=0, context_length=info.max_model_len)
        for each in _describe_all(context)
    ]
    return _answer(ProcessList(models))


async def show_model(context: ServerContext, http: Request) -> Response:
    """Describe a model in Ollama's form."""
    http.state.write_error = write_ollama_error
    request = await context.read_request(http, _show_decoder)
    find_ollama_model(context, request.model if request.model is not None else request.name)
    info, encoder = context.ready_info(), context.encoder
    capabilities = ["completion"]
    if encoder.knows_tools:
        capabilities.append("tools")
    if encoder.may_think:
        capabilities.append("thinking")
    if has_middle_tokens(encoder.tokenizer):
        capabilities.append("insert")
    recommended = context.defaults.ollama.list_values()
    family = info.architecture
    reply = ShowReply(
        parameters="\n".join(f"{k} {v}" for k, v in recommended.items()),
        template=encoder.template_source or "",
        details=_describe_details(context),
        model_info={
            "general.architecture": family,
            "general.parameter_count": info.num_parameters,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
        }
        | dict(context.files.metadata),
        capabilities=capabilities,
        modified_at=_find_time(context),
    )
    return _answer(reply)


def _describe_all(context: ServerContext) -> list[dict[str, Any]]:
    info = context.engine.last_info
    served = [ServedModel(name) for name in context.models.served]
    served += [ServedModel(name, adapter) for name, adapter in context.engine.adapters.items()]
    return [
        {
            "name": model.name,
            "model": model.name,
            "modified_at": _find_time(context),
            "size": 0 if info is None else info.weight_bytes,
            "digest": _find_digest(info, model),
            "details": _describe_details(context),
        }
        for model in served
    ]


def _find_digest(info: InstanceInfo | None, model: ServedModel) -> str:
    if model.adapter is not None:
        return model.adapter.digest
    return "" if info is None else info.weight_version


def _find_time(context: ServerContext) -> str:
    return format_time(datetime.fromtimestamp(context.created_at, UTC))


def _describe_details(context: ServerContext) -> Details:
    info, files = context.engine.last_info, context.files
    family = files.family or ("" if info is None else info.architecture)
    return Details(
        format=files.form,
        family=family,
        families=[family] if family else [],
        parameter_size="" if info is None else _name_size(info.num_parameters),
        quantization_level=files.quantization or ("" if info is None else info.dtype),
    )


def _name_size(num_parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{name}"
    return str(num_parameters)
