"""Serving the application until a signal drains it.

uvicorn owns the sockets. This module owns the reaction to SIGTERM and SIGINT: the port stays open
and answers 503, running requests finish, then everything closes and ``run_server`` returns. A
second signal ends the wait.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from tandem.core.descriptors import count_reserve
from tandem.core.errors import ConfigError
from tandem.server.config import ServerConfig
from tandem.server.context import ServerContext
from tandem.server.edge.bounded_connection import make_connection_class

__all__ = ["RunningServer", "open_listener", "run_server"]

_logger = logging.getLogger(__name__)

_ACCEPT_SHARE = 8
"""Part of the reserve of descriptors that the event loop may accept at a time: it calls a
connection some turns after it has accepted it, and closes another one for it a turn later."""
_MAX_PENDING = 2048
"""Number of connections that the system keeps until they are accepted."""
_CLOSE_TIMEOUT_S = 2
"""Seconds for connections to send their last bytes after all requests have ended."""
_IDLE_CONNECTION_S = 75
"""Seconds after which an idle connection is closed. It is longer than common proxies', so that a
proxy's next request does not meet a connection that is just closing."""


ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a name, nothing is bound
"""A client's address for each that stands for all of this machine's."""


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would exit by the signal instead of
    by 0.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class RunningServer:
    """A server that listens; given to ``on_started``. To be used on its event loop only."""

    def __init__(self, server: uvicorn.Server, context: ServerContext, url: str, port: int) -> None:
        self.url = url
        self.port = port
        self.is_interrupted = False
        """True if Ctrl-C, and not another signal, made the server end."""
        self._server = server
        self._context = context
        self._drain: asyncio.Task[None] | None = None
        self._abort: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Begin to drain; a second call ends the wait for running requests."""
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
            return
        _logger.warning("event=stop_forced in_flight=%d", self._context.lifecycle.num_in_flight)
        # uvicorn's own forced exit is not used: it skips the lifespan's end and logs a traceback.
        if self._abort is None:
            self._abort = asyncio.get_running_loop().create_task(self._abort_and_exit())

    def interrupt(self) -> None:
        """Call ``stop``, and record that Ctrl-C was the cause."""
        self.is_interrupted = self.is_interrupted or self._drain is None
        self.stop()

    async def _abort_and_exit(self) -> None:
        await self._context.lifecycle.abort(None)
        self._server.should_exit = True

    async def _drain_and_exit(self) -> None:
        await self._context.lifecycle.drain(self._context.config.drain_timeout_s)
        self._server.should_exit = True


async def run_server(
    config: ServerConfig,
    app: Starlette,
    on_started: Callable[[RunningServer], None] | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or ``RunningServer.stop``; return when drained.

    If it is cancelled, it closes the port and shuts down the application without waiting for
    requests.

    Args:
        config: settings, as for ``build_app``.
        app: application of ``build_app``.
        on_started: called on the event loop once the port is open.
        listener: socket from ``open_listener``, which is closed here; None: opened here.

    Raises:
        ConfigError: the address cannot be bound, or the certificate cannot be read.
    """
    listener = open_listener(config) if listener is None else listener
    try:
        tls = _load_tls(config)
    except OSError as error:  # ssl.SSLError is a subclass of OSError.
        listener.close()
        what = f"cannot use {config.ssl_certfile} with {config.ssl_keyfile}: {error}"
        raise ConfigError("server.run", what, field="server.ssl_certfile") from error
    settings = uvicorn.Config(
        app,
        http=make_connection_class(config.head_timeout_s, config.send_timeout_s, tls),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=max(count_reserve() // _ACCEPT_SHARE, 1),
        # X-Forwarded-For is ignored: with it any client could choose the address in the log.
        proxy_headers=False,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    server = _Server(settings)
    port = listener.getsockname()[1]
    scheme = "http" if tls is None else "https"
    # An address that stands for all of this machine's is none that a client can ask.
    host = ALL_ADDRESSES.get(config.host, config.host)
    host = f"[{host}]" if ":" in host else host
    running = RunningServer(server, app.state.context, f"{scheme}://{host}:{port}", port)
    watcher = asyncio.create_task(_announce(server, running, listener, on_started))
    try:
        with _signals(running):
            await _serve_to_the_end(server, listener)
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        # Connections that are still open have clients that do not read, or that do not close TLS:
        # they are aborted.
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        listener.close()
        app.state.context.close()


def _load_tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return tls


async def _serve_to_the_end(server: uvicorn.Server, listener: socket.socket) -> None:
    # A cancelled uvicorn leaves its lifespan's task behind, which asyncio cancels at the end of the
    # loop with a traceback in the log. So uvicorn is told to exit, and then the cancellation is
    # passed on.
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


async def _announce(
    server: uvicorn.Server,
    running: RunningServer,
    listener: socket.socket,
    on_started: Callable[[RunningServer], None] | None,
) -> None:
    # uvicorn has no event for "started", so the flag is polled; startup takes milliseconds.
    while not server.started:
        await asyncio.sleep(0.005)
    # `backlog` is both how many asyncio accepts at a time and how many the system keeps: the latter
    # may be more, so that clients that come together need not try again.
    listener.listen(_MAX_PENDING)
    _logger.info("event=listening url=%s", running.url)
    if on_started is not None:
        on_started(running)


@contextlib.contextmanager
def _signals(running: RunningServer) -> Iterator[None]:
    """Make SIGTERM and SIGINT stop the server while the block runs.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    loop.add_signal_handler(signal.SIGTERM, running.stop)
    loop.add_signal_handler(signal.SIGINT, running.interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def open_listener(config: ServerConfig) -> socket.socket:
    """Bind the server's address, without accepting connections before ``run_server``.

    Raises: ConfigError (it cannot be resolved or bound).
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        what = f"cannot resolve {config.host}: {error}"
        raise ConfigError("server.bind", what, field="server.host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        what = f"cannot bind {config.host}:{config.port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            what += ": give another --port, or ask the server that is there by --url"
        raise ConfigError("server.bind", what, field="server.port") from error
    listener.setblocking(False)
    return listener
