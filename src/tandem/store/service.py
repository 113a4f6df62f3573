"""The processes of a store: master, host and client on ``tandem.rpc`` and ``tandem.transfer``."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tandem.core.clock import BootClock, MonotonicClock
from tandem.core.descriptors import is_scarce
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    InternalError,
    TandemError,
    UnsupportedError,
)
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
from tandem.store.client import AsyncStoreClient, make_blocking_client
from tandem.store.config import StoreConfig
from tandem.store.damage import DamageList
from tandem.store.election import (
    PROBE_TIMEOUT_S,
    Campaign,
    FileRosterStore,
    Holder,
    LeaderClient,
    MasterSeat,
    RosterStore,
    Term,
)
from tandem.store.fast_calls import (
    FAST_METHODS,
    CallServer,
    CallWay,
    FastChannel,
    Methods,
    open_peer,
)
from tandem.store.formats.headers import MAX_EPOCH, pack_head, parse_head
from tandem.store.host import DiskFolder, DiskTier, Segment, StoreHost
from tandem.store.master.master import StoreMaster
from tandem.store.messages import CallAddress, JoinHost
from tandem.store.metrics import StoreCounters, render_metrics
from tandem.store.ports import TransferClientPort, TransferHostPort
from tandem.store.sessions import Caller
from tandem.transfer import TransferConfig, TransferEngine

if TYPE_CHECKING:
    from tandem.store.election.etcd import EtcdBackend

__all__ = ["ClientService", "HostService", "MasterService", "default_folder"]

logger = logging.getLogger(__name__)

EPOCH_MAGIC = b"TANDEPO\0"
EPOCH = struct.Struct("<Q")
STORE_VERSION = 1
"""Of the messages. Versions one apart understand each other: a new one only adds."""
MAX_RECONNECT_MS = 250
"""A master that is restarted should find its hosts again at once."""
MAX_HTTP_HEAD_BYTES = 8192
HTTP_TIMEOUT_S = 5.0
HTTP_BACKLOG = 4
"""So many connections asyncio accepts before anybody looks at one of them."""


def default_folder() -> Path:
    """Return the folder of the store of this user on this machine: socket, secret, epoch."""
    return Path(f"/tmp/tandem-store-{os.geteuid()}")  # noqa: S108 - made 0700 and checked


def _endpoints(config: StoreConfig) -> list[str]:
    """Return where masters may be; the data path's secret is beside the first."""
    listed = [url.strip() for url in config.master.split(",") if url.strip()]
    listed = [url if "://" in url else f"tcp://{url}" for url in listed]
    return listed or [f"ipc://{make_runtime_dir(default_folder())}/master.sock"]


def _state_folder(url: str) -> Path:
    """Return where a master keeps what it must not forget: beside its socket, if it has one."""
    path = parse_endpoint(url).path
    return make_runtime_dir(default_folder()) if path is None else path.parent


def _auth(config: StoreConfig, url: str) -> Auth:
    return Auth.for_endpoint(url, config.secret)


