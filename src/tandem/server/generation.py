"""Generations while they run: engine outputs become text, and stop strings end it.

A ``Generation`` is one choice. A ``GenerationGroup`` owns all choices of one HTTP request; its
owner closes it on every path, which cancels choices that still run. All on the event loop, without
locks.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from tandem.core.errors import DeadlineError, PeerLostError, TandemError, make_error
from tandem.core.wire import (
    AddRequest,
    FinishReason,
    PromptLogprobs,
    RequestOutput,
    TokenLogprob,
)
from tandem.models.tokenizing.detokenizer import Detokenizer
from tandem.server.engine import EngineClient, RequestStream
from tandem.server.outputs.deltas import Delta, OutputParser, TextDelta, join_deltas
from tandem.server.telemetry.metrics import RequestTimer
from tandem.server.text.stop_strings import StopMatcher

__all__ = [
    "Generation",
    "GenerationGroup",
    "LiveGenerations",
    "Piece",
    "measure_prompt_logprobs",
]

_logger = logging.getLogger(__name__)

_DEADLINE_GRACE_S = 0.1
"""Seconds after a request's deadline at which the server ends it. Normally the engine ends it at
the deadline, between two steps; this is for long steps."""

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class Piece(NamedTuple):
    """New output of a generation, to be sent to its client. The last piece has a ``finish_reason``.

    The generation may have progressed further when the piece is sent.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None
    num_tokens: int
    """Number of generated tokens from the start of the generation to the end of this piece."""
    deltas: Sequence[Delta]
    """Parts of the text (answer, reasoning, tool calls) that this piece adds and later output
    cannot change; without a parser, all text is answer.
    """

    @property
    def size_bytes(self) -> int:
        """Estimated bytes that the piece takes in an encoded answer."""
        ids = _TOKEN_BYTES * len(self.token_ids)
        return len(self.text) + ids + _measure_logprobs(self.logprobs)


_TOKEN_BYTES, _LOGPROB_BYTES = 8, 64
"""Estimated size in bytes, in an answer, of a token id and of a token with its log-probability."""


def _measure_logprobs(entries: Sequence[TokenLogprob]) -> int:
    """Return the estimated bytes of log-probabilities in an answer, likeliest tokens included."""
    if not entries:
        return 0
    return _LOGPROB_BYTES * len(entries) * (1 + len(entries[-1].top))


def measure_prompt_logprobs(packed: PromptLogprobs | None) -> int:
    """Return the estimated bytes of a prompt's log-probabilities in an answer."""
    return 0 if packed is None else _LOGPROB_BYTES * packed.num_tokens * (1 + packed.num_top)


