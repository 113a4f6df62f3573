"""One session with an instance process: its requests, its replies, its end.

Owns the connection and the receiver of each live request's outputs. When the session is lost, every
live request gets a last output with an error. All of it runs on one event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import msgspec

from tandem.conductor.load_count import LoadCount
from tandem.core.errors import DeadlineError, PeerLostError, TandemError
from tandem.core.wire import (
    AddRequest,
    CancelRequest,
    Empty,
    FinishReason,
    InstanceInfo,
    InstanceStage,
    ReleaseHold,
    RequestOutput,
    StageChanged,
    StepOutputs,
)
from tandem.engine.process.methods import ADD, INFO, InstanceMethod
from tandem.rpc import Peer

__all__ = ["InstanceSession", "SessionClient"]

T = TypeVar("T")
Req = TypeVar("Req")
Res = TypeVar("Res")


class SessionClient(Protocol):
    """The control channel to one instance; for its methods see ``tandem.rpc.RpcClient``."""

    @property
    def is_connected(self) -> bool:
        """True while calls reach the instance."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since the instance last sent anything; 0 while it is not connected."""
        ...

    def on_event(self, callback: Callable[[Peer, Any], None], event_type: Any) -> None:
        """Set the callback for the instance's events of one type. Call it before connecting."""
        ...

    def on_peer_lost(self, callback: Callable[[Peer, TandemError], None]) -> None:
        """Set the callback for the loss of the session with the instance. Call it before
        connecting.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *details: object) -> None: ...

    async def call(
        self, method: str, request: Any, response_type: type[T], *, timeout_s: float | None = None
    ) -> T:
        """Call a method of the instance."""
        ...

    def push(self, event: msgspec.Struct) -> None:
        """Send the instance an event (a message without an answer)."""
        ...


class InstanceSession:
    """A session with one instance process, from connection to loss.

    Args:
        client: control channel, not connected yet; owned.
        on_stage: called with every change of stage but the last, and every step of progress.
        on_ready: called once, with the facts of the instance, when it serves.
    """

    def __init__(
        self,
        client: SessionClient,
        *,
        on_stage: Callable[[StageChanged], None],
        on_ready: Callable[[InstanceInfo], None],
    ) -> None:
        self._on_stage = on_stage
        self._on_ready = on_ready
        self._sinks: dict[str, Callable[[RequestOutput], None]] = {}
        self.load = LoadCount()
        """Load of the instance: its reports plus the requests sent since."""
        self._ready = asyncio.Event()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._client.on_event(self._take_event, StepOutputs | StageChanged)
        self._client.on_peer_lost(self._note_loss)

    async def run(self) -> str:
        """Connect, serve until the session is lost, and return the reason of the loss."""
        try:
            async with self._client:
                waiter = asyncio.create_task(self._ready.wait())
                await asyncio.wait((waiter, self._lost), return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                if not self._lost.done():
                    self._on_ready(await self.call(INFO, Empty()))
                return await self._lost
        except TandemError as error:
            return error.what
        finally:
            self._fail_sinks("the instance is gone: try again")

    @property
    def is_connected(self) -> bool:
        """True while calls reach the instance."""
        return self._client.is_connected

    @property
    def silence_s(self) -> float:
        """Seconds since the instance last sent anything; 0 while it is not connected."""
        return self._client.silence_s

    async def submit(self, request: AddRequest, put: Callable[[RequestOutput], None]) -> None:
        """Queue a request; see ``tandem.server.engine.EngineClient.submit`` for the errors.

        Args:
            request: the request; its id must not be live here.
            put: called with each output, the last of which has a finish reason; not after
                ``cancel``. The first call may come before this returns.
        """
        request_id = request.request_id
        self._sinks[request_id] = put
        try:
            await self.call(ADD, request)
        except BaseException as error:
            # Cancel the request at the instance: a call that timed out may have been accepted
            # there.
            if not isinstance(error, TandemError) or isinstance(error, DeadlineError):
                self.cancel(request_id)
            self._sinks.pop(request_id, None)
            raise

    async def call(self, method: InstanceMethod[Req, Res], request: Req) -> Res:
        """Call a method of the instance.

        Raises: PeerLostError (the session is lost); DeadlineError (no answer within the method's
            time limit); errors of the method's handler in ``InstanceApi``.
        """
        return await self._client.call(
            method.name, request, method.response_type, timeout_s=method.timeout_s
        )

    def cancel(self, request_id: str) -> None:
        """Cancel a request at the instance; its later outputs are dropped."""
        self._sinks.pop(request_id, None)
        # Ignore errors of an instance that has died: it no longer has the request.
        with contextlib.suppress(TandemError):
            self._client.push(CancelRequest(request_id=request_id))

    def release_hold(self, request_id: str) -> None:
        """Release the blocks that the instance holds for an ended prefill; do nothing if the
        instance is lost.
        """
        with contextlib.suppress(TandemError):
            self._client.push(ReleaseHold(request_id=request_id))

    def _note_loss(self, _: Peer, error: TandemError) -> None:
        if not self._lost.done():
            self._lost.set_result(error.what)

    def _take_event(self, _: Peer, event: StepOutputs | StageChanged) -> None:
        if isinstance(event, StepOutputs):
            if event.load is not None:
                self.load.take(event.load)
            self.load.take_steps(event.steps)
            self.load.take_blocks(event.blocks)
            for output in event.outputs:
                put = self._sinks.get(output.request_id)
                if put is None:
                    continue  # The request was cancelled, so its last output is discarded.
                if output.finish_reason is not None:
                    del self._sinks[output.request_id]
                put(output)
        elif event.stage is InstanceStage.READY:
            # The session is ready when the instance has sent the facts of its model.
            self._ready.set()
        else:
            self._on_stage(event)
            if event.stage is InstanceStage.FAILED and not self._lost.done():
                self._lost.set_result(event.detail)

    def _fail_sinks(self, text: str) -> None:
        """Send an error as the last output of every live request of this session, because no output
        comes for them any more.
        """
        error = PeerLostError("engine.run", text)
        sinks, self._sinks = self._sinks, {}
        for request_id, put in sinks.items():
            put(
                RequestOutput(
                    request_id=request_id,
                    token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error_code=error.code,
                    error_text=error.what,
                )
            )
