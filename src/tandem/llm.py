"""``LLM``: a model in a Python program, served by the parts that `tandem serve` puts together.

A request takes the path of ``/v1/completions`` or ``/v1/chat/completions`` without HTTP: the same
fields, the same checks, the same generations. One thread runs the event loop; every method may be
called from any thread.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from tandem.cli.composition import check_model, compose
from tandem.cli.config import Config, load_config
from tandem.cli.extras import require_serve
from tandem.core.config import list_fields
from tandem.core.errors import ConfigError, PeerLostError
from tandem.core.logs import current_request_id
from tandem.core.loop_calls import LoopThread
from tandem.core.wire import TokenLogprob
from tandem.engine.process.fork_server import ForkServer
from tandem.server.context import ServerContext
from tandem.server.defaults import DefaultSampling
from tandem.server.dialects.chat import plan_chat
from tandem.server.dialects.completions import plan_completion
from tandem.server.dialects.dialect import Task
from tandem.server.dialects.options import REFUSED_FIELDS
from tandem.server.edge.connection import limit_time
from tandem.server.generation import GenerationGroup
from tandem.server.protocol.decode import decode_body, refuse_unsupported
from tandem.server.protocol.openai import ChatRequest, CompletionRequest
from tandem.server.telemetry.timelines import Origin

__all__ = ["LLM", "Delta", "Output"]

T = TypeVar("T")

_completions = msgspec.json.Decoder(CompletionRequest)
_chats = msgspec.json.Decoder(ChatRequest)


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of new text of one answer; an answer's last piece has a ``finish_reason``."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None


class Output(msgspec.Struct, kw_only=True):
    """An answer.

    Attributes:
        index: number of the answer; the answers to one prompt have consecutive numbers.
        text: generated text, without the stop string.
        token_ids: generated tokens, a stop token included.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or id of the request that ended the answer.
        logprobs: log-probabilities of the tokens; empty unless asked for.
        prompt_tokens: number of tokens of the prompt.
        completion_tokens: number of generated tokens.
        cached_tokens: number of the prompt's tokens that were cached and not computed again.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class _Opened:
    """The models of this process that are open, which it closes when it ends.

    A thread waits for the main thread and for all others that Python waits for at its end, and then
    closes them. ``atexit`` would be too late: since 3.12 no thread starts there, and the pools that
    serve a request have ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: set[LLM] = set()
        self._closer: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def add(self, model: "LLM") -> None:
        with self._lock:
            self._models.add(model)
            if self._closer is None:
                self._closer = threading.Thread(target=self._close, name="llm-closer")
                self._closer.start()

    def discard(self, model: "LLM") -> None:
        with self._lock:
            self._models.discard(model)

    def _close(self) -> None:
        threading.main_thread().join()
        own = threading.current_thread()
        for thread in threading.enumerate():
            if thread is not own and not thread.daemon:
                thread.join()
        with self._lock:
            models = list(self._models)
        for model in models:
            model.close()

    def _forget(self) -> None:
        # A forked process has neither the loop's thread nor the instances: a call would wait for
        # ever.
        for model in self._models:
            model._is_closed = True
        self._lock, self._models, self._closer = threading.Lock(), set(), None


class LLM:
    """A model with instances of its own that serve it. A context manager; ``close`` ends the
    instances, as does the end of the program's threads; handlers of ``atexit`` find it closed.

    Args:
        model: a folder, GGUF file, hub id or `demo`.
        config: YAML file of settings.
        settings: settings by their last name (``max_model_len=2048``), or by section and name if
            several sections have it (``store__secret=...``).

    Raises: ConfigError (a setting is unknown or not valid); PeerLostError (an instance cannot
        start); the errors of loading the model.
    """

    def __init__(self, model: str, *, config: Path | None = None, **settings: Any) -> None:
        require_serve()
        self._settings = load_config(config, _find_settings(settings), model=model).config
        self._closing = threading.Lock()
        """Lock that is held while the model's instances are being ended."""
        self._submitting = threading.Lock()
        """Lock of ``_is_closed`` and ``_pending``: a call either is among the pending ones when the
        model is closed, or finds it closed.
        """
        self._is_closed = False
        self._pending: set[concurrent.futures.Future[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        """Calls that have begun and not ended; used on the loop's thread only."""
        self._streams: set[AsyncGenerator[Delta, None]] = set()
        """Answers that are being read; closed before the engine, each by one caller."""
        self._opened = contextlib.AsyncExitStack()
        self._thread = LoopThread("llm")
        _opened.add(self)
        try:
            self._context = self._call(self._open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """End the instances; requests in flight raise PeerLostError. Idempotent."""
        with self._closing:
            with self._submitting:
                if self._is_closed:
                    return
                self._is_closed = True
                pending = list(self._pending)
            for future in pending:
                future.cancel()
            self._thread.run(self._close())
            self._thread.close()
        _opened.discard(self)

    def generate(self, prompts: str | Sequence[Any], **sampling: Any) -> list[Output]:
        """Generate a continuation of each prompt, all at the same time; return when all are
        complete.

        Args:
            prompts: a text, token ids, or a list of either.
            sampling: fields of ``/v1/completions``.

        Raises: the errors of a server's answer: ConfigError (a prompt or a field is not valid);
            CapacityError (the queue is full); DeadlineError (the time limit has passed);
            PeerLostError (the instance is down).
        """
        return self._call(self._answer(_read_completion(prompts, sampling)))

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> list[Output]:
        """Answer a conversation; ``sampling`` are fields of ``/v1/chat/completions``."""
        return self._call(self._answer(_read_chat(messages, sampling)))

    def stream(self, prompts: str | Sequence[Any], **sampling: Any) -> Iterator[Delta]:
        """Yield the text of ``generate``'s answers piece by piece, as it is generated. Closing the
        iterator cancels the rest.
        """
        deltas = self._deltas(_read_completion(prompts, sampling))
        self._streams.add(deltas)
        try:
            while (delta := self._call(_next(deltas))) is not None:
                yield delta
        finally:
            if not self._is_closed:
                self._call(self._end_stream(deltas))

    async def agenerate(self, prompts: str | Sequence[Any], **sampling: Any) -> list[Output]:
        """Do the same as ``generate``, without blocking the event loop."""
        return await self._await(self._answer(_read_completion(prompts, sampling)))

    async def achat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> list[Output]:
        """Do the same as ``chat``, without blocking the event loop."""
        return await self._await(self._answer(_read_chat(messages, sampling)))

    async def astream(self, prompts: str | Sequence[Any], **sampling: Any) -> AsyncIterator[Delta]:
        """Do the same as ``stream``, without blocking the event loop."""
        deltas = self._deltas(_read_completion(prompts, sampling))
        self._streams.add(deltas)
        try:
            while (delta := await self._await(_next(deltas))) is not None:
                yield delta
        finally:
            if not self._is_closed:
                await self._await(self._end_stream(deltas))

    async def _open(self) -> ServerContext:
        fork_server = await self._opened.enter_async_context(ForkServer())
        model = check_model(self._settings)
        composing = compose(
            self._settings, model, fork_server, log_level="warning", log_format="text"
        )
        engine, app = await self._opened.enter_async_context(composing)
        await self._opened.enter_async_context(app.router.lifespan_context(app))
        await engine.wait_ready()
        self._app = app
        context: ServerContext = app.state.context
        # Programs work on samples and their probabilities, which no server's habits may narrow.
        own = context.defaults.own
        context.defaults = DefaultSampling(own, own, own)
        return context

    async def _close(self) -> None:
        # Running calls are awaited before the engine closes, so that their requests are cancelled
        # while the instances still listen.
        own = asyncio.current_task()
        calls = [task for task in self._calls if task is not own]
        await asyncio.gather(*calls, return_exceptions=True)
        for deltas in list(self._streams):
            await self._end_stream(deltas)
        await self._opened.aclose()

    async def _end_stream(self, deltas: AsyncGenerator[Delta, None]) -> None:
        self._streams.discard(deltas)
        await deltas.aclose()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the loop's thread; return its future. Raises: PeerLostError (the
        model is closed).
        """

        async def run() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await work
            finally:
                self._calls.discard(task)

        with self._submitting:
            if self._is_closed:
                work.close()
                raise PeerLostError("llm.call", "the model is closed: make another LLM")
            future = self._thread.submit(run())
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "concurrent.futures.Future[Any]") -> None:
        with self._submitting:
            self._pending.discard(future)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise PeerLostError("llm.call", "the model was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(work))
        except asyncio.CancelledError:
            if self._is_closed:
                raise PeerLostError("llm.call", "the model was closed meanwhile") from None
            raise

    @contextlib.asynccontextmanager
    async def _start(
        self, request: CompletionRequest | ChatRequest
    ) -> AsyncIterator[GenerationGroup]:
        context, name = self._context, uuid.uuid4().hex
        now_s, unix_s = context.clock.now_s(), datetime.now(UTC).timestamp()
        origin = Origin(now_s, unix_s, b"", name, "", "")
        current_request_id.set(name)

        def plan() -> Task:
            if isinstance(request, ChatRequest):
                return plan_chat(context, request)
            return plan_completion(context, request)

        task = await context.encoder.threads.run(plan, 0)
        group = await context.start(task.plans, task.options, origin, _never_gone)
        try:
            yield group
        finally:
            await group.close()

    async def _answer(self, request: CompletionRequest | ChatRequest) -> list[Output]:
        async with self._start(request) as group:
            outputs = [
                Output(index=each.index, token_ids=[], logprobs=[]) for each in group.generations
            ]
            async with limit_time(group.time_limit_s):
                async for generation, piece in group.pieces():
                    output = outputs[generation.index]
                    output.text += piece.text
                    output.token_ids += piece.token_ids
                    output.logprobs += piece.logprobs
            for output, each in zip(outputs, group.generations, strict=True):
                output.finish_reason, output.stop_reason = each.finish_reason, each.stop_reason
                output.prompt_tokens, output.completion_tokens = each.prompt_len, each.num_tokens
                output.cached_tokens = each.cached_len
            return outputs

    async def _deltas(
        self, request: CompletionRequest | ChatRequest
    ) -> AsyncGenerator[Delta, None]:
        async with self._start(request) as group:
            async for generation, piece in group.pieces():
                yield Delta(
                    index=generation.index,
                    text=piece.text,
                    token_ids=list(piece.token_ids),
                    logprobs=list(piece.logprobs),
                    finish_reason=piece.finish_reason,
                )


_opened = _Opened()


async def _never_gone() -> Any:
    """Wait for ever: stands for the wait until a client closes its connection, as there is no
    client here.
    """
    await asyncio.get_running_loop().create_future()


async def _next(deltas: Any) -> Delta | None:
    return await anext(deltas, None)


def _read_completion(prompts: Any, sampling: Mapping[str, Any]) -> CompletionRequest:
    body = msgspec.json.encode({**sampling, "prompt": prompts})
    request = decode_body(body, _completions)
    refuse_unsupported(body, REFUSED_FIELDS)
    return request


def _read_chat(messages: Any, sampling: Mapping[str, Any]) -> ChatRequest:
    body = msgspec.json.encode({**sampling, "messages": messages})
    request = decode_body(body, _chats)
    refuse_unsupported(body, REFUSED_FIELDS)
    return request


def _find_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the flag parameters of ``load_config``.

    Raises: ConfigError (no setting, or several, have the name).
    """
    paths = [field.path for field in list_fields(Config)]
    found: dict[str, Any] = {}
    for name, value in given.items():
        dotted = name.replace("__", ".")
        matching = [path for path in paths if path == dotted or path.endswith(f".{name}")]
        if len(matching) != 1:
            why = f"is one of {', '.join(matching)}" if matching else "is no setting"
            raise ConfigError(
                "llm.settings", f"{name} {why}: give section__name, as cluster__prefill", field=name
            )
        text = str(value).lower() if isinstance(value, bool) else value
        found[matching[0].replace(".", "__")] = text if isinstance(text, list) else str(text)
    return found
