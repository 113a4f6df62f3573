"""POST /v1/responses, and operations on stored responses."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, InternalError, TandemError
from tandem.server.clients import current_client
from tandem.server.context import ServerContext
from tandem.server.dialects.dialect import Dialect, Task, collect_answer
from tandem.server.dialects.responses.planning import PlannedResponse, plan_response
from tandem.server.edge.http_errors import describe_error
from tandem.server.protocol.responses import DeletedResponse, ResponsesRequest
from tandem.server.telemetry.timelines import Origin

__all__ = [
    "REFUSED_RESPONSE_FIELDS",
    "cancel_response",
    "create_response",
    "delete_response",
    "get_response",
]

_logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 10.0
"""Seconds to wait for a running response to end after it was cancelled; it takes a step of the
engine."""
REFUSED_RESPONSE_FIELDS = {
    "conversation": "conversations are not kept: use previous_response_id",
    "access_programs": "there are no programs with rights of their own",
    "background_options": "a background answer has no options: set background alone",
    "context_management": "conversations are not edited: send the items that count",
    "image": "images are not made",
    "moderation": "nothing is moderated",
    "prompt": "prompt templates are not kept here: write instructions and input",
}
_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


async def create_response(context: ServerContext, http: Request) -> Response:
    """Answer a conversation given as items, whole, as events or in the background."""
    owner = context.find_owner(http)
    planned: list[PlannedResponse] = []

    def plan(context: ServerContext, request: ResponsesRequest) -> Task:
        planned.append(plan_response(context, request, owner))
        return planned[0].task

    dialect = Dialect(_decoder, plan, REFUSED_RESPONSE_FIELDS)
    task, origin = await dialect.prepare(context, http)
    (response,) = planned
    if not response.answer.document.background:
        return await dialect.run(context, http, task, origin)
    return _run_in_background(context, response, origin)


async def get_response(context: ServerContext, http: Request) -> Response:
    """Return a stored response, complete or as far as it has come."""
    if http.query_params.get("stream", "false").lower() not in ("false", "0", ""):
        what = "stream: the events of a kept response are not kept"
        raise ConfigError("server.get_response", what, field="stream")
    kept = context.kept_responses.find(
        context.find_owner(http), http.path_params["id"], context.clock.now_s()
    )
    return Response(kept.document, media_type="application/json")


async def delete_response(context: ServerContext, http: Request) -> Response:
    """Delete a stored response."""
    owner, name = context.find_owner(http), http.path_params["id"]
    job = context.background_jobs.get(name)
    context.kept_responses.remove(owner, name, context.clock.now_s())
    if job is not None:
        job.cancel()
    return Response(_encode(DeletedResponse(id=name)), media_type="application/json")


async def cancel_response(context: ServerContext, http: Request) -> Response:
    """Cancel a response that runs in the background; its items so far are kept."""
    owner, name = context.find_owner(http), http.path_params["id"]
    kept = context.kept_responses.find(owner, name, context.clock.now_s())
    job = context.background_jobs.get(name)
    if job is not None:
        job.cancel()
        await asyncio.wait([job], timeout=_CANCEL_TIMEOUT_S)
    elif not kept.is_background:
        what = f"response {name} did not run in the background: close its connection to end it"
        raise ConfigError("server.cancel_response", what, field="id")
    return Response(kept.document, media_type="application/json")


def _run_in_background(
    context: ServerContext, response: PlannedResponse, origin: Origin
) -> Response:
    kept, document = response.kept, response.answer.document
    assert kept is not None
    kept.document, kept.is_background, kept.is_running = _encode(document), True, True
    context.kept_responses.add(response.owner, kept, context.clock.now_s())
    # A background response counts as a request in flight, as if its client waited: it takes a place
    # within the limits, and draining waits for it.
    client = current_client.get()
    context.lifecycle.enter(client)
    job = asyncio.create_task(_run(context, response, origin))
    context.background_jobs[document.id] = job
    job.add_done_callback(_make_leave(context, response, client))
    return Response(kept.document, media_type="application/json")


def _make_leave(
    context: ServerContext, response: PlannedResponse, client: str
) -> Callable[["asyncio.Task[None]"], None]:
    def leave(job: "asyncio.Task[None]") -> None:
        if job.cancelled():
            # A task that is cancelled before its first step runs none of `_run`, not even its
            # exception handlers: the response is marked as cancelled here.
            response.answer.cancel()
        del context.background_jobs[response.answer.document.id]
        context.lifecycle.leave(client)

    return leave


async def _run(context: ServerContext, response: PlannedResponse, origin: Origin) -> None:
    task, answer = response.task, response.answer
    try:
        group = await context.start(task.plans, task.options, origin, _never_leave)
        try:
            await collect_answer(context, group, answer)
        finally:
            await group.close()
    except asyncio.CancelledError:
        answer.cancel()
    except TandemError as error:
        answer.end_failed(describe_error(error).body)
    except Exception:
        _logger.exception("event=background_failed name=%s", task.options.name)
        error = InternalError("server.background", "the server failed; its log says why")
        answer.end_failed(describe_error(error).body)


async def _never_leave() -> dict[str, object]:
    """Wait for ever: stands for the connection of a client that does not wait for its background
    response, so that the client never seems to leave.
    """
    return await asyncio.get_running_loop().create_future()
