"""The worker that runs batches in the background, with lower priority than any client's request.

The worker sends the requests of a batch through the handlers of the API with the lowest priority, a
few at a time, as one client among all; if the queue is full, they are sent again later. Batches run
one after the other, in order of creation. A request counts as done when its answer has been written
to disk.
"""

import asyncio
import fcntl
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.logs import current_request_id
from tandem.server.batches.store import BatchStore, KeptBatch
from tandem.server.batches.transfers import Transfers
from tandem.server.clients import BATCHES, current_client
from tandem.server.config import ServerConfig
from tandem.server.protocol.batches import BatchError, BatchErrors, BatchLine

__all__ = ["BatchAnswer", "BatchWorker", "now_s", "work_on_batches"]

_logger = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Largest number of requests in a batch, as at OpenAI; the server keeps their ids in memory."""
LAST_PRIORITY = 2**31 - 1
_LOOK_S = 3600.0
"""Seconds between two looks for what may be deleted."""
_RETRY_S = 1.0
"""Seconds before a request that was refused for lack of room or instances is sent again."""
_BUSY = (429, 503)
"""Statuses with which a request is sent again: queue full, no instance serves, or overload."""
_MAX_ERRORS = 100
"""Largest number of invalid lines of an input file that are reported."""
_LONGEST_ERROR = 300
"""Largest length of what is reported of a line: it may cite the client's text."""
_NOT_STREAMED = (b"", b"false", b"null")
_line_decoder = msgspec.json.Decoder(BatchLine)
_encode = msgspec.json.Encoder().encode
_FALSE = msgspec.Raw(b"false")

BatchAnswer = tuple[int, bytes]
"""HTTP status and JSON of an answer."""


def now_s() -> int:
    """Return the wall-clock time in whole Unix seconds."""
    return int(datetime.now(UTC).timestamp())


@asynccontextmanager
async def work_on_batches(
    config: ServerConfig, find_handler: Callable[[str], Callable[[Request], Awaitable[Response]]]
) -> AsyncIterator["BatchWorker | None"]:
    """Run a batch worker while the context is open, on the configured folder or a temporary one.

    Gives None if batches are off.

    Args:
        config: settings of the folder and its limits.
        find_handler: returns the handler of a path, which turns errors into answers.

    Raises:
        ConfigError: the folder cannot be used, or another server uses it.
    """
    if not config.batch_bytes:
        yield None
        return
    with ExitStack() as stack:
        if config.batch_folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-batches-")))
        else:
            folder = Path(config.batch_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            store = await asyncio.to_thread(BatchStore, folder, config.batch_bytes)
        except (OSError, msgspec.MsgspecError) as error:
            what = f"batch_folder {folder}: {error}: no other server may work on it"
            raise ConfigError("server.batches", what, field="server.batch_folder") from error
        worker = BatchWorker(
            store,
            _make_sender(find_handler),
            width=config.batch_width,
            keep_s=config.batch_keep_s,
            max_line_bytes=config.max_body_bytes,
        )
        job = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)


class _Custom(msgspec.Struct):
    custom_id: str


_custom_decoder = msgspec.json.Decoder(_Custom)


