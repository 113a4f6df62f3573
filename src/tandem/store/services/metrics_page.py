"""``GET /metrics`` of a master, rendered by ``prometheus_client`` on a thread beside the event
loop.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tandem.core.descriptors import is_scarce
from tandem.core.errors import ConflictError, UnsupportedError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["MetricsPage"]

TIMEOUT_S = 5.0
"""Seconds that a reader of the page, and the event loop that makes the figures, may take."""
MAX_READERS = 16
"""Limit of concurrent readers. Further connections are closed."""


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, in place of a line for each request."""


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread for each reader, which refuses connections when file descriptors are
    scarce.
    """

    daemon_threads = True
    request_queue_size = 4

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_READERS)
        super().__init__(*args, **kwargs)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        connection: socket.socket = request
        return not is_scarce(connection.fileno()) and self._places.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # No thread could be started.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a reader that has disconnected."""


class MetricsPage:
    """Serves the metrics page on the loopback address until it is closed.

    Args:
        port: port to bind.
        collect: returns the metrics; called on the running event loop.

    Raises: UnsupportedError if ``prometheus_client`` is not installed; ConflictError if the port
        is taken.
    """

    def __init__(self, port: int, collect: "Callable[[], Iterable[Metric]]") -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UnsupportedError(
                "store.metrics", "prometheus_client is missing: pip install 'tandem-llm[serve]'"
            ) from None
        registry = prometheus_client.CollectorRegistry()
        registry.register(_OnLoop(collect))
        page: Callable[[Any, Any], Any] = cast("Any", prometheus_client).make_wsgi_app(registry)

        def serve(environ: dict[str, Any], start_response: Any) -> Any:
            if environ["PATH_INFO"] == "/metrics":
                return page(environ, start_response)
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"GET /metrics is all there is\n"]

        try:
            self._server = make_server("127.0.0.1", port, serve, _Server, _Handler)
        except OSError as error:
            raise ConflictError(
                "store.metrics", f"cannot bind port {port}: {error}", field="store.metrics_port"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tandem-metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the page is served at."""
        host, port = self._server.server_address[:2]
        return str(host), port

    async def aclose(self) -> None:
        """Stop serving and release the port."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()


class _OnLoop:
    """A Prometheus collector: called on a reader's thread, it has the event loop collect the
    metrics.
    """

    def __init__(self, collect: "Callable[[], Iterable[Metric]]") -> None:
        self._collect = collect
        self._loop = asyncio.get_running_loop()

    def collect(self) -> "Iterable[Metric]":
        async def ask() -> "Iterable[Metric]":
            return self._collect()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(TIMEOUT_S)