class Generation:
    """One choice of a request: its stream of outputs, its text so far and its counts.

    Args:
        index: index among the choices of the request.
        request: request to submit.
        detokenizer: new detokenizer; owned.
        matcher: new matcher of stop strings; owned. None if there are none.
        parser: new parser of the text's parts; owned. None if the text is not split.
        keep_stop_token: True if the text of the stop token belongs to the answer.
    """

    def __init__(
        self,
        index: int,
        request: AddRequest,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        timer: RequestTimer,
        *,
        parser: OutputParser | None = None,
        keep_stop_token: bool = False,
    ) -> None:
        self.index = index
        self.request = request
        self.prompt_len = len(request.prompt_ids)
        self.cached_len = 0
        self.num_tokens = 0
        """Number of tokens that the engine generated, the stop token included."""
        self.prompt_logprobs: PromptLogprobs | None = None
        self.pooled: bytes | None = None
        """Vector of the prompt if an embedding or a score was asked for: float32, little-endian;
        None: none.
        """
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        """The request's stop string or stop token id that ended the text; None if the model ended
        it by its own end token, or a limit did.
        """
        self.stop_token_id: int | None = None
        """Id of the token that ended the text: a stop id of the request or the model's own end
        token; None: no token ended it.
        """
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._parser = parser
        self.timer = timer
        self._keep_stop_token = keep_stop_token
        self._submitting: asyncio.Future[RequestStream] | None = None
        self._stream: RequestStream | None = None
        self._pending_text = ""
        """Text that the output parser has read and that was not yet sent in a piece."""
        self._pending: list[TokenLogprob] = []
        self._pending_ids: list[int] = []
        self._is_aborted = False
        self._is_closed = False
        self._is_done = False
        """True if the engine has sent the last output, so that there is nothing to cancel."""
        self._error_reason = ""

    async def submit(self, engine: EngineClient) -> None:
        """Queue the request at the engine; raises the errors of ``EngineClient.submit``.

        It may wait long while every instance is down; ``abort`` ends the wait without an error.
        """
        self._submitting = asyncio.ensure_future(engine.submit(self.request))
        try:
            self._stream = await self._submitting
        except asyncio.CancelledError:
            submitting = self._submitting
            if submitting.done() and not submitting.cancelled() and not submitting.exception():
                # The engine accepted the request in the same turn of the loop that cancelled this
                # task: the stream is kept for ``close`` to cancel.
                self._stream = submitting.result()
            task = asyncio.current_task()
            if not self._is_aborted or (task is not None and task.cancelling()):
                raise
        if self._is_aborted and self._stream is not None:
            await self._stream.cancel()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of output until the end; a stop string cancels the rest at the engine.

        An output whose text is held back yields nothing; its tokens come with the next piece.

        Raises:
            DeadlineError: the request's time limit has passed.
            TandemError: the engine failed; the class is that of its error code.
        """
        if self._stream is None:
            assert self._is_aborted, "submit() comes first"
            self._is_done = True
            self.finish_reason = "abort"
            await self.close()
            yield self._make_piece("")
            return
        async for output in self._stream:
            if output.token_ids:
                self.timer.see_output(output.queue_s)
            self._is_done = output.finish_reason is not None
            piece = self._advance(output)
            if self.finish_reason is not None:
                await self.close()
            if piece is not None:
                yield piece
            if self.finish_reason is not None:
                return
        if not self._is_aborted:
            raise PeerLostError("server.generate", "the engine ended the request without a word")
        self._is_done = True
        self.finish_reason = "abort"
        yield self._make_piece(self._match_stop(self._detokenizer.flush()))

    def _advance(self, output: RequestOutput) -> Piece | None:
        if output.prompt_len:
            self.prompt_len, self.cached_len = output.prompt_len, output.cached_len
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE):
            self._error_reason = str(output.finish_reason)
            raise _failure(output)
        if output.pooled is not None:
            self.pooled = output.pooled
        self._pending_ids += output.token_ids
        if output.logprobs is not None:
            self._pending += output.logprobs
        self.num_tokens += len(output.token_ids)
        text = self._detokenizer.feed(output.token_ids)
        if output.stop_token_id is not None:
            self.num_tokens += 1
            self.stop_token_id = output.stop_token_id
            self._pending_ids.append(output.stop_token_id)
            if output.stop_token_id in self.request.sampling.stop_token_ids:
                self.stop_reason = output.stop_token_id
                if self._keep_stop_token:
                    text += self._detokenizer.feed([output.stop_token_id])
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
            self.finish_reason = _FINISH[output.finish_reason]
        piece = self._make_piece(self._match_stop(text))
        if piece.deltas or piece.finish_reason is not None:
            return piece
        # Text may be held back because it may begin a stop string or a character: its tokens are
        # sent with the next piece.
        self._pending_text = piece.text
        self._pending_ids, self._pending = [*piece.token_ids], [*piece.logprobs]
        return None

    def _match_stop(self, text: str) -> str:
        matcher = self._matcher
        # A stop string does not end the text before min_tokens tokens are generated, as with stop
        # token ids.
        if matcher is None or self.num_tokens <= self.request.sampling.min_tokens:
            return text
        text = matcher.feed(text)
        if matcher.matched is not None:
            self.finish_reason, self.stop_reason = "stop", matcher.matched
        elif self.finish_reason is not None:
            text += matcher.flush()
        return text

    def _make_piece(self, text: str) -> Piece:
        deltas: list[Delta] = [TextDelta(text)] if text else []
        if self._parser is not None:
            deltas = self._parser.feed(text)
            if self.finish_reason is not None:
                is_cut = self.finish_reason != "stop" or isinstance(self.stop_reason, str)
                deltas = join_deltas(deltas + self._parser.flush(is_cut=is_cut))
        piece = Piece(
            self._pending_text + text,
            self._pending_ids,
            self._pending,
            self.finish_reason,
            self.num_tokens,
            deltas,
        )
        self._pending_text, self._pending_ids, self._pending = "", [], []
        return piece

    async def abort(self) -> None:
        """End the generation on demand; its client gets the finish reason "abort"."""
        self._is_aborted = True
        if self._stream is not None:
            await self._stream.cancel()
        elif self._submitting is not None:
            self._submitting.cancel()

    async def close(self) -> None:
        """Cancel the request at the engine, if it still runs, and count its end. Idempotent."""
        if self._is_closed or (self._stream is None and not self._is_aborted):
            return
        self._is_closed = True
        reason = "abort" if self.finish_reason is None else self.finish_reason
        self.timer.see_end(self._error_reason or reason, self.prompt_len, self.num_tokens)
        if self._is_done or self._stream is None:
            return
        try:
            await self._stream.cancel()
        except TandemError as error:
            # An instance that is lost has lost its requests too: there is nothing left to cancel.
            _logger.debug("event=cancel_failed request_id=%s error=%s", self.request_id, error)

    @property
    def was_accepted(self) -> bool:
        """True if the engine has accepted the request."""
        return self._stream is not None

    @property
    def request_id(self) -> str:
        """The id that this choice's request has at the engine."""
        return self.request.request_id