class BatchWorker:
    """The worker that answers the requests of the batches in a store of batches.

    Args:
        store: files and batches.
        send: answers a request, given its path and body; returns status and JSON.
        width: number of requests at a time.
        keep_s: seconds for which what has ended is kept.
        max_line_bytes: largest size of a request.
    """

    def __init__(
        self,
        store: BatchStore,
        send: Callable[[str, bytes], Awaitable[BatchAnswer]],
        *,
        width: int,
        keep_s: float,
        max_line_bytes: int,
    ) -> None:
        self.store = store
        self.transfers = Transfers()
        self._send = send
        self._width = width
        self._keep_s = keep_s
        self._max_line_bytes = max_line_bytes
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._writes: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake the worker to look for new batches."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until it is cancelled."""
        while True:
            self._wake.clear()
            await asyncio.to_thread(self.store.delete_old, now_s() - int(self._keep_s))
            waiting = await asyncio.to_thread(self.store.list_batches)
            waiting = [kept for kept in waiting if not kept.is_over]
            if waiting:
                await self._run_batch(waiting[-1])
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(self._keep_s, _LOOK_S))

    async def cancel(self, kept: KeptBatch) -> None:
        """Cancel a batch; its answers so far are kept."""
        if kept.is_over:
            return
        kept.batch.status, kept.batch.cancelling_at = "cancelling", now_s()
        await self._put(kept)
        job = self._running.get(kept.batch.id)
        if job is not None:
            job.cancel()
        self.notify()

    async def _put(self, kept: KeptBatch) -> None:
        """Store the state of a batch, with its first error alone if there is no room for all. If
        the disk is full, it is kept in memory only, so that other batches go on.
        """
        errors = kept.batch.errors
        try:
            await asyncio.to_thread(self.store.put_batch, kept)
        except CapacityError as error:
            if errors is not None and len(errors.data) > 1:
                del errors.data[1:]
                await self._put(kept)
                return
            _logger.warning("event=batch_not_kept batch=%s error=%s", kept.batch.id, error)

    async def _run_batch(self, kept: KeptBatch) -> None:
        batch = kept.batch
        job = asyncio.create_task(self._work(kept))
        self._running[batch.id] = job
        try:
            await asyncio.wait([job])
            # A job cancelled while the batch is not "cancelling" was cancelled by the server's end:
            # the batch keeps its status and goes on after a restart.
            if job.cancelled() and batch.status == "cancelling":
                await asyncio.gather(*self._writes, return_exceptions=True)
                await asyncio.to_thread(self._read_done, kept)
                batch.status, batch.cancelled_at = "cancelled", now_s()
            elif not job.cancelled() and job.exception() is not None:
                error = job.exception()
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                _fail(kept, [_describe(batch.id, error)])
            await self._put(kept)
        finally:
            del self._running[batch.id]
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    async def _work(self, kept: KeptBatch) -> None:
        batch = kept.batch
        if batch.status == "cancelling":
            raise asyncio.CancelledError
        if batch.status == "validating":
            errors, total = await asyncio.to_thread(self._validate, kept)
            if errors:
                _fail(kept, errors)
                return
            batch.request_counts.total = total
            batch.status, batch.in_progress_at = "in_progress", now_s()
            await asyncio.to_thread(self._open_outputs, kept)
        done = await asyncio.to_thread(self._read_done, kept)
        lines = self._list_lines(kept, done)
        is_late, taking = asyncio.Event(), asyncio.Lock()

        async def take() -> BatchLine | None:
            async with taking:
                return await asyncio.to_thread(next, lines, None)

        async def work() -> None:
            while (line := await take()) is not None:
                if is_late.is_set() or now_s() >= batch.expires_at:
                    is_late.set()
                    await self._note(kept, line, 0, b"", "batch_expired")
                else:
                    await self._answer(kept, line, is_late)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._width):
                group.create_task(work())
        end = now_s()
        batch.finalizing_at = end
        if is_late.is_set():
            batch.status, batch.expired_at = "expired", end
        else:
            batch.status, batch.completed_at = "completed", end

    async def _answer(self, kept: KeptBatch, line: BatchLine, is_late: asyncio.Event) -> None:
        batch = kept.batch
        body = line.body | {"priority": msgspec.Raw(_encode(LAST_PRIORITY)), "stream": _FALSE}
        while True:
            left_s = batch.expires_at - now_s()
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    status, answer = await self._send(batch.endpoint, _encode(body))
            except TimeoutError:
                is_late.set()
                await self._note(kept, line, 0, b"", "batch_expired")
                return
            if status not in _BUSY:
                await self._note(kept, line, status, answer, None)
                return
            await asyncio.sleep(min(_RETRY_S, max(left_s, 0)))

    async def _note(
        self, kept: KeptBatch, line: BatchLine, status: int, body: bytes, error: str | None
    ) -> None:
        batch = kept.batch
        is_good = 200 <= status < 300
        response = None
        if error is None:
            response = {
                "status_code": status,
                "request_id": f"batch_req_{line.custom_id}",
                "body": msgspec.Raw(body),
            }
        record = {
            "id": f"batch_req_{line.custom_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None if error is None else {"code": error, "message": _WHY[error]},
        }
        file_id = batch.output_file_id if is_good else batch.error_file_id
        assert file_id is not None
        # The append is shielded from cancellation: a line that is not written would make a
        # restarted server run its request a second time.
        append = asyncio.to_thread(self.store.append, file_id, _encode(record) + b"\n")
        writing = asyncio.ensure_future(append)
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        await asyncio.shield(writing)
        batch.request_counts.completed += is_good
        batch.request_counts.failed += not is_good

    def _open_outputs(self, kept: KeptBatch) -> None:
        batch = kept.batch
        for kind in ("output", "error"):
            file = self.store.add_file(
                kept.owner, f"{batch.id}_{kind}.jsonl", "batch_output", None, now_s()
            )
            setattr(batch, f"{kind}_file_id", file.id)
        self.store.put_batch(kept)

    def _read_done(self, kept: KeptBatch) -> set[str]:
        """Return the ids of a batch's requests that are answered already, and count them in its
        state.
        """
        batch = kept.batch
        done, failed = self._read_ids(batch.output_file_id), self._read_ids(batch.error_file_id)
        batch.request_counts.completed, batch.request_counts.failed = len(done), len(failed)
        return done | failed

    def _read_ids(self, file_id: str | None) -> set[str]:
        if file_id is None:
            return set()
        self.store.repair(file_id)
        lines = self.store.read_lines(file_id)
        return {_custom_decoder.decode(line).custom_id for line in lines}

    def _list_lines(self, kept: KeptBatch, done: set[str]) -> Iterator[BatchLine]:
        for raw in self.store.read_lines(kept.batch.input_file_id, self._max_line_bytes):
            line = _line_decoder.decode(raw)
            if line.custom_id not in done:
                yield line

    def _validate(self, kept: KeptBatch) -> tuple[list[BatchError], int]:
        errors: list[BatchError] = []
        known: set[str] = set()
        number = 0

        def refuse(code: str, message: str, param: str | None = None) -> None:
            message = message[:_LONGEST_ERROR]
            errors.append(BatchError(code=code, message=message, line=number, param=param))

        lines = self.store.read_lines(kept.batch.input_file_id, self._max_line_bytes)
        for number, raw in enumerate(lines, 1):
            if len(errors) >= _MAX_ERRORS:
                break
            if len(raw) > self._max_line_bytes:
                refuse("line_too_long", f"the line has more than {self._max_line_bytes} bytes")
                break
            if number > MAX_LINES:
                refuse("too_many_requests", f"a batch has at most {MAX_LINES} requests")
                break
            try:
                line = _line_decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                refuse("invalid_json_line", f"the line is no request: {error}")
                continue
            if line.url != kept.batch.endpoint:
                what = f"url is {line.url[:100]!r}, the batch is for {kept.batch.endpoint}"
                refuse("invalid_url", what, "url")
            elif bytes(line.body.get("stream", b"")) not in _NOT_STREAMED:
                refuse("invalid_request", "a batch does not stream", "body.stream")
            elif line.custom_id in known:
                refuse("duplicate_custom_id", f"custom_id {line.custom_id!r} is there twice")
            known.add(line.custom_id)
        if not number:
            errors.append(BatchError(code="empty_file", message="the input file has no requests"))
        return errors, number


