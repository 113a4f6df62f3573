"""Sends a load to a server with OpenAI's API and records when each event arrives."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import httpx
import msgspec

from tandem.bench.clients.workloads import Conversation, Turn
from tandem.core.errors import ConfigError, PeerLostError
from tandem.core.loads.records import RequestRecord

__all__ = ["Endpoint", "LoadClient", "Target"]

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_ERROR_CHARS = 200
_MAX_OPENED = 512
"""Connections opened, and requests encoded, before a run starts; any beyond this are made during
the run.
"""
_OPEN_TIMEOUT_S = 10.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server under test, and what all requests to it share: endpoint, model, API key, time
    limit, sampling options and extra fields of the body.
    """

    base_url: str
    """The server's base URL, without ``/v1``."""
    model: str = ""
    """Model name in requests; if empty, the first model that the server lists."""
    endpoint: Endpoint = "completions"
    api_key: str = ""
    timeout_s: float = 600.0
    """Longest wait between two events of a stream, in seconds."""
    temperature: float = 0.0
    ignores_eos: bool = True
    """True if the model must not stop early: answers get exactly the load's lengths, as SGLang's
    and vLLM's clients ask for.
    """
    extra_body: dict[str, Any] = {}


class LoadClient:
    """Sends the requests of conversations to a target (a server), and records the answers. Used by
    one event loop.

    Args:
       target: the server.
       max_concurrency: most requests under way at once; None means no limit.
       on_done: called with the record of each request that ended.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.target = target
        self._most = max_concurrency
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._on_done = on_done
        self._tls = httpx.create_ssl_context(trust_env=False)
        try:
            self._first = self._make_client()
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError("bench.serve", f"{target.base_url}: {error}") from error
        self._clients = [self._first]
        self._free = [self._first]
        self._model = target.model
        self._start = 0.0

    def _make_client(self) -> httpx.AsyncClient:
        """Return an HTTP client with one connection, for one request at a time.

        With N connections in one client, each request that begins or ends takes time in N squared,
        as its pool compares all connections with all others: seconds of this process at a few
        hundred, which would count as the server's.
        """
        target = self.target
        return httpx.AsyncClient(
            base_url=target.base_url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            timeout=httpx.Timeout(target.timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
            verify=self._tls,
            # Proxy settings of the environment are ignored: a measurement must reach the server
            # directly.
            trust_env=False,
        )

    @contextlib.contextmanager
    def _take_client(self) -> Iterator[httpx.AsyncClient]:
        """Give a client that sends nothing else meanwhile: a free one, or a new one."""
        if self._free:
            client = self._free.pop()
        else:
            self._clients.append(client := self._make_client())
        # Not after a cancellation: the pool may count its connection as in use for ever.
        yield client
        self._free.append(client)

    async def close(self) -> None:
        """Close the connections."""
        async with contextlib.AsyncExitStack() as closing:
            # The rest is closed even if one fails.
            for client in self._clients:
                closing.push_async_callback(client.aclose)

    async def find_model(self) -> str:
        """Return the model that requests name: the target's, or else the first that the server
        lists.

        Raises: PeerLostError (the server does not answer); ConfigError (it lists no models).
        """
        if self._model:
            return self._model
        try:
            answer = await self._first.get("/v1/models")
            answer.raise_for_status()
            self._model = answer.json()["data"][0]["id"]
        except httpx.HTTPStatusError as error:
            what = f"{self.target.base_url}/v1/models answers {error.response.status_code}"
            raise ConfigError(
                "bench.serve", f"{what}: name the model, or give --api-key"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = (
                f"nobody answers at {self.target.base_url}: {error or type(error).__name__}: "
                "start a server, or name one by --base-url"
            )
            raise PeerLostError("bench.serve", what) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            what = f"{self.target.base_url}/v1/models lists no model: give --model"
            raise ConfigError("bench.serve", what) from error
        return self._model

    async def run(
        self, conversations: Sequence[Conversation], arrivals: Sequence[float]
    ) -> list[RequestRecord]:
        """Send all conversations; return a record (times, tokens, error) of every request, in order
        of the load.

        Args:
           conversations: those read from a trace have arrival times of their own.
           arrivals: seconds from now at which each conversation without an arrival time begins.

        Raises: the errors of ``find_model``. The failure of a single request is noted in its
            record.
        """
        await self.find_model()
        await self._open_connections(len(conversations))
        # The first requests are encoded before the clock starts: requests that begin together would
        # otherwise wait for each other's encoding.
        ready = [self._make_request(c.turns[0], c.history) for c in conversations[:_MAX_OPENED]]
        self._start = time.perf_counter()
        first = 0
        tasks: list[asyncio.Task[list[RequestRecord]]] = []
        async with asyncio.TaskGroup() as group:
            for number, (conversation, arrival) in enumerate(
                zip(conversations, arrivals, strict=True)
            ):
                due = arrival if conversation.arrival_s is None else conversation.arrival_s
                opening = ready[number] if number < len(ready) else None
                talk = self._talk(conversation, opening, number, first, due)
                tasks.append(group.create_task(talk))
                first += len(conversation.turns)
        return [record for task in tasks for record in task.result()]

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._start

    async def _open_connections(self, count: int) -> None:
        """Open as many connections as a run may need at once, so that no request waits for one."""
        if self._most is not None:
            count = min(count, self._most)
        count = min(count, _MAX_OPENED)

        async def open_one() -> None:
            # Ignore an HTTP error here: the run itself will report what is wrong with the server.
            with self._take_client() as client, contextlib.suppress(httpx.HTTPError):
                await client.get("/v1/models")

        with contextlib.suppress(TimeoutError):
            # A server that accepts fewer connections at a time keeps some requests waiting: the
            # run's figures show that, so this timeout is not an error.
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await asyncio.gather(*(open_one() for _ in range(count)))

    async def _talk(
        self,
        conversation: Conversation,
        opening: httpx.Request | None,
        number: int,
        first: int,
        due_s: float,
    ) -> list[RequestRecord]:
        await asyncio.sleep(max(due_s - self.now(), 0.0))
        records: list[RequestRecord] = []
        request = opening
        for i, turn in enumerate(conversation.turns):
            if i or request is None:
                request = self._make_request(turn, conversation.history)
            record = RequestRecord(
                index=first + i,
                conversation=number if len(conversation.turns) > 1 else -1,
                input_length=len(turn.prompt) if isinstance(turn.prompt, list) else 0,
                output_length=turn.output_length,
                due_s=due_s if i == 0 else self.now(),
            )
            records.append(record)
            if self._slots is None:
                await self._send(request, turn, conversation.history, record)
            else:
                async with self._slots:
                    await self._send(request, turn, conversation.history, record)
            if self._on_done is not None:
                self._on_done(record)
            if record.error:
                # The rest of a conversation is dropped after an error: its next turn would refer to
                # an answer that does not exist.
                break
        return records

    def _make_request(self, turn: Turn, history: list[dict[str, str]]) -> httpx.Request:
        """Return the encoded request of a turn (one message of a conversation) after its history:
        encoding long prompts takes time that must not be measured.
        """
        body = self._make_body(turn, history)
        return self._first.build_request("POST", PATHS[self.target.endpoint], json=body)

    def _make_body(self, turn: Turn, history: list[dict[str, str]]) -> dict[str, Any]:
        target = self.target
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": target.temperature,
        }
        if target.endpoint == "chat":
            text = turn.prompt
            if not isinstance(text, str):
                raise ConfigError("bench.serve", "this load has token ids: use completions")
            body["messages"] = [*history, {"role": "user", "content": text}]
            body["max_completion_tokens"] = turn.output_length
            # Older servers know `max_tokens` alone, so both names are sent.
            body["max_tokens"] = turn.output_length
        else:
            body["prompt"] = turn.prompt
            body["max_tokens"] = turn.output_length
        if target.ignores_eos:
            body["ignore_eos"] = True
        return body | target.extra_body

    async def _send(
        self,
        request: httpx.Request,
        turn: Turn,
        history: list[dict[str, str]],
        record: RequestRecord,
    ) -> None:
        record.sent_s = self.now()

        async def note_sending(event: str, _: object) -> None:
            # Requests that begin together wait for each other inside the HTTP library, so the time
            # of sending is noted when the headers are written.
            if event.endswith(".send_request_headers.started"):
                record.sent_s = self.now()

        request.extensions["trace"] = note_sending
        with self._take_client() as client:
            try:
                answer = await client.send(request, stream=True)
                try:
                    if answer.status_code != 200:
                        text = (await answer.aread()).decode(errors="replace")
                        record.error = f"{answer.status_code}: {text[:MAX_ERROR_CHARS]}"
                    else:
                        await self._read(answer, record)
                finally:
                    await answer.aclose()
            except httpx.HTTPError as error:
                record.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        record.done_s = self.now()
        if not record.error and self.target.endpoint == "chat" and isinstance(turn.prompt, str):
            history.append({"role": "user", "content": turn.prompt})
            history.append({"role": "assistant", "content": record.text})

    async def _read(self, answer: httpx.Response, record: RequestRecord) -> None:
        """Read the events of a streamed answer, and add their times and tokens to the record."""
        is_done, counted = False, None
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                is_done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                record.error = f"an event is not JSON: {data[:MAX_ERROR_CHARS]}"
                return
            if event.get("error"):
                record.error = f"in the stream: {str(event['error'])[:MAX_ERROR_CHARS]}"
                return
            usage = event.get("usage")
            if usage:
                counted = usage.get("completion_tokens")
                record.input_length = usage.get("prompt_tokens") or record.input_length
                details = usage.get("prompt_tokens_details") or {}
                record.cached_tokens = details.get("cached_tokens") or 0
            added = "".join(_read_text(choice) for choice in event.get("choices") or ())
            if added:
                record.event_times_s.append(self.now())
                record.text += added
        record.output_tokens = len(record.event_times_s) if counted is None else counted
        if not is_done:
            record.error = "the stream ended without [DONE]"


def _read_text(choice: dict[str, Any]) -> str:
    """Return all text of an event's ``choices`` entry, both of the answer and of the reasoning."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content"), delta.get("content"))
    return "".join(part for part in parts if part)
