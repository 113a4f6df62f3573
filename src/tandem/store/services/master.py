"""A master process: the seat of a master behind an RPC server, and what it keeps beside it."""

import asyncio
import contextlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tandem.core.clock import BootClock, MonotonicClock
from tandem.core.descriptors import is_scarce
from tandem.core.errors import CapacityError, ConfigError, CorruptionError, TandemError
from tandem.rpc import Peer, RpcConfig, RpcServer
from tandem.rpc.endpoint import parse_endpoint
from tandem.store.config import StoreConfig
from tandem.store.damage import DamageList
from tandem.store.election import Campaign, FileRosterStore, Holder, MasterSeat, RosterStore, Term
from tandem.store.fast_calls import FAST_METHODS, CallServer, CallWay, Methods, open_peer
from tandem.store.formats.headers import MAX_EPOCH, pack_head, parse_head
from tandem.store.master.master import StoreMaster
from tandem.store.messages import CallAddress, JoinHost
from tandem.store.metrics import StoreCounters, render_metrics
from tandem.store.services.connect import (
    auth_for,
    check_version,
    find_endpoints,
    identify,
    make_engine,
    make_file_name,
    make_rpc_config,
    read_transfer_secret,
    state_folder,
)
from tandem.store.sessions import Caller

if TYPE_CHECKING:
    from tandem.store.election.etcd import EtcdBackend

__all__ = ["MasterService", "next_epoch"]

logger = logging.getLogger(__name__)

EPOCH_MAGIC = b"TANDEPO\0"
EPOCH = struct.Struct("<Q")
HTTP_TIMEOUT_S = 5.0
HTTP_BACKLOG = 4
"""So many connections asyncio accepts before anybody looks at one of them."""


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
        urls = find_endpoints(config)
        if len(urls) > 1:
            raise ConfigError(
                "store.master",
                f"a master has one address, not {config.master!r}",
                field="store.master",
            )
        self._server = RpcServer(
            urls[0],
            identity=identify("store master", "store_master"),
            auth=auth_for(config, urls[0]),
            config=make_rpc_config(RpcConfig() if rpc is None else rpc, config),
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
        read_transfer_secret(config, url)
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
            self.seat.take(next_epoch(state_folder(url), self._damage))
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
        engine = make_engine(config, self._server.endpoint, "store master", config.listen)
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
            name = make_file_name(url.partition("://")[2] if path is None else path.name)
            return FileRosterStore(state_folder(url), name, self._damage)
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


async def _end_task(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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
