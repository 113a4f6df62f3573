"""The instance process: one model, one engine, served over the control channel.

Two threads. The main thread loads the model and runs the engine's steps; the other runs the control
channel's event loop, so that a request is accepted, refused or cancelled while a step is computed.
The results of a step go to each server as one event.

The supervisor of a server or of a launcher (``tandem.engine.process.supervisor``) has the process
forked (``tandem.engine.process.fork_server``) and sends the configuration as one line on its
standard input. The process ends when that input is closed, so it does not outlive its starter. Any
number of servers may connect; when one is lost, or its lease ends, its requests are cancelled.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tandem.core.adapter import AdapterInfo, AdapterSource
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import CapacityError, TandemError
from tandem.core.instance_status import InstanceRole, InstanceStats, Statistics, sum_stats
from tandem.core.kv_layout import MlaLayout
from tandem.core.logs import configure_logging
from tandem.core.loop_calls import LoopThread
from tandem.core.wire import (
    WIRE_VERSION,
    CancelRequest,
    InstanceStage,
    ReleaseHold,
    StageChanged,
)
from tandem.engine.config import EngineConfig, KvEventConfig
from tandem.engine.kv_events import KvEventPublisher
from tandem.engine.process.instance_api import InstanceApi
from tandem.engine.process.inventory import BlockInventory
from tandem.engine.process.methods import METHODS, STATS, InstanceMethod
from tandem.engine.process.self_test import SelfTest
from tandem.engine.tiers.config import TierConfig
from tandem.models.config import ModelConfig
from tandem.rpc import Auth, Peer, RpcConfig, RpcServer, make_identity
from tandem.store.config import StoreConfig
from tandem.transfer.config import TransferConfig

if TYPE_CHECKING:
    from tandem.engine.adapters import AdapterTable
    from tandem.engine.build import BuiltEngine
    from tandem.engine.disaggregation.exchange import KvExchange
    from tandem.engine.stepping.expert_log import ExpertLog
    from tandem.engine.tiers.planner import CostTierPlanner
    from tandem.engine.tiers.service import TierService
    from tandem.models.loading.packed_writer import PackedWriter

__all__ = [
    "INSTANCE_ROLE",
    "PROCESS_NAME",
    "SERVER_ROLE",
    "InstanceSpec",
    "compat_facts",
    "main",
]

logger = logging.getLogger(__name__)

INSTANCE_ROLE = "instance"
PROCESS_NAME = "tandem-instance"
"""Name of an instance's process in `ps` and `top`, at most 15 characters."""
SERVER_ROLE = "server"
IDLE_WAIT_S = 0.5
PROGRESS_INTERVAL_S = 0.1
STORE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""Time limit in seconds of the first attempt to reach the store; if it fails, the instance serves
without the store."""


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an instance process, sent to it when it starts."""

    name: str = "instance-0"
    endpoint: str = ""
    """Endpoint to listen on, chosen by the launcher."""
    secret: str | None = None
    """Secret of the cluster, by which servers on other machines authenticate; None for a Unix
    socket."""
    role: InstanceRole = "unified"
    cores: tuple[int, ...] = ()
    """CPUs that the instance computes on; empty: all that are allowed."""
    num_siblings: Annotated[int, Meta(ge=1)] = 1
    """Number of instances that share the machine's memory, this one included."""
    model: ModelConfig
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters to load before serving; the reply to ``info`` lists those that failed."""
    engine: EngineConfig
    rpc: RpcConfig
    tiers: TierConfig = msgspec.field(default_factory=TierConfig)
    store: StoreConfig | None = None
    """Settings of the store of KV, which outlives requests and this process; None: there is no
    store."""
    transfer: TransferConfig | None = None
    """Settings of the transfer engine that moves blocks between instances, with their common
    secret; None: this instance exchanges no blocks."""
    tells_blocks: bool = False
    """True if the instance reports to servers which blocks it has, so that they can route by
    them."""
    kv_events: KvEventConfig = msgspec.field(default_factory=KvEventConfig)
    log_level: str = "info"
    log_format: str = "text"


def compat_facts() -> dict[str, str]:
    """Return the facts in which a server and an instance must agree to connect, now the version of
    their wire format.
    """
    return {"wire_version": str(WIRE_VERSION)}


class Instance:
    """State that the two threads of an instance process share: the stage, the engine once it
    exists, and which server sent which request.
    """

    def __init__(self, spec: InstanceSpec) -> None:
        self._spec = spec
        self._server = RpcServer(
            spec.endpoint,
            identity=make_identity(spec.name, INSTANCE_ROLE, compat=compat_facts()),
            auth=Auth.for_endpoint(spec.endpoint, spec.secret),
            config=spec.rpc,
        )
        self._stage = StageChanged(InstanceStage.STARTING)
        self._api: InstanceApi | None = None
        self._tier: TierService | None = None
        self._read_expert_hits: Callable[[], Statistics] | None = None
        self._read_latents: Callable[[], Statistics] | None = None
        self._exchange: KvExchange | None = None
        self._events: KvEventPublisher | None = None
        self._packed_writer: PackedWriter | None = None
        self._experts: ExpertLog | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._has_loaded = threading.Event()
        self._register()

    # The methods below run on the event loop.

    def _register(self) -> None:
        server = self._server
        for method in METHODS:
            handler = partial(self._handle, method)
            server.register(method.name, handler, method.request_type, method.response_type)
        server.on_event(self._take_event, CancelRequest | ReleaseHold)
        server.on_peer(lambda peer: peer.push(self._stage))
        server.on_peer_lost(self._forget_peer)

    def _require_api(self) -> InstanceApi:
        if self._api is None:
            raise CapacityError(
                "instance.add", f"the model is not ready, stage {self._stage.stage}: try again"
            )
        return self._api

    async def _handle(self, method: InstanceMethod[Any, Any], peer: Peer, request: Any) -> Any:
        # Every method is a coroutine, so that calls received in one iteration of the event loop
        # begin in the order in which they came.
        if self._api is None and method is STATS:
            return InstanceStats(stage=self._stage.stage)
        return await self._require_api().handle(method, peer, request)

    def _take_event(self, peer: Peer, event: CancelRequest | ReleaseHold) -> None:
        # Defer the event to the next iteration of the loop: the ``_add`` call of its request may
        # have been received in this iteration, and begins only in the next one.
        if self._api is not None:
            asyncio.get_running_loop().call_soon(self._api.take_event, peer, event)

    def _read_stats(self) -> InstanceStats:
        engine = self._require_api().engine
        parts = [engine.get_stats(), engine.counters]
        if self._read_expert_hits is not None:
            parts.append(self._read_expert_hits())
        if self._read_latents is not None:
            parts.append(self._read_latents())
        if self._tier is not None:
            parts += [self._tier.counters, Statistics(store_links={self._tier.state: 1})]
        if self._exchange is not None:
            parts += [self._exchange.counters, self._exchange.rails]
        return sum_stats(self._stage.stage, parts)

    def _forget_peer(self, peer: Peer, error: TandemError) -> None:
        if self._api is not None:
            self._api.forget_peer(peer, error)

    def _push_stage(self) -> None:
        for peer in self._server.peers:
            with contextlib.suppress(TandemError):
                peer.push(self._stage)

    # The methods below are called on the event loop and on the main thread.

    def set_stage(self, stage: StageChanged) -> None:
        """Set the instance's stage (loading, ready, ...), or the progress within it, and tell the
        servers. Any thread.
        """
        if stage.stage is not self._stage.stage:
            logger.info("event=stage stage=%s detail=%r", stage.stage, stage.detail)
        self._stage = stage
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._push_stage)

    def stop(self) -> None:
        """Tell the main thread to stop once it has loaded the model. Any thread."""
        self._stopping.set()

    @property
    def is_loading(self) -> bool:
        """True while the model loads, so that ending the process interrupts no request."""
        return not self._has_loaded.is_set() and self._stage.stage is not InstanceStage.FAILED

    # The methods below run on the main thread.

    def run(self) -> int:
        """Serve until told to stop; return the process's exit status."""
        channel = LoopThread("rpc")
        channel.run(self._server.__aenter__())
        self._loop = channel.loop
        try:
            self._load()
            self._has_loaded.set()
            if not self._run_engine():
                return 1
        except TandemError as error:
            # The server reports the failure; an ERROR line here would print it twice.
            logger.info("event=instance_failed error=%s", error)
            self.set_stage(StageChanged(InstanceStage.FAILED, error.what))
            # Stay alive in the stage FAILED: a restart would fail for the same reason, so the
            # server decides.
            self._stopping.wait()
            return 1
        finally:
            if self._exchange is not None:
                self._exchange.close()
            if self._tier is not None:
                self._tier.stop()
            if self._events is not None:
                self._events.close()
            if self._packed_writer is not None:
                self._packed_writer.close()
            if self._experts is not None:
                self._experts.close()
            with contextlib.suppress(TimeoutError):
                channel.run(self._server.__aexit__(None, None, None), CLOSE_TIMEOUT_S)
            channel.close(CLOSE_TIMEOUT_S)
        return 0

    def _load(self) -> None:
        begin_s = time.monotonic()
        from tandem.engine.build import build_engine

        self.set_stage(StageChanged(InstanceStage.LOADING, "reading the configuration"))
        reported_s = 0.0

        def show(done: int, total: int, what: str) -> None:
            nonlocal reported_s
            now_s = time.monotonic()
            if now_s - reported_s >= PROGRESS_INTERVAL_S or done == total:
                reported_s = now_s
                self.set_stage(StageChanged(InstanceStage.LOADING, what, done, total))

        tiers = None if self._spec.store is None else self._spec.tiers
        clock = MonotonicClock()
        allocate = allocate_states = allocate_windows = None
        if self._spec.transfer is not None:
            from tandem.engine.disaggregation.exchange import KvExchange

            self._exchange = KvExchange(self._spec.name, self._spec.transfer, clock)
            allocate = self._exchange.allocate
            allocate_states = self._exchange.allocate_states
            allocate_windows = self._exchange.allocate_windows
        built = build_engine(
            self._spec.model,
            self._spec.engine,
            clock,
            show,
            tiers=tiers,
            allocate=allocate,
            allocate_states=allocate_states,
            allocate_windows=allocate_windows,
            num_siblings=self._spec.num_siblings,
        )
        self._read_expert_hits = built.read_expert_hits
        self._read_latents = built.read_latents
        adapters, loaded, failures = self._load_adapters(built)
        if built.planner is not None and self._spec.store is not None:
            self._open_tier(built, built.planner, self._spec.store, clock)
        if self._exchange is not None and built.model.plan.own is None:
            layout, cache = built.cache.layout, built.cache
            self._exchange.attach(
                built.engine,
                built.identity,
                layout,
                cache.num_blocks,
                self._tier,
                None if built.states is None else built.states.layout,
                built.windows,
            )
        if self._spec.kv_events.endpoint:
            layout = built.cache.layout
            kind = "mla_attention" if isinstance(layout, MlaLayout) else "full_attention"
            self._events = KvEventPublisher(
                self._spec.kv_events,
                block_size=layout.block_size,
                now=lambda: datetime.now(UTC).timestamp(),
                kv_kind=kind if built.states is not None or built.windows is not None else "",
                window=0 if built.windows is None else built.windows.window,
            )
            built.prefixes.observers.append(self._events)
        inventory = None
        if self._spec.tells_blocks:
            inventory = BlockInventory("off" if tiers is None else tiers.write)
            built.prefixes.observers.append(inventory)
        info = msgspec.structs.replace(
            built.info,
            pid=os.getpid(),
            load_seconds=time.monotonic() - begin_s,
            adapters=loaded,
            adapter_failures=failures,
            kv_peer=None if self._exchange is None else self._exchange.peer,
        )
        reader = None if self._exchange is None else self._exchange.reader
        self._api = InstanceApi(
            self._spec.name,
            built.engine,
            clock,
            self._tier,
            reader,
            adapters,
            info=info,
            role=self._spec.role,
            inventory=inventory,
            read_stats=self._read_stats,
            read_experts=None if built.experts is None else built.experts.read,
            read_load_speed=None if built.planner is None else built.planner.read_load_speed,
        )
        self._experts = built.experts
        self.set_stage(StageChanged(InstanceStage.READY))
        self._packed_writer = built.model.packed_writer
        if self._packed_writer is not None:
            self._packed_writer.start()

    def _load_adapters(
        self, built: "BuiltEngine"
    ) -> "tuple[AdapterTable | None, list[AdapterInfo], dict[str, str]]":
        """Load the first adapters; return their table, the loaded ones, and errors by name of the
        others.
        """
        config = self._spec.model
        if not (config.adapter or config.adapter_folder):
            return None, [], {}
        from tandem.engine.adapters import AdapterTable

        folder = Path(config.adapter_folder).resolve() if config.adapter_folder else None
        model = built.model.enable_adapters(config.max_adapters)
        table = AdapterTable(model, built.engine, built.identity, folder)
        return table, *table.load_first(self._spec.adapters)

    def _open_tier(
        self, built: "BuiltEngine", planner: "CostTierPlanner", store: StoreConfig, clock: Clock
    ) -> None:
        from tandem.engine.tiers.mirror import MirroredSink, MirroredTransfers
        from tandem.engine.tiers.service import TierService

        mirror = built.mirror
        tier = TierService(
            store,
            self._spec.rpc,
            self._spec.tiers,
            built.view_groups(),
            block_size=built.cache.layout.block_size,
            identity=built.identity.digest.hex(),
            clock=clock,
            on_load=planner.note_load,
        )
        if mirror is None:
            built.engine.attach_transfers(tier)
            tier.start(built.engine, timeout_s=STORE_TIMEOUT_S)
        else:
            built.engine.attach_transfers(MirroredTransfers(tier, mirror))
            tier.start(MirroredSink(built.engine, mirror), timeout_s=STORE_TIMEOUT_S)
        self._tier = tier

    def _run_engine(self) -> bool:
        """Run steps until told to stop; return False if the engine can answer nobody any more, so
        that a new process should take its place.
        """
        api = self._require_api()
        test = SelfTest(api.engine, api.info.vocab_size)
        while not self._stopping.is_set():
            outputs = api.engine.step() if api.engine.wait_for_work(IDLE_WAIT_S) else []
            api.deliver(test.take(outputs))
            if test.failure:
                logger.error("event=instance_broken error=%r", test.failure)
                return False
        return True


