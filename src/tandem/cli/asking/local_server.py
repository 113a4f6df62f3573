"""A local server that a command starts for itself: ``tandem chat`` and ``tandem generate``."""

import contextlib
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console

from tandem.bench.children import start_child
from tandem.cli.extras import require_serve
from tandem.core.config import child_environment
from tandem.core.errors import ConfigError, InternalError, PeerLostError
from tandem.models.loading.hub import resolve_folder

if TYPE_CHECKING:
    import httpx

__all__ = [
    "ADAPTER_NAME",
    "MODEL_HELP",
    "AdapterFlag",
    "ModelCard",
    "connect",
    "list_adapter_flags",
    "read_card",
    "trim_url",
]

ADAPTER_NAME = "adapter"
"""Name of the one LoRA adapter on a local server."""

MODEL_HELP = (
    "Folder, GGUF file, hub id, `smollm2` or `demo`; with --url a model that the server lists."
)

AdapterFlag = Annotated[
    Path | None, typer.Option(help="Folder of a LoRA adapter, for our own server.")
]

START_TIMEOUT_S = 1800.0
"""Time limit in seconds of the server's start; reading a large model from a slow disk takes
less."""
STOP_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 3600.0
"""Seconds without output after which a request fails; a long prompt on a slow machine takes a while
before its first token."""


def list_adapter_flags(adapter: Path, url: str | None) -> list[str]:
    """Return the flags that make a local server serve an adapter as ``ADAPTER_NAME``.

    Raises: ConfigError (``url`` names a running server, which has adapters of its own).
    """
    if url is not None:
        what = "--url and --adapter: ask a running server for its adapter by name: give one of both"
        raise ConfigError("cli.connect", what, field="adapter")
    return ["--adapter", f"{ADAPTER_NAME}={adapter}"]


@contextlib.contextmanager
def connect(
    model: str | None, url: str | None, api_key: str | None, server_flags: list[str]
) -> Iterator[tuple["httpx.Client", str]]:
    """Give a client of the server at ``url``, or of a local server started now, and the model's
    name.

    A started server listens on loopback, asks for a key made for this run, and ends with the
    context. The name is ``model``; without it, the demo model or the first that the server at
    ``url`` lists.

    Raises: InternalError (the server does not start; with its last lines); PeerLostError (no server
        at ``url``); ConfigError (malformed address or key); NotFoundError (no such model);
        UnsupportedError (missing packages).
    """
    if url is not None:
        with _open_client(trim_url(url), api_key) as client:
            yield client, _find_first_model(client) if model is None else model
        return
    require_serve()
    model = "demo" if model is None else model
    resolve_folder(model)
    key = secrets.token_urlsafe(24)
    process = start_child(
        [sys.executable, "-P", "-m", "tandem", "serve", model, "--port", "0", *server_flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The key is passed in the environment, which only the process's owner can read; command
        # lines are visible to every user.
        env=child_environment({"TANDEM_SERVER__API_KEY": key}),
        # The server has its own session, so that Ctrl-C in a terminal stops an answer, not the
        # server. This process ends the server, and the kernel does if this process is killed.
        start_new_session=True,
        end_signal=signal.SIGTERM,
    )
    try:
        with _open_client(_wait_for_url(process), key) as client:
            yield client, _find_first_model(client)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def trim_url(url: str) -> str:
    """Return the address of a server without ``/v1`` at its end, which OpenAI's clients need.

    An address without a scheme is one of http.

    Raises: ConfigError (not the address of an HTTP server).
    """
    url = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # Reading ``port`` raises ValueError if the port is not a number.
    except ValueError as error:
        what = f"--url {url!r}: {error}: give http://HOST:PORT"
        raise ConfigError("cli.connect", what, field="url") from error
    if not is_whole:
        what = f"--url {url!r} is no address of a server: give http://HOST:PORT"
        raise ConfigError("cli.connect", what, field="url")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _find_first_model(client: "httpx.Client") -> str:
    """Return the name of the first model that a server lists; empty if it lists none.

    Raises: PeerLostError (nobody answers).
    """
    import httpx

    try:
        reply = client.get("/v1/models")
        return msgspec.json.decode(reply.content)["data"][0]["id"]
    except httpx.HTTPError as error:
        what = f"no answer from {client.base_url}: {error}: does a server run there?"
        raise PeerLostError("cli.connect", what) from error
    except (msgspec.DecodeError, UnicodeError, LookupError, TypeError):
        # The reply is not a list of models; the server's error for the first request will tell why.
        return ""


def read_card(client: "httpx.Client", model: str | None) -> "ModelCard":
    """Return what a server tells whoever begins to chat with a model; an empty card if it tells
    nothing.

    Args:
        client: a client of ``connect``.
        model: name of the model; None: the server's own choice, of which nothing is told.
    """
    import httpx

    if model is None:
        return ModelCard()
    try:
        cards = msgspec.json.decode(client.get("/v1/models").content, type=_Cards).data
    except (httpx.HTTPError, msgspec.MsgspecError, UnicodeError):
        # Whatever is wrong with the server, the first question tells it.
        return ModelCard()
    return next((card for card in cards if card.id == model), ModelCard())


class ModelCard(msgspec.Struct):
    """The fields of a server's model that are read here."""

    id: str = ""
    note: str = ""
    """A sentence for whoever begins to chat; empty: none."""
    default_sampling: dict[str, float] = {}
    """The server's values of fields that a chat leaves out."""


class _Cards(msgspec.Struct):
    """A server's list of models."""

    data: list[ModelCard] = []


def _open_client(url: str, key: str | None) -> "httpx.Client":
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
    except httpx.InvalidURL as error:
        what = f"--url {url!r}: {error}: give http://host:port"
        raise ConfigError("cli.connect", what, field="url") from error
    except UnicodeError as error:
        what = "--api-key has characters outside ASCII, which no header carries"
        raise ConfigError("cli.connect", what, field="api_key") from error


def _wait_for_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    lines: queue.Queue[str] = queue.Queue()
    tail: list[str] = []
    threading.Thread(target=_pump, args=(process.stdout, lines.put), daemon=True).start()
    threading.Thread(target=_pump, args=(process.stderr, tail.append), daemon=True).start()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Console(stderr=True).status("loading the model"):
        while time.monotonic() < deadline_s:
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                if process.poll() is not None:
                    break
                continue
            if match := re.search(r"https?://\S+", line):
                return match.group(0)
    raise InternalError("cli.start_server", f"the server did not start: {_find_reason(tail)}")


def _find_reason(lines: list[str]) -> str:
    """Return the error that ended a server, or its last lines if it names none."""
    for number, line in enumerate(lines):
        if line.startswith("tandem: "):
            return "".join([line.removeprefix("tandem: "), *lines[number + 1 :]]).strip()
    return "its last lines are\n" + "".join(lines[-15:])


def _pump(stream: IO[str], put: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            put(line)
