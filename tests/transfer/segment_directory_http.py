"""Metadata over HTTP: a small server, by itself or inside another application, and its client.

``PUT, GET, DELETE /segments/NAME`` and ``GET /segments?prefix=``; bodies are JSON. Every request
carries a token that follows from the cluster's secret; the secret itself never travels. Needs
starlette and uvicorn (the ``serve`` extra) for the server, nothing for the client.
"""

import hashlib
import hmac
import http.client
import socket
import threading
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote

import msgspec
from segment_directory import MemoryMetadata, MetadataStore, SegmentRecord

from tandem.core.errors import (
    ERROR_CODES,
    CapacityError,
    ConfigError,
    DeadlineError,
    InternalError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
)
from tandem.transfer.config import MIN_SECRET_BYTES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = ["HttpMetadata", "MetadataServer", "make_metadata_app"]

T = TypeVar("T")
MAX_BODY_BYTES = 65_536
MAX_ANSWER_BYTES = 64 * 2**20
START_TIMEOUT_S = 60.0
_STATUS = {"not_found": 404, "conflict": 409, "permission_denied": 403, "config": 400}


class _Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    record: SegmentRecord
    lease_s: float


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    what: str


def _make_token(secret: str) -> str:
    if len(secret.encode()) < MIN_SECRET_BYTES:
        raise ConfigError(
            "metadata.configure", f"a secret of fewer than {MIN_SECRET_BYTES} bytes", field="secret"
        )
    label = b"tandem transfer metadata v1"
    return "Bearer " + hmac.new(secret.encode(), label, hashlib.sha256).hexdigest()


def make_metadata_app(secret: str, store: MetadataStore | None = None) -> "Starlette":
    """Make the ASGI application, to be mounted or served.

    Args:
        secret: of the cluster.
        store: where records are kept; None = in this process.

    Raises: ConfigError (secret too short).
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response
    from starlette.routing import Route

    kept = MemoryMetadata() if store is None else store
    token = _make_token(secret).encode()

    def answer(error: TandemError) -> Response:
        body = msgspec.json.encode(_Failure(code=error.code, what=error.what))
        return Response(body, _STATUS.get(error.code, 503), media_type="application/json")

    async def read_body(request: "Request") -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise CapacityError("metadata.serve", f"a body of more than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    async def handle(request: "Request") -> Response:
        shown = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(shown, token):
            return answer(PermissionDeniedError("metadata.serve", "no or another secret's token"))
        try:
            return await act(request)
        except msgspec.MsgspecError as error:
            return answer(ConfigError("metadata.serve", f"malformed: {error}"))
        except TandemError as error:
            return answer(error)

    async def act(request: "Request") -> Response:
        name = request.path_params.get("name")
        if name is None:
            names = await run_in_threadpool(kept.names, request.query_params.get("prefix", ""))
            return Response(msgspec.json.encode(names), media_type="application/json")
        if request.method == "GET":
            record = await run_in_threadpool(kept.get, name)
            return Response(msgspec.json.encode(record), media_type="application/json")
        if request.method == "DELETE":
            epoch = request.query_params.get("epoch", "")
            if not epoch.isdecimal() or len(epoch) > 20:
                raise ConfigError("metadata.serve", "no epoch", field="epoch")
            await run_in_threadpool(kept.remove, name, int(epoch))
            return Response(status_code=204)
        lease = msgspec.json.decode(await read_body(request), type=_Lease)
        if lease.record.name != name:
            raise ConfigError("metadata.serve", "the record has another name than the path")
        await run_in_threadpool(kept.put, lease.record, lease.lease_s)
        return Response(status_code=204)

    return Starlette(
        routes=[
            Route("/segments", handle, methods=["GET"]),
            Route("/segments/{name:path}", handle, methods=["GET", "PUT", "DELETE"]),
        ]
    )


class MetadataServer:
    """Serves metadata on an address of its own, in a thread. A context manager.

    Args:
        secret: of the cluster.
        host: to listen on.
        port: 0 = any; see ``address``.
        store: where records are kept; None = in this process.

    Raises: ConfigError; PeerLostError (it did not start); OSError (address in use).
    """

    def __init__(
        self,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        store: MetadataStore | None = None,
    ) -> None:
        import uvicorn

        app = make_metadata_app(secret, store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        """``host:port``, for clients."""
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=60)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="tandem-metadata", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. May be repeated."""
        self._server.should_exit = True
        self._thread.join(START_TIMEOUT_S)
        self._socket.close()


class HttpMetadata:
    """A ``MetadataStore`` behind a ``MetadataServer``; one connection, calls take turns. A context
    manager.

    Args:
        address: ``host:port`` of the server.
        secret: of the cluster.
        timeout_s: for one answer.

    Raises: ConfigError (address, secret). Calls raise as ``MetadataStore`` says, and
        PermissionDeniedError (another secret), DeadlineError.
    """

    def __init__(self, address: str, secret: str, *, timeout_s: float = 5.0) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("metadata.connect", f"{address!r} is no host:port", field="address")
        self._address = address
        self._token = _make_token(secret)
        self._lock = threading.Lock()
        self._connection = http.client.HTTPConnection(
            host.strip("[]"), int(port), timeout=timeout_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def put(self, record: SegmentRecord, lease_s: float) -> None:
        """See ``MetadataStore.put``."""
        body = msgspec.json.encode(_Lease(record=record, lease_s=lease_s))
        self._ask("PUT", f"/segments/{quote(record.name, safe='')}", body)

    def get(self, name: str) -> SegmentRecord:
        """See ``MetadataStore.get``."""
        if not name:
            raise NotFoundError("metadata.get", "no segment has an empty name", field="name")
        answer = self._ask("GET", f"/segments/{quote(name, safe='')}")
        return self._decode(answer, SegmentRecord)

    def remove(self, name: str, epoch: int) -> None:
        """See ``MetadataStore.remove``."""
        self._ask("DELETE", f"/segments/{quote(name, safe='')}?epoch={epoch}")

    def names(self, prefix: str = "") -> list[str]:
        """See ``MetadataStore.names``."""
        return self._decode(
            self._ask("GET", f"/segments?prefix={quote(prefix, safe='')}"), list[str]
        )

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            self._connection.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        with self._lock:
            # A connection that was kept may have been closed for its idleness: then once more. All
            # calls may be repeated.
            was_open = self._connection.sock is not None
            try:
                status, content = self._exchange(method, path, body)
            except PeerLostError:
                if not was_open:
                    raise
                status, content = self._exchange(method, path, body)
        if status < 300:
            return content
        try:
            failure = msgspec.json.decode(content, type=_Failure)
        except msgspec.MsgspecError as error:
            raise PeerLostError(
                "metadata.ask", f"{self._address} answers {status}, but is no metadata server"
            ) from error
        raise ERROR_CODES.get(failure.code, InternalError)("metadata.ask", failure.what)

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            self._connection.request(method, path, body, headers={"Authorization": self._token})
            answer = self._connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        except TimeoutError as error:
            self._connection.close()
            raise DeadlineError(
                "metadata.ask", f"{self._address} did not answer in time"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise PeerLostError("metadata.ask", f"{self._address}: {error}") from error

    def _decode(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise PeerLostError(
                "metadata.ask", f"{self._address} answers nonsense: {error}"
            ) from error
