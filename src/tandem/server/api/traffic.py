"""``/traffic``: records arrivals, lengths and hashes of requests, as a trace without text."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import PermissionDeniedError
from tandem.server.context import ServerContext
from tandem.server.edge.auth import is_admin
from tandem.server.protocol.traffic import RecordTraffic, TrafficReply

__all__ = ["record_traffic"]

_decoder = msgspec.json.Decoder(RecordTraffic)
_encode = msgspec.json.Encoder().encode
_TOKEN_BYTES = 8
"""Cost of hashing one token, expressed as the number of body bytes whose handling takes as long."""


async def record_traffic(context: ServerContext, http: Request) -> Response:
    """Start, read or stop a recording of all clients' requests; needs admin rights."""
    if not is_admin(http.scope):
        what = "the traffic is all clients': use an admin key (server.admin_api_key)"
        raise PermissionDeniedError("server.record", what)
    asked = await context.read_request(http, _decoder)
    now_s = context.clock.now_s()
    traffic = context.traffic
    if asked.action == "start":
        return _answer(TrafficReply(recording=traffic.start(now_s, asked.block_tokens)))
    recording = traffic.find(asked.recording, now_s)
    if asked.action == "stop":
        traffic.stop(asked.recording)
    ended = recording.take()
    size_bytes = _TOKEN_BYTES * sum(len(each.prompt_ids) for each in ended)
    rows = await context.shape(size_bytes, lambda: recording.make_rows(ended))
    return _answer(TrafficReply(recording=asked.recording, rows=rows, num_lost=recording.num_lost))


def _answer(reply: TrafficReply) -> Response:
    return Response(_encode(reply), media_type="application/json")
