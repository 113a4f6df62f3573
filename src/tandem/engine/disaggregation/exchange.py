"""The exchange of KV between instances: it offers this instance's blocks and reads those of others.

Owns the transfer engine, in whose registered memory the blocks lie, the announcer and the reader.
"""

import contextlib

import msgspec

from tandem._native import RailState
from tandem.core.clock import Clock
from tandem.core.errors import NotFoundError, TandemError
from tandem.core.instance_status import Statistics
from tandem.core.kv_identity import KvIdentity
from tandem.core.kv_layout import KVLayout, WindowLayout
from tandem.core.state_layout import StateLayout
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.announcer import PrefillAnnouncer
from tandem.engine.disaggregation.hand_over import ReadTarget
from tandem.engine.disaggregation.ports import PoolKind
from tandem.engine.disaggregation.reader_service import ReaderService
from tandem.engine.disaggregation.transfer_port import TransferPort
from tandem.engine.engine import Engine
from tandem.engine.transfers import BlockTransfers, TransfersBySource
from tandem.transfer import Buffer, TransferConfig, TransferEngine

__all__ = ["KvExchange"]

BUFFER_NAME = "kv"
STATE_BUFFER_NAME = "states"
WINDOW_BUFFER_NAME = "windows"


class KvExchange:
    """One instance's side of the exchange of KV with other instances.

    Every instance both reads and is read, because its role may change while it runs.

    Args:
        name: name of the instance.
        config: settings of the transfer engine, with the cluster's secret; their ``name`` is
            replaced.
        clock: the engine's clock.
    """

    def __init__(self, name: str, config: TransferConfig, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self.transfer = TransferEngine(msgspec.structs.replace(config, name=name))
        self._buffer: Buffer | None = None
        self._state_buffer: Buffer | None = None
        self._window_buffer: Buffer | None = None
        self.reader: ReaderService | None = None
        """Reader of other instances' blocks; None before ``attach``."""
        self.announcer: PrefillAnnouncer | None = None
        """Announcer of this instance's prefills; None before ``attach``."""
        self.peer: KvPeer | None = None
        """Description of this instance's KV, for instances that read it; None before ``attach``."""

    @property
    def counters(self) -> Statistics:
        """Counters of the blocks read from other instances; zeros if this instance reads none."""
        return Statistics() if self.reader is None else self.reader.counters

    @property
    def rails(self) -> Statistics:
        """Bytes read and live connections, by transport (the kind of connection), for all instances
        that are read.
        """
        moved: dict[str, int] = {}
        links: dict[str, int] = {}
        if self.transfer.is_closed:
            return Statistics()
        core = self.transfer.core
        for segment_id, address in self.transfer.peer_addresses.items():
            try:
                counters, lanes = core.counters(segment_id), core.rails(segment_id)
            except NotFoundError:
                continue  # The peer's segment was closed in the meantime.
            for (transport, _, what), count in counters.items():
                if what == "bytes":
                    rail = f"{transport} {address}"
                    moved[rail] = moved.get(rail, 0) + count
            healthy = sum(lane.state == RailState.HEALTHY for lane in lanes)
            if lanes:
                links[f"tcp {address}"] = healthy
        return Statistics(rail_bytes=moved, rail_links=links)

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate address space for the blocks, which other instances may read but not write.

        The caller reserves physical memory for it, as blocks are used.
        """
        self._buffer = self.transfer.allocate(
            nbytes, name=BUFFER_NAME, remote="read", reserved_bytes=0
        )
        return self._buffer

    def allocate_states(self, nbytes: int) -> Buffer:
        """Allocate physical memory for the state slots (recurrent states), which other instances
        may read but not write.
        """
        self._state_buffer = self.transfer.allocate(nbytes, name=STATE_BUFFER_NAME, remote="read")
        return self._state_buffer

    def allocate_windows(self, nbytes: int) -> Buffer:
        """Allocate physical memory for the window blocks (KV of the sliding-window layers), which
        other instances may read but not write.
        """
        self._window_buffer = self.transfer.allocate(nbytes, name=WINDOW_BUFFER_NAME, remote="read")
        return self._window_buffer

    def attach(
        self,
        engine: Engine,
        identity: KvIdentity,
        layout: KVLayout,
        num_blocks: int,
        tiers: BlockTransfers | None = None,
        states: StateLayout | None = None,
        windows: WindowLayout | None = None,
    ) -> None:
        """Start the announcer (answers other instances' questions about prefills here) and the
        reader (reads blocks from their memory), and attach both to the engine before its first
        step.

        Args:
            engine: the engine; not owned. Its blocks lie in the memory that ``allocate`` made.
            identity: identity of the KV.
            layout: layout of the blocks.
            num_blocks: number of blocks in the pool.
            tiers: moves blocks of other sources, such as the store; None: there are none.
            states: layout of the states in ``allocate_states``; None: the model has none.
            windows: layout of the blocks in ``allocate_windows``; None: sliding-window layers have
                no blocks of their own.
        """
        assert self._buffer is not None, "allocate() comes first"
        memory = self._buffer.array
        own = KvPeer(
            name=self._name,
            addresses=tuple(self.transfer.addresses),
            epoch=self.transfer.epoch,
            identity=identity,
            layout=layout,
            block_bytes=layout.bytes_per_block,
            num_blocks=num_blocks,
            buffer=BUFFER_NAME,
        )
        pools: dict[PoolKind, Buffer] = {"kv": self._buffer}
        state_memory = window_memory = None
        if states is not None and self._state_buffer is not None:
            state_memory = self._state_buffer.array
            pools["states"] = self._state_buffer
            own = msgspec.structs.replace(
                own,
                state_buffer=STATE_BUFFER_NAME,
                state_bytes=states.bytes_per_state,
                num_state_slots=state_memory.nbytes // states.bytes_per_state,
            )
        if windows is not None and self._window_buffer is not None:
            window_memory = self._window_buffer.array
            pools["windows"] = self._window_buffer
            size = windows.layout.bytes_per_block
            own = msgspec.structs.replace(
                own,
                window_buffer=WINDOW_BUFFER_NAME,
                window_block_bytes=size,
                num_window_blocks=window_memory.nbytes // size,
            )
        self.peer = own
        self.announcer = PrefillAnnouncer(
            engine, own, memory, self._clock, state_memory, window_memory
        )
        self.transfer.serve_calls(self.announcer.handle_calls)
        engine.attach_listener(self.announcer)
        port = TransferPort(self.transfer, pools)
        target = ReadTarget(
            port, memory, own, self._clock, Statistics(), state_memory, window_memory
        )
        self.reader = ReaderService(target, engine)
        parts = (self.reader,) if tiers is None else (tiers, self.reader)
        engine.attach_transfers(TransfersBySource(parts))

    def close(self) -> None:
        """End all reads, by this instance and from it. Arrays of its memory stay valid until they
        are freed.
        """
        if self.reader is not None:
            self.reader.stop()
        # Ignore a timeout: a peer that hangs keeps the connection open until this process ends.
        with contextlib.suppress(TandemError):
            self.transfer.close(deadline_s=2.0)
