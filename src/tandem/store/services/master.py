"""A master process: an RPC server in front of the elected master, with its epoch and roster
files.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.clock import BootClock, MonotonicClock
from tandem.core.errors import CapacityError, ConfigError, CorruptionError, TandemError
from tandem.rpc import LaneRouter, Peer, RpcConfig, RpcServer
from tandem.rpc.wire.endpoint import parse_endpoint
from tandem.store.config import StoreConfig
from tandem.store.corruption_log import CorruptionLog
from tandem.store.election import (
    Campaign,
    ElectedMaster,
    FileRosterStore,
    Holder,
    RosterStore,
    Term,
)
from tandem.store.formats.headers import MAX_EPOCH, pack_head, parse_head
from tandem.store.master.master import StoreMaster
from tandem.store.metrics import Figures, StoreCounters, list_families
from tandem.store.services.connect import (
    auth_for,
    check_version,
    choose_master_address,
    find_endpoints,
    identify,
    make_engine,
    make_file_name,
    make_rpc_config,
    state_folder,
)
from tandem.store.services.metrics_page import MetricsPage
from tandem.store.services.service import Service
from tandem.transfer import EngineLanes

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tandem.store.election.etcd import EtcdBackend

__all__ = ["MasterService", "next_epoch"]

logger = logging.getLogger(__name__)

EPOCH_MAGIC = b"TANDEPO\0"
EPOCH = struct.Struct("<Q")


def next_epoch(folder: Path, corruption: CorruptionLog) -> int:
    """Return an epoch (the number of a master) above all earlier ones of this folder, and record it
    there.

    A corrupt record is moved aside: hosts know the epochs that they have seen, and the master
    raises its epoch above those as hosts join.

    Raises: UnsupportedError if a later version wrote the record; CapacityError if epochs have run
        out.
    """
    path, epoch = folder / "epoch", 0
    try:
        head = parse_head(path.read_bytes(), EPOCH_MAGIC, EPOCH.size, str(path))
        epoch = max(EPOCH.unpack(copy)[0] for copy in head.copies)
        if head.is_damaged:
            corruption.note("note of the epoch", "a copy of it, made anew from the other")
    except FileNotFoundError:
        pass
    except CorruptionError as error:
        corruption.note("note of the epoch", error)
        path.replace(folder / "epoch.quarantined")
    if epoch >= MAX_EPOCH:
        raise CapacityError("store.master", f"{path} has the last epoch, {epoch}: start anew")
    draft = folder / f"epoch.{os.getpid()}"
    draft.write_bytes(pack_head(EPOCH_MAGIC, EPOCH.pack(epoch + 1)))
    draft.replace(path)
    return epoch + 1


class MasterService(Service):
    """A store master process. An async context manager.

    With an election, entering it waits neither for leadership nor for etcd: until this process
    leads, callers are told the leader's address.
    """

    def __init__(self, config: StoreConfig, rpc: RpcConfig | None = None) -> None:
        super().__init__()
        self._config = config
        urls = find_endpoints(config)
        if len(urls) > 1:
            raise ConfigError(
                "store.master",
                f"a master has one address, not {config.master!r}",
                field="store.master",
            )
        self._url = urls[0]
        self._rpc = make_rpc_config(RpcConfig() if rpc is None else rpc, config)
        self._server: RpcServer
        self._page: MetricsPage | None = None
        self._corruption = CorruptionLog()
        self._backend: EtcdBackend | None = None
        self.elected: ElectedMaster[StoreMaster]

    @property
    def endpoint(self) -> str:
        """The address that the server listens at."""
        return self._server.endpoint

    @property
    def epoch(self) -> int:
        """Epoch of the current term; 0 while another process leads."""
        return self.elected.master.epoch

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of ``GET /metrics``; None if it is off."""
        return None if self._page is None else self._page.address

    async def _start(self, opening: contextlib.AsyncExitStack) -> None:
        config, url = self._config, self._url
        listen = config.listen or (choose_master_address(url),)
        engine = make_engine(config, url, "store master", listen)
        opening.push_async_callback(asyncio.to_thread, engine.close, deadline_s=2.0)
        self._server = RpcServer(
            url,
            identity=identify("store master", "store_master"),
            auth=auth_for(config, url),
            config=self._rpc,
            check_compat=check_version,
            lanes=LaneRouter(EngineLanes(engine)),
        )
        self.elected = ElectedMaster(self._make_master, end_sessions=self._server.end_sessions)
        opening.push_async_callback(self.elected.aclose)
        for method in self.elected.methods():
            self._server.register(*method)
        self._server.on_peer_lost(self._note_caller_lost)
        if config.election.backend == "none":
            self.elected.take(next_epoch(state_folder(url), self._corruption))
        self._server.start()
        opening.push_async_callback(self._server.aclose)
        if config.election.backend == "etcd":
            await self._start_campaign(opening)
        if config.metrics_port:
            self._page = MetricsPage(config.metrics_port, self._list_metrics)
            opening.push_async_callback(self._page.aclose)
        logger.info("event=master_up endpoint=%s epoch=%d", self.endpoint, self.epoch)

    def _make_master(self, epoch: int, term: Term | None, counters: StoreCounters) -> StoreMaster:
        return StoreMaster(
            self._config,
            clock=MonotonicClock(),
            epoch=epoch,
            draw=secrets.randbelow,
            term=term,
            roster=self._open_roster(epoch) if epoch else None,
            counters=counters,
            damaged=self._corruption.names,
        )

    def _open_roster(self, epoch: int) -> RosterStore:
        """Return the storage of the roster (the list of the store's hosts): etcd with an election,
        else files in this master's folder.
        """
        if self._backend is None:
            url = self._server.endpoint
            path = parse_endpoint(url).path
            name = make_file_name(url.partition("://")[2] if path is None else path.name)
            return FileRosterStore(state_folder(url), name, self._corruption)
        from tandem.store.election.etcd_roster import EtcdRosterStore

        timeout_s = self._config.election.timeout_ms / 1e3
        holder = Holder(self._address, epoch)
        return EtcdRosterStore(
            self._backend, holder, timeout_s=timeout_s, corruption=self._corruption
        )

    @property
    def _address(self) -> str:
        """The address at which other processes reach this master."""
        return self._config.election.address or self.endpoint

    def _note_caller_lost(self, peer: Peer, _: TandemError) -> None:
        self.elected.on_caller_lost(peer)

    async def _start_campaign(self, opening: contextlib.AsyncExitStack) -> None:
        from tandem.store.election.etcd import EtcdBackend

        election, clock = self._config.election, BootClock()
        backend = await opening.enter_async_context(EtcdBackend(election, clock=clock))
        self._backend = backend
        self.elected.campaign = Campaign(
            backend,
            clock=clock,
            address=self._address,
            ttl_s=election.ttl_s,
            timeout_s=election.timeout_ms / 1e3,
            on_elected=self.elected.take,
            on_deposed=self.elected.leave,
        )
        running = asyncio.create_task(self.elected.campaign.run())
        opening.push_async_callback(_end_task, running)

    def _list_metrics(self) -> "list[Metric]":
        elected = self.elected
        status, channel = elected.master.status(), self._server.counters
        return list_families(Figures(status, elected.counters, channel, elected.is_leader))


async def _end_task(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
