"""Calls to the master, and its orders to hosts, over the transfer engine: where the round trip is
the cost.

The session is still that of ``tandem.rpc``: it tells who calls, and when a process is lost. A call
here names its session by the caller's ``instance_id`` and is refused without one; the client then
takes the slow way, which waits for a master. Every request may come twice, as ever.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tandem.core.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.rpc import Peer
from tandem.rpc.frames import DECODE_ERRORS
from tandem.store.edges import MasterChannel
from tandem.store.messages import CallAddress
from tandem.store.sessions import Caller
from tandem.transfer import Call, PendingCall, Segment, TransferEngine

__all__ = [
    "FAST_METHODS",
    "BegunCall",
    "CallServer",
    "CallWay",
    "FastChannel",
    "Methods",
    "open_peer",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

Methods = Sequence[tuple[str, Callable[..., Any], type, type]]
FAST_METHODS = frozenset(
    {"locate", "find", "exists", "put_inline", "start_put", "commit_put", "remove"}
)
MAX_BYTES = 2**20 - 4096
"""Of a request; what is larger goes the other way."""
MAX_METHOD_BYTES = 64
OPEN_TIMEOUT_S = 3.0
FALLBACK_ERRORS = (PeerLostError, UnsupportedError, NotFoundError, CancelledError)
"""What a call ends with if its way, not the master, is to blame."""


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    method: str
    client: str
    """``instance_id`` of the session that the call belongs to."""
    body: msgspec.Raw


class CallServer:
    """Answers calls that come over a transfer engine; to be made on the loop where handlers run.

    They begin in the order in which the calls of a peer came.

    Args:
        engine: borrowed; has no other handler.
        methods: name, handler, request type, response type.
        find_caller: the live session that a call names.
    """

    def __init__(
        self,
        engine: TransferEngine,
        methods: Methods,
        find_caller: Callable[[str], Caller | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._find_caller = find_caller
        self._envelopes = msgspec.msgpack.Decoder(_Envelope)
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_unbegun = 0
        """Tasks that the loop has not run yet."""
        self._is_closed = False
        self._methods = {
            name: (handler, msgspec.msgpack.Decoder(request), inspect.iscoroutinefunction(handler))
            for name, handler, request, _ in methods
        }
        engine.serve_calls(self._handle, loop=self._loop)

    def _handle(self, calls: list[Call]) -> list[bytes | TandemError | None]:
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> bytes | TandemError | None:
        if self._is_closed:
            return PeerLostError("store.call", "this process is ending")
        try:
            envelope = self._envelopes.decode(call.payload)
            if envelope.method not in self._methods:
                return UnsupportedError("store.call", f"no fast method {envelope.method!r}")
            handler, decoder, is_async = self._methods[envelope.method]
            request = decoder.decode(envelope.body)
        except DECODE_ERRORS as error:
            return UnsupportedError("store.call", f"malformed: {error}")
        # A plain function needs no task, but must not overtake one.
        if is_async or self._num_unbegun:
            self._num_unbegun += 1
            task = self._loop.create_task(self._run(call, handler, envelope.client, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return None
        try:
            return self._encoder.encode(handler(self._find(envelope.client), request))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits
            return _describe(error)

    def _find(self, client: str) -> Caller:
        caller = self._find_caller(client)
        if caller is None:
            raise PeerLostError("store.call", "the caller has no session here")
        return caller

    async def _run(
        self, call: Call, handler: Callable[..., Any], client: str, request: object
    ) -> None:
        self._num_unbegun -= 1
        answer: bytes | TandemError
        try:
            result = handler(self._find(client), request)
            if asyncio.iscoroutine(result):
                result = await result
            answer = self._encoder.encode(result)
        except asyncio.CancelledError:
            # Of a master that is deposed or ends. An error of its own would be taken for a bug.
            answer = PeerLostError("store.call", "the other side has ended")
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits
            answer = _describe(error)
        _reply(call, answer)

    async def aclose(self) -> None:
        """End what is under way; the engine is the caller's to close."""
        self._is_closed = True
        await asyncio.sleep(0)  # What has not begun could not answer that it was cancelled.
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _decode(answer: bytes, response_type: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(answer, type=response_type)
    except DECODE_ERRORS as error:
        raise InternalError("store.call", f"malformed answer: {error}") from None


def _describe(error: BaseException) -> TandemError:
    if isinstance(error, TandemError):
        return error
    logger.error("event=fast_call_failed", exc_info=error)
    return InternalError("store.call", f"the handler raised {error!r:.200}")


def _reply(call: Call, answer: bytes | TandemError) -> None:
    if isinstance(answer, TandemError):
        call.fail(answer)
        return
    try:
        call.reply(answer)
    except ConfigError as error:  # Too long for a call.
        call.fail(error)


class CallWay:
    """Calls to one peer over an engine, in order; see ``OrderWay``.

    Args:
        engine: borrowed.
        segment: the peer; closed by ``close``.
        client: what the calls name.
    """

    def __init__(self, engine: TransferEngine, segment: Segment, client: str) -> None:
        self._engine = engine
        self._segment = segment
        self._client = client
        self._encoder = msgspec.msgpack.Encoder()
        self._body: tuple[object, bytes] | None = None

    def takes(self, request: object) -> bool:
        """See ``OrderWay``."""
        body = self._encoder.encode(request)
        self._body = (request, body)  # The call that follows needs it.
        return len(body) <= MAX_BYTES - len(self._client) - MAX_METHOD_BYTES

    async def call(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> T:
        """See ``OrderWay``."""
        kept, self._body = self._body, None
        body = kept[1] if kept is not None and kept[0] is request else self._encoder.encode(request)
        payload = self._encoder.encode(_Envelope(method, self._client, msgspec.Raw(body)))
        try:
            answer = await self._engine.call_async(self._segment, payload, deadline_s=timeout_s)
        except (NotFoundError, CancelledError) as error:
            if self._engine.is_closed or not self._engine.has_segment(self._segment):
                # No answer of the host's: there is nobody to ask.
                raise PeerLostError("store.order", error.what) from None
            raise
        return _decode(answer, response_type)

    def close(self) -> None:
        """Let go of the peer; calls that are under way end with PeerLostError."""
        close_peer(self._segment)


async def open_peer(engine: TransferEngine, address: str) -> Segment:
    """Open a peer for calls, without holding up the loop; the caller closes it.

    Raises: as ``TransferEngine.open``.
    """
    opening = asyncio.ensure_future(
        asyncio.to_thread(engine.open, address, deadline_s=OPEN_TIMEOUT_S)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def close_peer(segment: Segment) -> None:
    """Let go of a peer; calls that are under way fail."""
    with contextlib.suppress(TandemError):  # Gone already.
        segment.close()


def _close_unwanted(opening: "asyncio.Future[Segment]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        close_peer(opening.result())


class BegunCall(NamedTuple):
    """A call whose answer nobody waits for yet."""

    segment: Segment
    pending: PendingCall


class FastChannel:
    """A client's way to the master: fast where master and call allow, else ``tandem.rpc``.

    Args:
        engine: borrowed.
        client: ``instance_id`` of the identity with which ``slow`` connects.
    """

    def __init__(self, engine: TransferEngine, client: str) -> None:
        self.slow: MasterChannel
        """Has the sessions, and calls ``on_peer`` and ``on_peer_lost``; borrowed."""
        self._engine = engine
        self._client = client
        self._segment: Segment | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._opening: asyncio.Task[None] | None = None

    def on_peer(self, peer: Peer) -> None:
        """A session with a master has begun."""
        self._stop_opening()
        self._opening = asyncio.get_running_loop().create_task(self._open(peer))

    def on_peer_lost(self) -> None:
        """It has ended."""
        self._close()
        self._stop_opening()

    def _close(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            close_peer(segment)

    def _stop_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _open(self, peer: Peer) -> None:
        try:
            answer = await peer.call("call_address", None, CallAddress, timeout_s=OPEN_TIMEOUT_S)
            if answer.address:
                segment = await open_peer(self._engine, answer.address)
                self._close()
                if peer.is_lost:
                    close_peer(segment)
                else:
                    self._segment = segment
        except TandemError as error:
            logger.info("event=fast_calls_off reason=%s", error)

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """See ``MasterChannel``."""
        segment, payload = self._segment, None
        begin_s = asyncio.get_running_loop().time()
        if segment is not None and method in FAST_METHODS:
            payload = self._encode(method, request)
        if segment is not None and payload is not None:
            try:
                answer = await self._engine.call_async(segment, payload, deadline_s=timeout_s)
                return _decode(answer, response_type)
            except FALLBACK_ERRORS as error:
                self._leave(segment, error)
                if timeout_s is not None:
                    timeout_s -= asyncio.get_running_loop().time() - begin_s
                    if timeout_s <= 0:
                        raise DeadlineError(
                            "store.call", f"{method}: {error.what}, and no time is left"
                        ) from None
        return await self.slow.call(method, request, response_type, timeout_s=timeout_s)

    def call_blocking(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> T | None:
        """Call from any thread but the loop's; None where only ``call`` can.

        It may have been executed then.
        Raises: what the master says.
        """
        begun = self.begin_blocking(method, request)
        return None if begun is None else self.wait_blocking(begun, response_type, timeout_s)

    def begin_blocking(self, method: str, request: object) -> "BegunCall | None":
        """Send a request from any thread but the loop's; None where only ``call`` can."""
        segment = self._segment
        payload = self._encode(method, request) if segment is not None else None
        if segment is None or payload is None:
            return None
        try:
            return BegunCall(segment, self._engine.begin_call(segment, payload))
        except FALLBACK_ERRORS as error:
            self._leave(segment, error)
            return None

    def wait_blocking(
        self, begun: "BegunCall", response_type: type[T], timeout_s: float
    ) -> T | None:
        """Wait for the answer; as ``call_blocking``."""
        try:
            answer = begun.pending.wait(timeout_s)
        except FALLBACK_ERRORS as error:
            self._leave(begun.segment, error)
            return None
        return _decode(answer, response_type)

    def _encode(self, method: str, request: object) -> bytes | None:
        if method not in FAST_METHODS:
            return None
        body = msgspec.Raw(self._encoder.encode(request))
        payload = self._encoder.encode(_Envelope(method, self._client, body))
        return payload if len(payload) <= MAX_BYTES else None

    def _leave(self, segment: Segment, error: TandemError) -> None:
        """Go the slow way from now on, until the next session."""
        logger.info("event=fast_calls_off reason=%s", error)
        if self._segment is segment:
            self._segment = None
            close_peer(segment)

    async def wait_connected(self, timeout_s: float) -> object:
        """See ``MasterChannel``."""
        return await self.slow.wait_connected(timeout_s)

    async def aclose(self) -> None:
        """Leave the way that calls take; the rest is the caller's."""
        self._close()
        self._stop_opening()
