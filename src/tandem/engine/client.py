"""The server's side of an instance: starts the process, watches it, and speaks for it.

Owns the child process, the session with it, and one queue of outputs per live request. If the
process dies, stops answering, or is killed, every waiting request gets a last output that says so,
and a new process is started after a pause that grows while starts keep failing. All of it runs on
one event loop.
"""

import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import msgspec

from tandem.core.config import child_environment
from tandem.core.errors import DeadlineError, PeerLostError, TandemError
from tandem.core.wire import (
    AddRequest,
    CancelRequest,
    Empty,
    FinishReason,
    InstanceInfo,
    InstanceStage,
    InstanceStats,
    RequestOutput,
    StageChanged,
    StepOutputs,
)
from tandem.engine.config import EngineConfig
from tandem.engine.instance import SERVER_ROLE, InstanceSpec, compat_facts
from tandem.models.config import ModelConfig
from tandem.rpc import Auth, Peer, RpcClient, RpcConfig, make_identity, make_runtime_dir

__all__ = ["InstanceClient", "OutputStream"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 120.0
"""From the start of the process to its socket; loading comes after. Python on a cold, busy disk
has been seen to take half a minute to import torch."""
CALL_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 5.0
RESTART_PAUSE_S = 0.2
RESTART_PAUSE_MAX_S = 30.0
MAX_FIRST_STARTS = 3
"""Processes that may die before one has ever served; more would die alike."""


class OutputStream:
    """Outputs of one request, in order; see ``tandem.server.engine.RequestStream``."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._cancel = cancel
        self._queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._has_ended = False

    def put(self, output: RequestOutput) -> None:
        """Append an output; the last one has a finish reason."""
        self._queue.put_nowait(output)

    async def cancel(self) -> None:
        """Tell the instance to stop; at once, idempotent, harmless after the end."""
        if not self._has_ended:
            self._has_ended = True
            self._cancel(self._request_id)
            self._queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._has_ended:
            raise StopAsyncIteration
        output = await self._queue.get()
        if output is None:
            raise StopAsyncIteration
        self._has_ended = output.finish_reason is not None
        return output


class InstanceClient:
    """One supervised instance. An async context manager; entering starts the process.

    Args:
        model: what the instance loads.
        engine: its engine's settings.
        rpc: the control channel's.
        name: of the instance, for logs.
        log_level: of its process.
        on_stage: called with every change of stage and every step of progress.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        rpc: RpcConfig,
        *,
        name: str = "instance-0",
        log_level: str = "info",
        on_stage: Callable[[StageChanged], None] | None = None,
    ) -> None:
        self._spec = InstanceSpec(
            name=name, endpoint="", model=model, engine=engine, rpc=rpc, log_level=log_level
        )
        self._on_stage = on_stage
        self._stage = StageChanged(InstanceStage.STARTING)
        self._info: InstanceInfo | None = None
        self._client: RpcClient | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams: dict[str, OutputStream] = {}
        self._folder: Path | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._was_ready = False
        """Whether the present process has served."""
        self._settled = asyncio.Event()
        """Set once it is known whether the instance can serve at all."""
        self._ready = asyncio.Event()
        self._lost: asyncio.Future[str] | None = None
        """Why the present session ended, once it has."""
        self.num_restarts = 0

    async def __aenter__(self) -> Self:
        self._folder = make_runtime_dir()
        self._supervision = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._supervision is not None
        self._supervision.cancel()
        await asyncio.gather(self._supervision, return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def info(self) -> InstanceInfo | None:
        """What runs; None until ready, and while a dead instance is replaced."""
        return self._info

    @property
    def stage(self) -> StageChanged:
        """The latest stage."""
        return self._stage

    @property
    def pid(self) -> int | None:
        """Process id of the instance, if one runs."""
        return None if self._process is None else self._process.pid

    async def wait_ready(self) -> InstanceInfo:
        """Wait until the instance serves for the first time.

        Raises: the error that the instance failed with, if it cannot serve at all.
        """
        await self._settled.wait()
        if self._info is None:
            raise PeerLostError("engine.start", self._stage.detail)
        return self._info

    async def submit(self, request: AddRequest) -> OutputStream:
        """Queue a request; see ``tandem.server.engine.EngineClient.submit``."""
        client = self._require_client()
        request_id = request.request_id
        stream = self._streams[request_id] = OutputStream(request_id, self._cancel)
        try:
            await client.call("add", request, Empty, timeout_s=CALL_TIMEOUT_S)
        except BaseException as error:
            # Given up or cancelled, it may have been accepted all the same.
            if not isinstance(error, TandemError) or isinstance(error, DeadlineError):
                self._cancel(request_id)
            self._streams.pop(request_id, None)
            raise
        return stream

    async def stats(self) -> InstanceStats:
        """Return counters and gauges; raises PeerLostError while the instance is down."""
        return await self._require_client().call(
            "stats", Empty(), InstanceStats, timeout_s=CALL_TIMEOUT_S
        )

    async def flush_cache(self) -> int:
        """Forget cached prefixes; returns the blocks freed."""
        return await self._require_client().call(
            "flush_cache", Empty(), int, timeout_s=CALL_TIMEOUT_S
        )

    def _require_client(self) -> RpcClient:
        if self._client is None or not self._client.is_connected:
            raise PeerLostError(
                "engine.call", f"the instance is {self._stage.stage}: try again in a moment"
            )
        return self._client

    def _cancel(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        with contextlib.suppress(TandemError):  # A dead instance has forgotten it anyway.
            self._require_client().push(CancelRequest(request_id=request_id))

    # Supervision.

    async def _supervise(self) -> None:
        """Run one process after the other, until nothing suggests that the next would do better."""
        pause_s = RESTART_PAUSE_S
        num_failed_starts = 0
        while True:
            reason = await self._run_process()
            if self._was_ready:
                pause_s, num_failed_starts = RESTART_PAUSE_S, 0
            else:
                num_failed_starts += 1
            self._was_ready = False
            is_first = not self._settled.is_set()
            if is_first and (
                self._stage.stage is InstanceStage.FAILED or num_failed_starts >= MAX_FIRST_STARTS
            ):
                # It said why it cannot serve, or keeps dying: whoever started us must know.
                self._set_stage(StageChanged(InstanceStage.FAILED, reason))
                self._settled.set()
                return
            logger.error("event=instance_lost reason=%r restart_in_s=%.1f", reason, pause_s)
            self._set_stage(StageChanged(InstanceStage.STARTING, f"restarting: {reason}"))
            self.num_restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)

    async def _run_process(self) -> str:
        """Start one process and stay until it is gone; return why it is."""
        assert self._folder is not None
        endpoint = f"ipc://{self._folder / f'{self.num_restarts}.sock'}"
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tandem.engine.instance",
            stdin=asyncio.subprocess.PIPE,
            # torch's OpenMP threads spin at every barrier by default; beside any other load on the
            # same cores that turns steps of milliseconds into seconds (measured: 25 ms to 110 ms
            # and more for 64 decodes on two busy cores). OpenMP reads this at load, so only here.
            env=child_environment({"OMP_WAIT_POLICY": "PASSIVE"}),
            # Ctrl-C in a terminal is for the server, which drains and then ends its instance.
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(
            msgspec.json.encode(msgspec.structs.replace(self._spec, endpoint=endpoint)) + b"\n"
        )
        exited = asyncio.create_task(process.wait())
        session = asyncio.create_task(self._hold_session(endpoint))
        try:
            await asyncio.wait((exited, session), return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                return session.result()
            return f"the process ended with status {process.returncode}"
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
            self._client, self._info = None, None
            self._fail_streams("the instance is gone: try again")
            await _end_process(process, exited)
            self._process = None

    async def _hold_session(self, endpoint: str) -> str:
        """Speak to the process until the session is lost; return why it was."""
        lost = self._lost = asyncio.get_running_loop().create_future()
        ready = self._ready = asyncio.Event()
        client = RpcClient(
            endpoint,
            identity=make_identity("server", SERVER_ROLE, compat=compat_facts()),
            auth=Auth.local(),
            config=msgspec.structs.replace(
                self._spec.rpc, connect_timeout_ms=int(CONNECT_TIMEOUT_S * 1e3)
            ),
        )
        client.on_event(self._take_event, StepOutputs | StageChanged)

        def note_loss(_: Peer, error: TandemError) -> None:
            if not lost.done():
                lost.set_result(error.what)

        client.on_peer_lost(note_loss)
        try:
            async with client:
                self._client = client
                waiter = asyncio.create_task(ready.wait())
                await asyncio.wait((waiter, lost), return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                if not lost.done():
                    self._info = await client.call("info", Empty(), InstanceInfo)
                    self._was_ready = True
                    self._set_stage(StageChanged(InstanceStage.READY))
                    if self._settled.is_set():
                        # As loud as the loss, or who reads of that never learns of its end.
                        logger.warning(
                            "event=instance_back restarts=%d pid=%d load_s=%.1f",
                            self.num_restarts,
                            self._info.pid,
                            self._info.load_seconds,
                        )
                    self._settled.set()
                return await lost
        except TandemError as error:
            return error.what

    def _take_event(self, _: Peer, event: StepOutputs | StageChanged) -> None:
        if isinstance(event, StepOutputs):
            for output in event.outputs:
                stream = self._streams.get(output.request_id)
                if stream is None:
                    continue  # Cancelled; its last output comes too late to matter.
                stream.put(output)
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
        elif event.stage is InstanceStage.READY:
            self._ready.set()  # We are ready when we know what runs.
        else:
            self._set_stage(event)
            lost = self._lost
            if event.stage is InstanceStage.FAILED and lost is not None and not lost.done():
                lost.set_result(event.detail)

    def _set_stage(self, stage: StageChanged) -> None:
        self._stage = stage
        if self._on_stage is not None:
            self._on_stage(stage)

    def _fail_streams(self, text: str) -> None:
        """Tell everybody who waits; silence would leave them waiting for ever."""
        error = PeerLostError("engine.run", text)
        for request_id, stream in self._streams.items():
            stream.put(
                RequestOutput(
                    request_id=request_id,
                    token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error_code=error.code,
                    error_text=error.what,
                )
            )
        self._streams.clear()


async def _end_process(process: asyncio.subprocess.Process, exited: "asyncio.Task[int]") -> None:
    """End a process that may be gone, well, stuck or stopped; bounded in time."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(asyncio.shield(exited), EXIT_TIMEOUT_S)
    except TimeoutError:
        # A stopped process does not end by asking.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await exited
