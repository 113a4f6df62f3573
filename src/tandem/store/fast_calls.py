"""Calls to the master over the transfer engine: for those where the round trip is the cost.

The session is still that of ``tandem.rpc``: it tells who calls, and when a process is lost. A call
here names its session by the caller's ``instance_id`` and is refused without one; the client then
takes the slow way, which waits for a master. Every request may come twice, as ever.
"""

import asyncio
import inspect
import logging
import selectors
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tandem.core.errors import (
    InternalError,
    NotFoundError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.rpc import Peer
from tandem.store.client_edges import MasterChannel
from tandem.store.messages import CallAddress
from tandem.store.sessions import Caller
from tandem.transfer import Call, Segment, TransferEngine

__all__ = ["CallServer", "FastChannel", "Methods", "make_shared_loop"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

Methods = Sequence[tuple[str, Callable[..., Any], type, type]]
FAST_METHODS = frozenset(
    {"locate", "find", "exists", "put_inline", "start_put", "commit_put", "remove"}
)
MAX_BYTES = 2**20 - 4096
"""Of a request; what is larger goes the other way."""
OPEN_TIMEOUT_S = 3.0


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    method: str
    client: str
    """``instance_id`` of the session that the call belongs to."""
    body: msgspec.Raw


class _SharingSelector(selectors.DefaultSelector):
    """Lets go of a lock while it waits, so that another thread may use what the loop guards."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.lock.acquire()

    def select(self, timeout: float | None = None) -> Any:
        self.lock.release()
        try:
            return super().select(timeout)
        finally:
            self.lock.acquire()


class _SharedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _SharingSelector()
        super().__init__(selector)
        self.lock = selector.lock


def make_shared_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose state another thread may touch while the loop waits for events."""
    return _SharedLoop()


class CallServer:
    """Answers calls that come over a transfer engine.

    Plain handlers run on the engine's thread, if the loop is of ``make_shared_loop``: no thread
    has to wake up for them. All others run on the loop.

    Args:
        engine: borrowed; has no other handler.
        methods: name, handler, request type, response type.
        find_caller: the live session of an ``instance_id``.
    """

    def __init__(
        self,
        engine: TransferEngine,
        methods: Methods,
        find_caller: Callable[[str], Caller | None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = self._loop.lock if isinstance(self._loop, _SharedLoop) else None
        self._find_caller = find_caller
        self._envelopes = msgspec.msgpack.Decoder(_Envelope)
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods = {
            name: (handler, msgspec.msgpack.Decoder(request), inspect.iscoroutinefunction(handler))
            for name, handler, request, _ in methods
            if name in FAST_METHODS
        }
        engine.serve_calls(self._handle)

    def _handle(self, calls: list[Call]) -> list[bytes | TandemError | None]:
        """On the engine's thread."""
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> bytes | TandemError | None:
        try:
            envelope = self._envelopes.decode(call.payload)
            if envelope.method not in self._methods:
                return UnsupportedError("store.call", f"no fast method {envelope.method!r}")
            handler, decoder, is_slow = self._methods[envelope.method]
            request = decoder.decode(envelope.body)
        except msgspec.MsgspecError as error:
            return UnsupportedError("store.call", f"malformed: {error}")
        if is_slow or self._lock is None:
            try:
                self._loop.call_soon_threadsafe(
                    self._start, call, handler, envelope.client, request
                )
            except RuntimeError:
                return PeerLostError("store.call", "the master is ending")
            return None
        with self._lock:
            try:
                answer = handler(self._caller(envelope.client), request)
            except TandemError as error:
                return error
        return self._encoder.encode(answer)

    def _caller(self, client: str) -> Caller:
        caller = self._find_caller(client)
        if caller is None:
            raise PeerLostError("store.call", "the caller has no session here")
        return caller

    def _start(self, call: Call, handler: Callable[..., Any], client: str, request: object) -> None:
        task = self._loop.create_task(self._run(call, handler, client, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, call: Call, handler: Callable[..., Any], client: str, request: object
    ) -> None:
        try:
            answer = handler(self._caller(client), request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            call.reply(self._encoder.encode(answer))
        except TandemError as error:
            call.fail(error)
        except asyncio.CancelledError:
            # Of a master that is deposed or ends. An error of its own would be taken for a bug.
            call.fail(PeerLostError("store.call", "the master has ended"))
            raise
        except Exception as error:
            logger.exception("event=fast_call_failed")
            call.fail(InternalError("store.call", f"the handler raised {error!r:.200}"))

    async def aclose(self) -> None:
        """End what is under way; the engine is the caller's to close."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


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
        self._segment = None
        self._stop_opening()

    def _stop_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    async def _open(self, peer: Peer) -> None:
        try:
            answer = await peer.call("call_address", None, CallAddress, timeout_s=OPEN_TIMEOUT_S)
            if answer.address:
                segment = await asyncio.to_thread(
                    self._engine.open, answer.address, deadline_s=OPEN_TIMEOUT_S
                )
                if not peer.is_lost:
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
        if segment is not None and method in FAST_METHODS:
            payload = self._encode(method, request)
        if segment is not None and payload is not None:
            try:
                answer = await self._engine.call_async(segment, payload, deadline_s=timeout_s)
                return msgspec.msgpack.decode(answer, type=response_type)
            except (PeerLostError, UnsupportedError, NotFoundError) as error:
                self._leave(segment, error)
        return await self.slow.call(method, request, response_type, timeout_s=timeout_s)

    def call_blocking(
        self, method: str, request: object, response_type: type[T], timeout_s: float
    ) -> T | None:
        """Call from any thread but the loop's; None where only ``call`` can.

        It may have been executed then.
        Raises: what the master says.
        """
        segment = self._segment
        payload = self._encode(method, request) if segment is not None else None
        if segment is None or payload is None:
            return None
        try:
            answer = self._engine.call(segment, payload, deadline_s=timeout_s)
        except (PeerLostError, UnsupportedError, NotFoundError) as error:
            self._leave(segment, error)
            return None
        return msgspec.msgpack.decode(answer, type=response_type)

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

    async def wait_connected(self, timeout_s: float) -> object:
        """See ``MasterChannel``."""
        return await self.slow.wait_connected(timeout_s)

    async def aclose(self) -> None:
        """Leave the way that calls take; the rest is the caller's."""
        self._segment = None
        self._stop_opening()