_WHY = {"batch_expired": "the completion window was over before the request was answered"}


def _describe(batch_id: str, error: BaseException | None) -> BatchError:
    if isinstance(error, CapacityError):
        return BatchError(code="storage_full", message=str(error))
    if isinstance(error, FileNotFoundError):
        # After a restart a batch may still look unfinished because a full disk refused its last
        # record, while its files were free to be deleted: a missing file fails the batch, not the
        # server.
        return BatchError(code="file_deleted", message="a file of the batch was deleted")
    if isinstance(error, RecursionError):
        # Its line was read before, with a few more frames left of Python's stack.
        return BatchError(code="invalid_json_line", message="a line is nested too deep")
    _logger.error("event=batch_failed batch=%s", batch_id, exc_info=error)
    return BatchError(code="internal", message="the server failed")


def _fail(kept: KeptBatch, errors: list[BatchError]) -> None:
    kept.batch.status, kept.batch.failed_at = "failed", now_s()
    kept.batch.errors = BatchErrors(data=errors)


def _make_sender(
    find_handler: Callable[[str], Callable[[Request], Awaitable[Response]]],
) -> Callable[[str, bytes], Awaitable[BatchAnswer]]:
    """Return a function that answers one request of a batch by the handlers of the API.

    Args:
        find_handler: returns the handler of a path, which turns errors into answers.
    """

    async def send(path: str, body: bytes) -> BatchAnswer:
        current_client.set(BATCHES)
        current_request_id.set(uuid.uuid4().hex)
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            # A batch has no HTTP client that could disconnect: the second receive waits forever.
            return await asyncio.get_running_loop().create_future()

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
            "state": {},
        }
        response = await find_handler(path)(Request(scope, receive))
        return response.status_code, bytes(response.body)

    return send
