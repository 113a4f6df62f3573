"""``GET /requests/{id}/timeline``: the server's record of a request and that of its instances."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import NotFoundError, TandemError
from tandem.core.timeline import InstanceTimeline, MissReason, PrefixMiss, RequestTimeline
from tandem.server.context import ServerContext
from tandem.server.telemetry.timelines import ChoiceRecord, RequestRecord

__all__ = ["collect_timeline", "get_timeline"]

_TIMEOUT_S = 2.0
"""Seconds to wait for the instances' reports; without them, the answer has the server's part
only."""
_encode = msgspec.json.Encoder().encode


async def get_timeline(context: ServerContext, http: Request) -> Response:
    """Return the timeline of a request, running or ended, to the key that sent it."""
    record = context.timelines.find(context.find_owner(http), http.path_params["id"])
    if record is None:
        # A request of another key gets the same error as an unknown id, so that nobody learns which
        # ids exist.
        raise NotFoundError(
            "server.timeline",
            "no request of this id and key is remembered: take the id of the answer or its "
            "x-request-id; server.timelines says how many are kept",
            field="id",
        )
    document = _encode(await collect_timeline(context, record))
    return Response(document, media_type="application/json")


async def collect_timeline(context: ServerContext, record: RequestRecord) -> RequestTimeline:
    """Combine the server's and the instances' records of a request into its timeline."""
    found: dict[str, list[InstanceTimeline]] = {}
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            told = await context.engine.list_timelines([c.request_id for c in record.choices])
    except (TandemError, TimeoutError):
        told = []
    choices = {choice.request_id: choice for choice in record.choices}
    for each in told:
        choice = choices.get(each.request_id)
        if choice is not None:
            found.setdefault(each.request_id, []).append(_refine(context, record, choice, each))
    return record.describe(found, context.clock.now_s() - record.origin.arrived_s)


def _refine(
    context: ServerContext, record: RequestRecord, choice: ChoiceRecord, told: InstanceTimeline
) -> InstanceTimeline:
    """Correct the reason why the reuse of a prompt's KV ended, if an earlier request with another
    KV identity has the same beginning.

    An instance cannot see that, because it knows only KV of its own identity.
    """
    miss = told.miss
    if miss is None or miss.reason not in (MissReason.NOT_STORED, MissReason.DIFFERS):
        return told
    if told.device_tokens + told.loaded_tokens >= context.block_size:
        return told
    detail = context.timelines.find_other_identity(record, choice.head)
    if detail is None:
        return told
    other = PrefixMiss(reason=MissReason.OTHER_IDENTITY, position=miss.position, detail=detail)
    return msgspec.structs.replace(told, miss=other)