def _rpc_config(rpc: RpcConfig, config: StoreConfig) -> RpcConfig:
    longest = min(rpc.reconnect_max_ms, MAX_RECONNECT_MS)
    lease_ms = rpc.lease_ms
    if config.election.backend != "none" or "," in config.master:
        # A leader that is stopped must be missed when another is elected, not long after.
        lease_ms = min(lease_ms, 1000 * config.election.ttl_s)
    return msgspec.structs.replace(
        rpc,
        reconnect_max_ms=longest,
        reconnect_initial_ms=min(rpc.reconnect_initial_ms, longest),
        lease_ms=lease_ms,
        heartbeat_interval_ms=min(rpc.heartbeat_interval_ms, lease_ms // 4),
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


def next_epoch(folder: Path, damage: DamageList) -> int:
    """Return an epoch above all that were taken in this folder, and note it there.

    A note that is damaged is moved aside: the hosts know the epochs that they have seen, and the
    master goes above them as they join.

    Raises: UnsupportedError if a later version wrote it; CapacityError if epochs have run out.
    """
    path, epoch = folder / "epoch", 0
    try:
        head = parse_head(path.read_bytes(), EPOCH_MAGIC, EPOCH.size, str(path))
        epoch = max(EPOCH.unpack(copy)[0] for copy in head.copies)
        if head.is_damaged:
            damage.note("note of the epoch", "a copy of it, made anew from the other")
    except FileNotFoundError:
        pass
    except CorruptionError as error:
        damage.note("note of the epoch", error)
        path.replace(folder / "epoch.quarantined")
    if epoch >= MAX_EPOCH:
        raise CapacityError("store.master", f"{path} has the last epoch, {epoch}: start anew")
    draft = folder / f"epoch.{os.getpid()}"
    draft.write_bytes(pack_head(EPOCH_MAGIC, EPOCH.pack(epoch + 1)))
    draft.replace(path)
    return epoch + 1


class MasterService:
    """A master process. An async context manager.

    With an election, entering it does not wait for the leadership, and it is never refused for
    want of etcd: whoever asks meanwhile is told who leads.
    """

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        self._config = config
        urls = _endpoints(config)
        if len(urls) > 1:
            raise ConfigError(
                "store.master",
                f"a master has one address, not {config.master!r}",
                field="store.master",
            )
        self._server = RpcServer(
            urls[0],
            identity=_identify("store master", "store_master"),
            auth=_auth(config, urls[0]),
            config=_rpc_config(RpcConfig() if rpc is None else rpc, config),
            check_compat=check_version,
        )
        self._http: asyncio.Server | None = None
        self._damage = DamageList()
        self._open = contextlib.AsyncExitStack()
        self._callers: dict[str, Peer] = {}
        self._backend: EtcdBackend | None = None
        self.seat: MasterSeat[StoreMaster]

    @property
    def endpoint(self) -> str:
        """The address served."""
        return self._server.endpoint

    @property
    def epoch(self) -> int:
        """Of the term; 0 while another leads."""
        return self.seat.master.epoch

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of ``GET /metrics``; None if it is off."""
        return None if self._http is None else self._http.sockets[0].getsockname()[:2]

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as opening:
            await self._start(opening)
            self._open = opening.pop_all()
        return self

    async def _start(self, opening: contextlib.AsyncExitStack) -> None:
        config, url = self._config, self._server.endpoint
        _transfer_secret(config, url)
        self.seat = MasterSeat(self._make_master, end_sessions=self._server.end_sessions)
        opening.push_async_callback(self.seat.aclose)
        methods = [
            (name, _time_calls(handler, name, self.seat.counters.observe), request, response)
            for name, handler, request, response in self.seat.methods()
        ]
        for method in methods:
            self._server.register(*method)
        await self._serve_calls(methods, opening)
        if config.election.backend == "none":
            self.seat.take(next_epoch(_state_folder(url), self._damage))
        self._server.start()
        opening.push_async_callback(self._server.aclose)
        if config.election.backend == "etcd":
            await self._start_campaign(opening)
        if config.metrics_port:
            self._http = await asyncio.start_server(
                self._serve_http, "127.0.0.1", config.metrics_port, backlog=HTTP_BACKLOG
            )
            opening.push_async_callback(self._http.wait_closed)
            opening.callback(self._http.close)
        logger.info("event=master_up endpoint=%s epoch=%d", self.endpoint, self.epoch)

    async def _serve_calls(self, methods: Methods, opening: contextlib.AsyncExitStack) -> None:
        """Take calls over a transfer engine as well, from those that have a session here."""
        config = self._config
        engine = _make_engine(config, self._server.endpoint, "store master", config.listen)
        self._engine = engine
        fast = [method for method in methods if method[0] in FAST_METHODS]
        calls = CallServer(engine, fast, self._callers.get)
        opening.push_async_callback(calls.aclose)
        opening.push_async_callback(asyncio.to_thread, engine.close, deadline_s=2.0)
        address = CallAddress(engine.address)
        self._server.register("call_address", lambda _, __: address, type(None), CallAddress)
        self._server.on_peer(self._note_caller)
        self._server.on_peer_lost(self._forget_caller)

    def _make_master(self, epoch: int, term: Term | None, counters: StoreCounters) -> StoreMaster:
        return StoreMaster(
            self._config,
            clock=MonotonicClock(),
            epoch=epoch,
            draw=secrets.randbelow,
            term=term,
            open_way=self._open_way,
            roster=self._open_roster(epoch) if epoch else None,
            counters=counters,
            damaged=self._damage.names,
        )

    async def _open_way(self, join: JoinHost) -> CallWay:
        """Open the way over the engine to a host that joins."""
        peer = await open_peer(self._engine, join.address)
        return CallWay(self._engine, peer, join.call_token)

    def _open_roster(self, epoch: int) -> RosterStore:
        """Return the way to the membership: in etcd, or in files of this master's folder."""
        if self._backend is None:
            url = self._server.endpoint
            path = parse_endpoint(url).path
            name = _file_name(url.partition("://")[2] if path is None else path.name)
            return FileRosterStore(_state_folder(url), name, self._damage)
        from tandem.store.election.etcd_roster import EtcdRosterStore

        timeout_s = self._config.election.timeout_ms / 1e3
        holder = Holder(self._address, epoch)
        return EtcdRosterStore(self._backend, holder, timeout_s=timeout_s, damage=self._damage)

    @property
    def _address(self) -> str:
        """Where others reach this master."""
        return self._config.election.address or self.endpoint

    def _note_caller(self, peer: Peer) -> None:
        self._callers[peer.instance_id] = peer

    def _forget_caller(self, peer: Peer, _: TandemError) -> None:
        if self._callers.get(peer.instance_id) is peer:
            del self._callers[peer.instance_id]
        self.seat.on_caller_lost(peer)

    async def _start_campaign(self, opening: contextlib.AsyncExitStack) -> None:
        from tandem.store.election.etcd import EtcdBackend

        election, clock = self._config.election, BootClock()
        backend = await opening.enter_async_context(EtcdBackend(election, clock=clock))
        self._backend = backend
        self.seat.campaign = Campaign(
            backend,
            clock=clock,
            address=self._address,
            ttl_s=election.ttl_s,
            timeout_s=election.timeout_ms / 1e3,
            on_elected=self.seat.take,
            on_deposed=self.seat.leave,
        )
        running = asyncio.create_task(self.seat.campaign.run())
        opening.push_async_callback(_end_task, running)

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer ``GET /metrics``; a page of text needs no web framework."""
        if is_scarce(writer.get_extra_info("socket").fileno()):
            writer.transport.abort()
            return
        try:
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /metrics "):
                    page = render_metrics(
                        self.seat.master.status(), self.seat.counters, self.seat.is_leader
                    )
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
    """A host process. An async context manager; entering it does not wait for a master.

    Args:
        config: of the store.
        rpc: the control channel's settings.
        keep_segment: whether a clean end leaves the segment's file; None: if the host has a name
            by which it is found again. A process that dies leaves it in any case.
    """

    def __init__(
        self,
        config: StoreConfig,
        rpc: RpcConfig | None = None,
        *,
        keep_segment: bool | None = None,
    ) -> None:
        machine = config.machine or socket.gethostname()
        name = config.name or f"{machine}:{os.getpid()}"
        self._urls = _endpoints(config)
        self._config = config
        self._rpc = _rpc_config(RpcConfig() if rpc is None else rpc, config)
        self._name = name
        self._machine = machine
        self.host: StoreHost
        self._folder: DiskFolder | None = None
        # Without a name of its own, nobody could find the file again.
        self._is_kept = bool(config.name) if keep_segment is None else keep_segment

    async def __aenter__(self) -> Self:
        config = self._config
        path = Path(config.segment_dir) / f"{_file_name(self._name)}.segment"
        opened = await asyncio.to_thread(Segment.open_file, path, config.segment_bytes)
        self._segment = opened
        self._engine = _make_engine(config, self._urls[0], self._name, config.listen)
        port = TransferHostPort(self._engine, opened)
        try:
            disk = await self._open_disk(opened)
        except BaseException:
            await asyncio.to_thread(self._engine.close, deadline_s=2.0)
            await asyncio.to_thread(opened.close, remove=not self._is_kept)
            raise
        token = secrets.token_hex(16)
        self.host = StoreHost(self._name, self._machine, opened, port, disk, token)
        self._calls = CallServer(
            self._engine,
            self.host.methods(),
            lambda client: self.host.master if client == token else None,
        )
        table = MethodTable()
        for name, handler, request, response in self.host.methods():
            table.register(name, handler, request, response)
        self._channel = LeaderClient(
            self._urls,
            _client_maker(config, self._rpc, _identify(self._name, "store_host"), table),
            on_peer=self.host.on_master,
            on_peer_lost=self.host.on_master_lost,
        )
        self._channel.start()
        loop = asyncio.get_running_loop()

        def tell_grown(_: int) -> None:
            loop.call_soon_threadsafe(self.host.on_grown)

        opened.reserve_rest(tell_grown)
        return self

    async def _open_disk(self, segment: Segment) -> DiskTier | None:
        """Open the SSD tier; a disk that cannot be read leaves a host of memory alone."""
        config = self._config
        self._folder = None
        if not config.ssd_dir:
            return None
        try:
            self._folder = await asyncio.to_thread(
                DiskFolder.open,
                Path(config.ssd_dir),
                self._engine,
                marks=Path(config.segment_dir),
            )
            disk = DiskTier(
                self._folder,
                segment,
                capacity_bytes=config.ssd_bytes,
                clock=MonotonicClock(),
                damage=self._folder.damage,
            )
            await disk.open()
        except (InternalError, CapacityError):
            logger.exception("event=disk_unusable path=%s", config.ssd_dir)
            if self._folder is not None:
                self._folder.condemn()  # What is removed meanwhile must not come back.
            return None
        disk.start()
        return disk

    async def __aexit__(self, *_: object) -> None:
        if not self._is_kept and self.host.disk is None:
            await self.host.leave()
        await self.host.aclose()
        await self._calls.aclose()
        await self._channel.aclose()
        if self.host.disk is not None:
            await self.host.disk.aclose()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.close)
        await asyncio.to_thread(self._engine.close, deadline_s=2.0)
        await asyncio.to_thread(self._segment.close, remove=not self._is_kept)


class ClientService:
    """What a client process needs. An async context manager; inside it ``client`` is usable."""

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        self._config = config
        self._urls = _endpoints(config)
        self._rpc = _rpc_config(RpcConfig() if rpc is None else rpc, config)
        self.client: AsyncStoreClient

    async def __aenter__(self) -> Self:
        name = self._config.name or f"{socket.gethostname()}:{os.getpid()}"
        identity = _identify(name, "store_client")
        self._engine = _make_engine(self._config, self._urls[0], name, ())
        self._channel = FastChannel(self._engine, identity.instance_id)
        self._leader = LeaderClient(
            self._urls,
            _client_maker(self._config, self._rpc, identity, MethodTable()),
            on_peer=self._on_peer,
            on_peer_lost=self._on_peer_lost,
        )
        self._channel.slow = self._leader
        self.client = AsyncStoreClient(
            self._channel,
            TransferClientPort(self._engine),
            clock=BootClock(),  # Leases end while we sleep.
            config=self._config,
            machine=self._config.machine or socket.gethostname(),
        )
        try:
            await self._leader.connect(self._rpc.connect_timeout_ms / 1e3)
        except BaseException:
            await asyncio.to_thread(self._engine.close, deadline_s=2.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self._channel.aclose()
        await self._leader.aclose()
        await asyncio.to_thread(self._engine.close, deadline_s=2.0)

    def _on_peer(self, peer: Peer) -> None:
        self._channel.on_peer(peer)
        self.client.on_master()

    def _on_peer_lost(self) -> None:
        self._channel.on_peer_lost()
        self.client.on_master()

    def make_blocking_client(self, loop: asyncio.AbstractEventLoop) -> AsyncStoreClient:
        """Return a twin of ``client`` for other threads than that of ``loop``, this one's."""
        return make_blocking_client(self.client, self._channel, self._engine, loop)


async def watch_master(config: StoreConfig, rpc: RpcConfig) -> str:
    """Stay until the session with the master is lost; return why it was.

    A master that is stopped is lost when its lease ends, one that is killed at once.
    Raises: TandemError if there is no session to lose.
    """
    url = _endpoints(config)[0]
    client = RpcClient(
        url,
        identity=_identify("watcher", "store_watcher"),
        auth=_auth(config, url),
        config=_rpc_config(rpc, config),
        check_compat=check_version,
    )
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note_lost(_: Peer, error: TandemError) -> None:
        if not lost.done():
            lost.set_result(error.what)

    client.on_peer_lost(note_lost)
    async with client:
        return await lost


async def _end_task(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _client_maker(
    config: StoreConfig, rpc: RpcConfig, identity: Identity, table: MethodTable
) -> Callable[[str], RpcClient]:
    timeout_ms = min(rpc.connect_timeout_ms, int(PROBE_TIMEOUT_S * 1e3))
    one_try = msgspec.structs.replace(rpc, connect_timeout_ms=timeout_ms)

    def make(url: str) -> RpcClient:
        return RpcClient(
            url,
            identity=identity,
            auth=_auth(config, url),
            config=one_try,
            methods=table,
            check_compat=check_version,
        )

    return make


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
