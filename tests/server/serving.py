"""Real servers in threads, over the fake engine."""

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import requests
from fake_engine import FakeEngine, make_info

from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.app import build_app
from tandem.server.config import ServerConfig
from tandem.server.run import RunningServer, run_server

WAIT_S = 60.0
KEYS = ("secret", "other")
"""Of the server that clients share."""


class LiveServer:
    """A server on a port of its own; ``engine`` is what it serves."""

    def __init__(
        self,
        config: ServerConfig,
        engine: FakeEngine,
        tokenizer: Tokenizer,
        model: str = "tiny",
        folder: Path | None = None,
        **parts,
    ) -> None:
        self.engine = engine
        self.config = config
        self._info = engine.info
        self._parts = (tokenizer, model, folder, parts)
        self.app = self.make_app()
        self._started: Future[RunningServer] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self.running = self._started.result(WAIT_S)
        self.url = self.running.url

    def make_app(self):
        """Make what is served."""
        tokenizer, model, folder, parts = self._parts
        return build_app(self.config, self.engine, tokenizer, model, folder=folder, **parts)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await run_server(self.config, self.app, self._started.set_result)
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def renew(self) -> None:
        """Make the server as it was at its start, for the next of the tests that share it.

        A client has its answer, or leaves, a moment before its request ends: its end is awaited.
        """
        lifecycle, engine = self.app.state.context.lifecycle, self.engine
        wait_until(lambda: not (lifecycle.num_in_flight or engine.held or engine.num_waiting))
        engine.info = self._info
        engine.reset()

    def call_soon(self, callback) -> None:
        """Let the server's event loop call a function."""
        self._loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Begin to drain."""
        with contextlib.suppress(RuntimeError):
            self.call_soon(self.running.stop)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, path: str, json=None, **options) -> requests.Response:
        return requests.post(self.url + path, json=json, timeout=WAIT_S, **options)

    def get(self, path: str, **options) -> requests.Response:
        return requests.get(self.url + path, timeout=WAIT_S, **options)


class LiveServers:
    """Starts servers and sees them off."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._servers: list[LiveServer] = []

    def __enter__(self) -> "LiveServers":
        return self

    def start(
        self,
        engine: FakeEngine | None = None,
        *,
        model: str = "tiny",
        folder: Path | None = None,
        adapter_folder: Path | None = None,
        read_store=None,
        **settings,
    ) -> LiveServer:
        settings = {"port": 0, "drain_timeout_s": 0.5} | settings
        if engine is None:
            engine = FakeEngine(info=make_info(self._tokenizer.vocab_size))
        server = LiveServer(
            ServerConfig(**settings),
            engine,
            self._tokenizer,
            model,
            folder,
            adapter_folder=adapter_folder,
            read_store=read_store,
        )
        self._servers.append(server)
        return server

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stop()
        for server in self._servers:
            server.join()
            assert server.engine.num_held == 0, server.engine.held


class TalkingServer:
    """Has the fake engine of a server say texts, as models write them."""

    def __init__(self, server: LiveServer, tokenizer: Tokenizer) -> None:
        self.server = server
        self._tokenizer = tokenizer

    def __call__(self, text: str = "", **call) -> None:
        if call:
            text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        self.server.engine.answer = self._tokenizer.encode(text)

    def prompt(self) -> str:
        """Return the last prompt."""
        return self._tokenizer.decode(self.server.engine.requests[-1].prompt_ids)


def wait_until(condition, timeout_s: float = WAIT_S) -> None:
    """Poll a condition that another thread brings about."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, "the condition did not come about"
        time.sleep(0.001)