def read_spec(line: bytes) -> InstanceSpec:
    """Decode the instance's settings from the line on standard input."""
    return msgspec.json.decode(line, type=InstanceSpec)


class _ServerWatch:
    """A thread that watches standard input, and ends this process when the server closes the other
    end.
    """

    def __init__(self) -> None:
        self.instance: Instance | None = None
        """Instance to stop; None until the settings have arrived."""
        self._input = select.poll()
        # Watch only for hang-up: the main thread reads the input itself.
        self._input.register(sys.stdin.fileno(), select.POLLHUP | select.POLLRDHUP)
        threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    def _run(self) -> None:
        self._input.poll()
        if self.instance is not None:
            logger.info("event=server_gone")
        self.stop()

    def stop(self) -> None:
        """Stop the instance or, if there is none yet, end the process at once."""
        if self.instance is None or self.instance.is_loading:
            os._exit(0)
        self.instance.stop()


def main() -> int:
    """Be an instance, in a process that was forked for it; return the exit status."""
    # `ps` and `top` show this name; the command line is that of the process that was forked.
    Path("/proc/self/comm").write_text(PROCESS_NAME)
    # A fork copies NumPy's random state; Python draws its own again.
    import numpy as np

    np.random.seed()
    watch = _ServerWatch()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # End of input: the server has ended, or does not need this process.
    spec = read_spec(line)
    configure_logging(spec.name, spec.log_level, spec.log_format)
    if spec.cores:
        # Threads started later inherit the affinity.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), spec.cores)
    instance = watch.instance = Instance(spec)
    signal.signal(signal.SIGTERM, lambda _, __: watch.stop())
    return instance.run()