def _failure(output: RequestOutput) -> TandemError:
    if output.finish_reason == FinishReason.DEADLINE:
        return DeadlineError("server.generate", "the request took longer than its time limit")
    code = output.error_code if output.error_code is not None else "internal"
    text = output.error_text if output.error_text is not None else "the engine failed"
    return make_error(code, "server.generate", text)


class LiveGenerations(Protocol):
    """The running requests, each a group of generations, by the client's name of the request."""

    def add(self, name: str, group: "GenerationGroup") -> None:
        """Add a request's group of generations under the client's name for the request."""
        ...

    def remove(self, name: str, group: "GenerationGroup") -> None:
        """Remove a request's group of generations, which has ended."""
        ...


class GenerationGroup:
    """All generations (choices) of one client's request, which run at the same time.

    Args:
        name: the client's id of the request, or the server's.
        generations: the choices; owned. ``submit`` submits them.
        time_limit_s: time limit that the engine was given; the server gives up a little later.
        on_closed: called once, when all choices have ended.
        owner: digest of the key that sent the request; empty if the server needs no keys.
    """

    def __init__(
        self,
        name: str,
        generations: Sequence[Generation],
        live: LiveGenerations,
        time_limit_s: float,
        on_closed: Callable[[], None] | None = None,
        owner: bytes = b"",
    ) -> None:
        self.name = name
        self.owner = owner
        self.generations = generations
        self._live = live
        self.time_limit_s = time_limit_s + _DEADLINE_GRACE_S
        self._pumps: list[asyncio.Task[None]] = []
        self._on_closed = on_closed

    async def submit(self, engine: EngineClient) -> None:
        """Queue all choices at the engine or none: if one is refused, the others are cancelled."""
        self._live.add(self.name, self)
        submissions = [generation.submit(engine) for generation in self.generations]
        try:
            # All choices are submitted at once, since each submission is a round trip; the engine
            # still receives them in order.
            results = await asyncio.gather(*submissions, return_exceptions=True)
        except asyncio.CancelledError:
            await self.close()
            raise
        failure = next((result for result in results if result is not None), None)
        if failure is not None:
            await self.close()
            raise failure

    async def pieces(self) -> AsyncGenerator[tuple[Generation, Piece], None]:
        """Yield the pieces (new outputs) of all choices as they come; raises the errors of
        ``Generation.pieces``.
        """
        if len(self.generations) > 1:
            async for generation, piece in self._merged():
                yield generation, piece
            return
        only = self.generations[0]
        async for piece in only.pieces():
            yield only, piece

    async def _merged(self) -> AsyncGenerator[tuple[Generation, Piece], None]:
        # The queue has no limit of its own: it never holds more than the tokens that the choices
        # may generate.
        queue: asyncio.Queue[tuple[Generation, Piece | Exception]] = asyncio.Queue()

        async def pump(generation: Generation) -> None:
            try:
                async for piece in generation.pieces():
                    queue.put_nowait((generation, piece))
            except Exception as error:  # noqa: BLE001 - handed over, raised by the consumer.
                queue.put_nowait((generation, error))

        self._pumps = [asyncio.create_task(pump(g)) for g in self.generations]
        num_running = len(self.generations)
        while num_running:
            generation, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            yield generation, piece
            num_running -= piece.finish_reason is not None

    async def abort(self) -> None:
        """End all choices that still run; the client gets the finish reason "abort"."""
        for generation in self.generations:
            if generation.finish_reason is None:
                await generation.abort()

    async def close(self) -> None:
        """Cancel choices that still run, and remove the group from the running requests.
        Idempotent.
        """
        self._live.remove(self.name, self)
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.gather(*(generation.close() for generation in self.generations))
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()
