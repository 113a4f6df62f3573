"""The processes of a store: master, host and client on ``tandem.rpc`` and ``tandem.transfer``."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConflictError, NotFoundError, UnsupportedError
from tandem.rpc import (
    Auth,
    Identity,
    MethodTable,
    Peer,
    RpcClient,
    RpcConfig,
    RpcServer,
    generate_secret,
    make_identity,
    make_runtime_dir,
    read_secret,
    write_secret,
)
from tandem.rpc.endpoint import parse_endpoint
from tandem.store.client import AsyncStoreClient
from tandem.store.config import StoreConfig
from tandem.store.host import StoreHost
from tandem.store.master import StoreMaster
from tandem.store.metrics import render_metrics
from tandem.store.ports import TransferClientPort, TransferHostPort
from tandem.store.segment import Segment
from tandem.store.sessions import Caller
from tandem.transfer import TransferConfig, TransferEngine

__all__ = ["ClientService", "HostService", "MasterService", "default_folder"]

logger = logging.getLogger(__name__)

STORE_VERSION = 1
"""Of the messages. Versions one apart understand each other: a new one only adds."""
MAX_RECONNECT_MS = 250
"""A master that is restarted should find its hosts again at once."""
MAX_HTTP_HEAD_BYTES = 8192
HTTP_TIMEOUT_S = 5.0


def default_folder() -> Path:
    """Return the folder of the store of this user on this machine: socket, secret, epoch."""
    return Path(f"/tmp/tandem-store-{os.geteuid()}")  # noqa: S108 - made 0700 and checked


def _endpoint(config: StoreConfig) -> str:
    return config.master or f"ipc://{make_runtime_dir(default_folder())}/master.sock"


def _state_folder(url: str) -> Path:
    """Return where a master keeps what it must not forget: beside its socket, if it has one."""
    path = parse_endpoint(url).path
    return make_runtime_dir(default_folder()) if path is None else path.parent


def _auth(config: StoreConfig, url: str) -> Auth:
    return Auth.for_endpoint(url, config.secret)


def _rpc_config(config: RpcConfig) -> RpcConfig:
    longest = min(config.reconnect_max_ms, MAX_RECONNECT_MS)
    return msgspec.structs.replace(
        config,
        reconnect_max_ms=longest,
        reconnect_initial_ms=min(config.reconnect_initial_ms, longest),
    )


def _identify(name: str, role: str) -> Identity:
    return make_identity(name, role, {"store": str(STORE_VERSION)})


def check_version(theirs: Identity, ours: Identity) -> None:
    """Refuse a store more than one version away, and whatever is no store.

    Raises: UnsupportedError naming both versions.
    """
    version = theirs.compat.get("store", "")
    if not version.isdecimal() or abs(int(version) - int(ours.compat["store"])) > 1:
        raise UnsupportedError(
            "store.handshake",
            f"{theirs.name} speaks store version {version or 'none'!r}, {ours.name} "
            f"{ours.compat['store']}: they may differ by one",
            field="compat.store",
        )


def _transfer_secret(config: StoreConfig, url: str) -> str:
    """Return the secret of the data path; on one machine the master has left one by its socket."""
    if config.secret is not None:
        return config.secret
    path = _state_folder(url) / "secret"
    with contextlib.suppress(FileExistsError):
        write_secret(path, generate_secret())
    return read_secret(path)


def next_epoch(folder: Path) -> int:
    """Return an epoch above all that were taken in this folder, and note it there.

    Raises: ConflictError if the note is not a number.
    """
    path = folder / "epoch"
    try:
        epoch = int(path.read_text(encoding="ascii")) + 1
    except FileNotFoundError:
        epoch = 1
    except ValueError:
        raise ConflictError("store.master", f"{path} holds no number: remove it") from None
    draft = folder / f"epoch.{os.getpid()}"
    draft.write_text(f"{epoch}\n", encoding="ascii")
    draft.replace(path)
    return epoch


class MasterService:
    """A master process. An async context manager."""

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        self._config = config
        url = _endpoint(config)
        self._server = RpcServer(
            url,
            identity=_identify("store master", "store_master"),
            auth=_auth(config, url),
            config=_rpc_config(RpcConfig() if rpc is None else rpc),
            check_compat=check_version,
        )
        self._http: asyncio.Server | None = None
        self.master: StoreMaster

    @property
    def endpoint(self) -> str:
        """The address served."""
        return self._server.endpoint

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of ``GET /metrics``; None if it is off."""
        return None if self._http is None else self._http.sockets[0].getsockname()[:2]

    async def __aenter__(self) -> Self:
        url = self._server.endpoint
        _transfer_secret(self._config, url)
        self.master = StoreMaster(
            self._config,
            clock=MonotonicClock(),
            epoch=next_epoch(_state_folder(url)),
            draw=secrets.randbelow,
        )
        for name, handler, request, response in self.master.methods():
            timed = _time_calls(handler, name, self.master.counters.observe)
            self._server.register(name, timed, request, response)
        self._server.on_peer_lost(lambda peer, _: self.master.on_caller_lost(peer))
        self._server.start()
        self.master.start()
        if self._config.metrics_port:
            self._http = await asyncio.start_server(
                self._serve_http, "127.0.0.1", self._config.metrics_port
            )
        logger.info("event=master_up endpoint=%s epoch=%d", self.endpoint, self.master.epoch)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.close()
            await self._http.wait_closed()
        await self._server.aclose()
        await self.master.aclose()

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer ``GET /metrics``; a page of text needs no web framework."""
        try:
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /metrics "):
                    page = render_metrics(self.master.status(), self.master.counters)
                    status = "200 OK"
                else:
                    page, status = b"GET /metrics is all there is\n", "404 Not Found"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode()
                    + page
                )
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            logger.debug("event=metrics_client_gone")
        finally:
            writer.close()


class HostService:
    """A host process: its segment outlives it. An async context manager; entering it does not wait
    for a master.
    """

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        machine = config.machine or socket.gethostname()
        name = config.name or f"{machine}:{os.getpid()}"
        self._url = _endpoint(config)
        self._config = config
        self._rpc = _rpc_config(RpcConfig() if rpc is None else rpc)
        self._name = name
        self._machine = machine
        self.host: StoreHost

    async def __aenter__(self) -> Self:
        config = self._config
        path = Path(config.segment_dir) / f"{_file_name(self._name)}.segment"
        # Without a name of its own, nobody could find the file again.
        self._is_kept = bool(config.name)
        opened = await asyncio.to_thread(Segment.open_file, path, config.segment_bytes)
        self._segment = opened
        self._engine = _make_engine(config, self._url, self._name, config.listen)
        port = TransferHostPort(self._engine, opened)
        self.host = StoreHost(self._name, self._machine, opened, port)
        table = MethodTable()
        for name, handler, request, response in self.host.methods():
            table.register(name, handler, request, response)
        self._client = _make_client(self._url, config, self._rpc, self._name, "store_host", table)
        self._client.on_peer(self.host.on_master)
        self._client.on_peer_lost(lambda _, __: self.host.on_master_lost())
        self._connecting = asyncio.create_task(_connect_patiently(self._client))
        loop = asyncio.get_running_loop()

        def tell_grown(usable_bytes: int) -> None:
            loop.call_soon_threadsafe(self.host.on_grown, usable_bytes)

        opened.reserve_rest(tell_grown)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connecting.cancel()
        await asyncio.gather(self._connecting, return_exceptions=True)
        await self.host.aclose()
        await self._client.aclose()
        await asyncio.to_thread(self._engine.close, deadline_s=2.0)
        await asyncio.to_thread(self._segment.close, remove=not self._is_kept)


class ClientService:
    """What a client process needs. An async context manager; inside it ``client`` is usable."""

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        self._config = config
        self._url = _endpoint(config)
        self._rpc = _rpc_config(RpcConfig() if rpc is None else rpc)
        self.client: AsyncStoreClient

    async def __aenter__(self) -> Self:
        name = self._config.name or f"{socket.gethostname()}:{os.getpid()}"
        self._channel = _make_client(
            self._url, self._config, self._rpc, name, "store_client", MethodTable()
        )
        await self._channel.connect()
        try:
            self._engine = _make_engine(self._config, self._url, name, ())
        except BaseException:
            await self._channel.aclose()
            raise
        self.client = AsyncStoreClient(
            self._channel,
            TransferClientPort(self._engine),
            clock=MonotonicClock(),
            config=self._config,
            machine=self._config.machine or socket.gethostname(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self._channel.aclose()
        await asyncio.to_thread(self._engine.close, deadline_s=2.0)


async def _connect_patiently(client: RpcClient) -> None:
    """Connect once there is a master; later losses the client mends by itself."""
    while True:
        try:
            await client.connect()
        except (ConnectionError, TimeoutError, NotFoundError) as error:
            if isinstance(error, PermissionError):
                raise
            logger.info("event=master_awaited endpoint=%s reason=%s", client.endpoint, error)
            await asyncio.sleep(MAX_RECONNECT_MS / 1e3)
        else:
            return


def _make_client(
    url: str, config: StoreConfig, rpc: RpcConfig, name: str, role: str, table: MethodTable
) -> RpcClient:
    return RpcClient(
        url,
        identity=_identify(name, role),
        auth=_auth(config, url),
        config=rpc,
        reconnect=True,
        methods=table,
        check_compat=check_version,
    )


def _make_engine(
    config: StoreConfig, url: str, name: str, listen: tuple[str, ...]
) -> TransferEngine:
    # A client listens as well: on one host the owner of memory asks its users to let go.
    return TransferEngine(
        TransferConfig(
            name=name,
            secret=_transfer_secret(config, url),
            listen=listen or ("127.0.0.1:0",),
            transports=config.transports,
            deadline_ms=config.deadline_ms,
        )
    )


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def _time_calls(
    handler: Callable[[Any, Any], Any], name: str, observe: Callable[[str, float], None]
) -> Callable[[Any, Any], Any]:
    """Wrap a handler so that its calls are timed; plain ones stay plain."""
    if asyncio.iscoroutinefunction(handler):

        async def timed(peer: Caller, request: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return await handler(peer, request)
            finally:
                observe(name, time.perf_counter() - begin_s)

        return timed

    def timed_plain(peer: Peer, request: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return handler(peer, request)
        finally:
            observe(name, time.perf_counter() - begin_s)

    return timed_plain
