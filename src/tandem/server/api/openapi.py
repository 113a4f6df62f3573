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
from tandem.server.protocol.rules import Rule

__all__ = ["Endpoint", "Handler", "make_document"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]
_PARAMETER = re.compile(r"\{(?P<name>\w+)(?::\w+)?\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route, with the types of its bodies.

    Args:
        path: path in Starlette's form.
        methods: HTTP methods; HEAD is implied by GET.
        handler: function that answers; its docstring is the summary.
        answer: type of the answer with status 200.
        body: type of the request's JSON; None: no body.
        event: type of a stream's events, if the answer can be a stream.
        is_lines: True if events are lines of JSON and not server-sent events.
        media_type: media type of the answer.
        rule: JSON Schema that the body must satisfy beside its type.
    """

    path: str
    methods: Sequence[str]
    handler: Handler
    answer: Any
    body: Any = None
    event: Any = None
    media_type: str = "application/json"
    rule: Rule | None = None
    is_lines: bool = False


def make_document(
    endpoints: Sequence[Endpoint],
    *,
    version: str,
    has_keys: bool,
    has_admin_keys: bool,
    open_paths: frozenset[str],
    admin_paths: frozenset[str],
    num_token_ids: int,
    max_choices: int,
) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        endpoints: all endpoints.
        version: version of the server.
        has_keys: True if clients need an API key.
        has_admin_keys: True if there are admin keys; without them, ``admin_paths`` refuse
            everybody.
        open_paths: paths that need no key, and answer 503 while the server is not ready.
        admin_paths: paths that always need an admin key.
        num_token_ids: number of token ids that both the model and its tokenizer know.
        max_choices: largest number of choices of a request.
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
            responses = operation["responses"]
            if endpoint.path in open_paths:
                responses["503"] = {**responses["200"], "description": "Not ready; see the status."}
            operation["operationId"] = method.lower() + re.sub(r"\W+", "_", endpoint.path)
            if endpoint.path in admin_paths and not has_admin_keys:
                what = "Nobody may do this: server.admin_api_key is not set."
                responses["403"] = _make_error(what, schema_of)
            elif endpoint.path in admin_paths:
                operation["security"] = [{"admin_key": []}]
            elif has_keys and endpoint.path not in open_paths:
                operation["security"] = [{"key": []}, {"admin_key": []}]
            if "security" in operation:
                responses["401"] = _make_error("No key, or one that is not known.", schema_of)
                responses["403"] = _make_error("The key is not enough.", schema_of)
            item[method.lower()] = operation
    token_id = {"type": "integer", "minimum": 0, "maximum": num_token_ids - 1}
    components["TokenId"] = token_id
    _bound_fields(components, max_choices)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    document["components"]["securitySchemes"] = {
        name: {"type": "http", "scheme": "bearer", "description": f"One of {setting}."}
        for name, setting in (
            ("key", "server.api_key or server.api_key_file"),
            ("admin_key", "server.admin_api_key"),
        )
    }
    return document


def _bound_fields(components: dict[str, Any], max_choices: int) -> None:
    """Limit ``stop_token_ids`` of every body to the vocabulary, and ``n`` to ``max_choices``."""
    for component in components.values():
        fields = component.get("properties", {})
        for each in fields.get("stop_token_ids", {}).get("anyOf", ()):
            if each.get("type") == "array":
                each["items"] = {"$ref": "#/components/schemas/TokenId"}
        for each in fields.get("n", {}).get("anyOf", ()):
            if each.get("type") == "integer":
                each["maximum"] = max_choices


_ERRORS = {
    "400": "A field is wrong or not supported; `param` names it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "503": "The queue is full or no instance serves: try again after `Retry-After` seconds.",
    "504": "The time limit of the request, or of the server, is over.",
}
"""Error answers of endpoints with a body, by status."""


def _make_error(description: str, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema_of[ErrorReply]}}
    return {"description": description, "content": content}


def _describe(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content = {endpoint.media_type: {"schema": schema_of[endpoint.answer]}}
    if endpoint.event is not None and endpoint.is_lines:
        content["application/x-ndjson"] = {"schema": schema_of[endpoint.event]}
    elif endpoint.event is not None:
        # A stream's HTTP status is sent before its first event, so an error in a stream is one more
        # event: the schema allows an ErrorReply there.
        body = {"anyOf": [schema_of[endpoint.event], schema_of[ErrorReply]]}
        text = {"type": "string", "contentMediaType": "application/json", "contentSchema": body}
        data = {"anyOf": [{"const": "[DONE]"}, text]}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content["text/event-stream"] = {"schema": event}
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(endpoint.handler) or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": _make_error("What went wrong.", schema_of),
        },
    }
    if endpoint.body is not None:
        schema = schema_of[endpoint.body]
        if endpoint.rule is not None:
            schema = {"allOf": [schema, endpoint.rule]}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        operation["responses"] |= {
            status: _make_error(text, schema_of) for status, text in _ERRORS.items()
        }
    names = [match["name"] for match in _PARAMETER.finditer(endpoint.path)]
    if names:
        operation["responses"]["404"] = _make_error("There is none of this name.", schema_of)
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation
