"""The OpenAPI document, made from the structs that decode requests and encode answers.

No schema is written by hand, so none can differ from the endpoints. OpenAPI 3.1, whose schemas
are JSON Schema 2020-12, which is what msgspec writes.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.server.context import ServerContext
from tandem.server.edge.http_errors import ErrorReply

__all__ = ["Endpoint", "Handler", "make_document"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]
_PARAMETER = re.compile(r"\{(?P<name>\w+)(?::\w+)?\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route and what passes over it.

    Args:
        path: as Starlette reads it.
        methods: without HEAD, which goes with GET.
        handler: its docstring is the summary.
        answer: type of a 200.
        body: type of the request's JSON; None for none.
        event: type of a stream's events, if it can be a stream.
        media_type: of the answer.
    """

    path: str
    methods: Sequence[str]
    handler: Handler
    answer: Any
    body: Any = None
    event: Any = None
    media_type: str = "application/json"


def make_document(
    endpoints: Sequence[Endpoint], *, version: str, has_keys: bool, open_paths: frozenset[str]
) -> dict[str, Any]:
    """Return the document.

    Args:
        endpoints: all that is served.
        version: of the server.
        has_keys: whether it asks for keys.
        open_paths: where it does not.
    """
    types = {ErrorReply}
    for endpoint in endpoints:
        types |= {endpoint.answer, endpoint.body, endpoint.event} - {None}
    ordered = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        item = paths.setdefault(_PARAMETER.sub(r"{\g<name>}", endpoint.path), {})
        for method in endpoint.methods:
            operation = _describe(endpoint, schema_of)
            operation["operationId"] = method.lower() + re.sub(r"\W+", "_", endpoint.path)
            if has_keys and endpoint.path not in open_paths:
                operation["security"] = [{"key": []}]
            item[method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _describe(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {endpoint.media_type: {"schema": schema_of[endpoint.answer]}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": schema_of[endpoint.event]}
    error = {"application/json": {"schema": schema_of[ErrorReply]}}
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(endpoint.handler) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": error},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    names = [match["name"] for match in _PARAMETER.finditer(endpoint.path)]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation
