"""The wire format: each message is one ZeroMQ frame with one msgpack array, tag first.

This module defines all that crosses the wire, see docs/design/transfer/rpc_wire.md. A later version
may append elements to an array and add tags, and may never move or retype one. ``Bye`` and the
first three elements of ``Hello`` and ``Welcome`` stay readable for ever, so that a refusal can
always be told.
"""

from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Raw

from tandem.core.errors import CorruptionError, TandemError, UnsupportedError
from tandem.rpc.config import MAX_TIMEOUT_MS

__all__ = [
    "MIN_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "Beat",
    "Bye",
    "Call",
    "Cancel",
    "Event",
    "Fault",
    "Frame",
    "Hello",
    "Identity",
    "LaneEnd",
    "LaneOffer",
    "Limits",
    "Reply",
    "Welcome",
    "as_body",
    "decode_body",
    "decode_frame",
    "decode_greeting",
    "encode_frame",
    "make_bye",
    "make_fault",
]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All errors that msgspec raises on hostile bytes: truncation, wrong types, bad UTF-8, deep
nesting.
"""

MAX_ERROR_CHARS = 4096
"""Longest error text in characters. A text may quote long values, and a notice must fit any
limit.
"""

T = TypeVar("T")
Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Version = Annotated[int, Meta(ge=0, lt=2**31)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a side, which both sides send in the handshake."""

    name: Annotated[str, Meta(max_length=256)]
    """Name for people and logs, such as ``instance-0``; need not be unique."""
    role: Annotated[str, Meta(max_length=64)] = ""
    instance_id: Annotated[str, Meta(min_length=1, max_length=64)]
    """Random id for each start of a process: the same name with another id has restarted."""
    compat: dict[str, str] = {}
    """Facts on which both sides must agree, such as the version of the messages."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The limits of one side that the other side must respect: message size, silence, unread
    messages.
    """

    max_message_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    lease_ms: Annotated[int, Meta(ge=20, lt=2**31)]
    window_messages: Annotated[int, Meta(ge=1, lt=2**31)]
    window_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class LaneOffer(msgspec.Struct, frozen=True, array_like=True):
    """The offer of a lane, a faster channel on which a side takes calls beside the socket; see
    ``rpc.lane``.
    """

    address: Annotated[str, Meta(max_length=1024)]
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Token that names this session on the lane; only the session's two sides know it."""


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """The first message of each side in a session."""

    protocol: Version
    min_protocol: Version
    epoch: Unsigned
    """Number of sessions that the client object has opened, including this one. A welcome repeats
    its hello's.
    """
    identity: Identity
    limits: Limits
    former_lane: Any = None
    """Nil, and not read: the lane of an older version, which numbered the calls of each channel
    separately.
    """
    lane: LaneOffer | None = None


class Hello(Greeting, frozen=True, array_like=True, tag=0):
    """The client's first message on a connection."""


class Welcome(Greeting, frozen=True, array_like=True, tag=1):
    """The server's answer to a hello: the session begins."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A message in either direction that ends the session, with the reason. ``code`` is empty for a
    plain close.
    """

    protocol: Version
    min_protocol: Version
    code: str
    where: str
    what: str
    field: str | None


class Call(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request in either direction to run ``method`` and answer within ``timeout_ms`` of reading
    it.
    """

    call_id: Unsigned
    method: Annotated[str, Meta(max_length=256)]
    timeout_ms: Annotated[int, Meta(ge=0, le=MAX_TIMEOUT_MS)]
    body: Raw
    number: Unsigned = 0
    """The call's number in the order of the sender's calls in this session, from 1, equal to
    ``call_id``; 0 if the call begins when it arrives.
    """


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The result of a call, sent to its caller."""

    call_id: Unsigned
    body: Raw


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The error of a call; with ``call_id`` 0 a notice that a one-way message was refused."""

    call_id: Unsigned
    code: str
    where: str
    what: str
    field: str | None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A message that the caller no longer waits for a call. If the call has not arrived, the
    receiver stops waiting for its number.
    """

    call_id: Unsigned


class Event(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A one-way message. The body is a tagged struct of the union that the receiver registered."""

    body: Raw


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A heartbeat with the totals of messages and bytes read. Heartbeats are not counted in these
    totals.
    """

    messages_read: Unsigned
    bytes_read: Unsigned


class LaneEnd(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A message that the sender's lane (its channel beside the socket) is lost: calls that it has
    not delivered will not come.
    """


class _Opening(msgspec.Struct, frozen=True, array_like=True):
    """The first three elements of a greeting of any version."""

    tag: int
    protocol: Version
    min_protocol: Version


Frame = Hello | Welcome | Bye | Call | Reply | Fault | Cancel | Event | Beat | LaneEnd

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)
_OPENING_DECODER = msgspec.msgpack.Decoder(_Opening)
_GREETING_TAGS = (0, 1)


def as_body(value: object) -> Raw:
    """Return ``value`` for a body field, to be encoded within its frame.

    A reader gets the body as ``Raw``, and picks its type by method. Encoding the value into a
    ``Raw`` first would copy every message once more.
    """
    return cast("Raw", value)


def encode_frame(frame: Frame) -> bytes:
    """Return the encoded bytes of ``frame``. Thread-safe.

    Raises: TypeError, ValueError, OverflowError, RecursionError as msgspec does, for a body that
        has no msgpack form.
    """
    return _ENCODER.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Parse one frame. Bodies stay undecoded and borrow ``data``.

    Raises: CorruptionError unless ``data`` is exactly one frame of this version.
    """
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as error:
        raise CorruptionError(
            "rpc.decode",
            f"{len(data)} bytes are not a frame of version {PROTOCOL_VERSION}: {error}",
        ) from None


def decode_greeting(data: bytes) -> Frame:
    """Parse the first frame of a session, which may come from another version.

    Raises: UnsupportedError naming both ranges if the sides have no common version;
        CorruptionError as ``decode_frame``.
    """
    try:
        opening = _OPENING_DECODER.decode(data)
    except DECODE_ERRORS:
        return decode_frame(data)
    if opening.tag in _GREETING_TAGS and (
        opening.protocol < MIN_PROTOCOL_VERSION or opening.min_protocol > PROTOCOL_VERSION
    ):
        raise UnsupportedError(
            "rpc.handshake",
            f"no common protocol version: theirs {opening.min_protocol} to {opening.protocol}, "
            f"ours {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: upgrade the older side",
            field="protocol",
        )
    return decode_frame(data)


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: Raw) -> T:
    """Decode a body to the decoder's type.

    Raises: msgspec.MsgspecError if the body is not of that type.
    """
    try:
        return decoder.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def make_bye(error: TandemError) -> Bye:
    """Return the frame that ends a session because of ``error``."""
    _, *told = msgspec.structs.astuple(make_fault(0, error))
    return Bye(PROTOCOL_VERSION, MIN_PROTOCOL_VERSION, *told)


def make_fault(call_id: int, error: TandemError) -> Fault:
    """Return the frame that answers a call with ``error``, its texts cut to a limited length."""
    return Fault(
        call_id,
        error.code,
        _clip(error.where),
        _clip(error.what),
        None if error.field is None else _clip(error.field),
    )


def _clip(text: str) -> str:
    # Escape lone surrogates, such as those of a path: they have no UTF-8 form, and would make the
    # error unsendable.
    text = text[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
    return text[:MAX_ERROR_CHARS]
