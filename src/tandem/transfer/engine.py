"""The transfer engine of a process: moves bytes between registered memory of processes.

This is the Python interface; threads, sockets and copies are native (``native/transfer``). Every
call may come from any thread and releases the GIL while it waits. After a fork the engine belongs
to the parent process: in the child every call raises ConflictError, so make a new engine there.
"""

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import msgspec

from tandem._native import (
    CoreBatch,
    CoreOptions,
    HostMemory,
    PreparedTransfers,
    SegmentDescription,
    SharedArray,
    TransferCore,
    has_gmac,
)
from tandem.core.config import check_text
from tandem.core.errors import ConfigError, ConflictError, DeadlineError, NotFoundError
from tandem.transfer.batch import Batch, Op, PreparedBatch, Range, Transfer
from tandem.transfer.buffer import Buffer, wrap_memory
from tandem.transfer.calls import (
    AwaitedCall,
    CallHandler,
    PendingCall,
    begin_awaited,
    serve_on_loop,
    start_serving,
)
from tandem.transfer.config import TransferConfig, TransportName
from tandem.transfer.nics import load_topology, plan_nics
from tandem.transfer.segment import FileSegment, Segment

__all__ = ["Notification", "TransferEngine"]

logger = logging.getLogger(__name__)

Remote = bool | Literal["read", "write"]
"""The access of peers to a buffer: True for reads and writes, False for none, or one of the two."""

MAX_NOTIFICATION_BYTES = 1 << 20
MAX_ADDRESS = 2**63
"""Upper bound of offsets and lengths, so that no sum of two overflows."""

_unreturned: list[dict[int, HostMemory | SharedArray]] = []
"""Memory of closed engines that a peer still maps. It is freed only with the process."""


class Notification(msgspec.Struct, frozen=True):
    """A message that a peer sent beside its transfers."""

    peer: str
    name: str
    payload: bytes


class TransferEngine:
    """This process's segment, and access to those of other processes. A context manager.

    Order of writes: once an operation of this process has ended, none of its bytes arrive after a
    later operation of this process on the same range has succeeded, whichever engine, segment or
    transport either uses. After a failed WRITE, the next operation towards that peer may first wait
    for the peer's answer.

    There is no such promise against *another* process that is merely stopped: it continues its
    WRITE when it runs again. Only its death fences it, or the end of a registration that no other
    writer shares. So give each writer its own registration, and ``unregister`` it before the range
    is given to the next.

    Args:
        config: without a ``secret`` this engine cannot be reached and can open no segment.

    Raises: ConfigError (a setting does not fit this host); ConflictError (an address is in use);
        CapacityError (no more threads or files).
    """

    def __init__(self, config: TransferConfig | None = None) -> None:
        self.config = config = TransferConfig() if config is None else config
        self._has_warned = False
        self.name = config.name or f"{socket.gethostname()[:150]}:{os.getpid()}"
        has_secret = config.secret is not None
        secret = config.secret.encode() if config.secret is not None else os.urandom(32)
        self.topology = load_topology(config)
        """Topology of this host, or the one of ``topology_file``."""
        nics = plan_nics(config, self.topology)
        options = CoreOptions()
        options.name = self.name
        options.secret = secret
        options.listen = list(config.listen) if has_secret else []
        options.advertise = list(config.advertise)
        options.local_addresses = list(config.local_addresses)
        options.bandwidths_bytes_per_s = [gbps * 1e9 / 8 for gbps in nics.rail_gbps]
        options.lanes = config.lanes
        options.transports = list(config.transports)
        options.io_threads = config.io_threads
        options.copy_threads = config.copy_threads
        options.spin_us = config.polling_us
        options.lease_ms = config.lease_ms
        options.handshake_timeout_ms = config.handshake_timeout_ms
        options.stall_ms = config.stall_ms
        options.min_slice_bytes = config.min_slice_bytes
        options.max_slice_bytes = config.max_slice_bytes
        options.max_connections = config.max_connections
        options.max_notifications = config.max_notifications
        options.socket_buffer_bytes = config.socket_buffer_bytes
        options.checksum = config.checksum
        options.tags = config.tags
        options.file_backend = config.file_backend
        options.penalties = nics.penalties
        options.quota_boards = nics.quota_boards
        options.quota_weight = 1.0 if config.nic_weight is None else config.nic_weight
        self.core = TransferCore(options)
        self._warn_of_slow_tags(has_secret and not _are_loopback(config.listen))
        self._held: dict[int, HostMemory | SharedArray] = {}
        # Address of each opened segment by id; empty for a file.
        self._segments: dict[int, str] = {}
        self._is_closed = False
        self.local_segment = Segment(self, 0, "")
        # Threads that run the handler of calls, to be joined when the engine closes; empty without
        # a handler.
        self._threads: list[threading.Thread] = []
        self._finalizer = weakref.finalize(
            self, _shut_down, self.core, self._held, self._threads, 1.0
        )

    def __repr__(self) -> str:
        return f"TransferEngine(name={self.name!r}, addresses={self.core.addresses})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _warn_of_slow_tags(self, leaves_host: bool) -> None:
        tags = self.config.tags
        is_slow = tags == "hmac" or not has_gmac()
        if self._has_warned or not is_slow or not (tags in ("always", "hmac") or leaves_host):
            return
        self._has_warned = True
        logger.warning(
            "tags of connections are made by HMAC-SHA256, %s: tcp takes several times as long as "
            "with GMAC; `tandem bench transfer --cases '*tags=*'` tells how much",
            "as TransferConfig.tags says"
            if tags == "hmac"
            else "since there is no libcrypto (OpenSSL)",
        )

    @property
    def is_closed(self) -> bool:
        """True if ``close`` was called."""
        return self._is_closed

    @property
    def addresses(self) -> list[str]:
        """The addresses that the engine listens on, with their ports; empty without a secret."""
        return self.core.addresses

    @property
    def address(self) -> str:
        """The first of ``addresses``.

        Raises: NotFoundError if the engine listens on none.
        """
        if not self.core.addresses:
            raise NotFoundError(
                "transfer.address", "the engine listens nowhere: give it a secret", field="secret"
            )
        return self.core.addresses[0]

    @property
    def epoch(self) -> int:
        """A random number that distinguishes this run from any other with the same name."""
        return self.core.epoch

    def allocate(
        self,
        nbytes: int,
        *,
        name: str = "",
        location: str = "cpu",
        remote: Remote = True,
        reserved_bytes: int | None = None,
    ) -> Buffer:
        """Allocate zeroed, registered memory that peers of the same user on this host can map.

        Its bytes are ``Buffer.array``. They are freed with the last array, here and in peers.

        Args:
            nbytes: at least 1.
            name: name by which peers find the buffer; unique in this engine.
            location: where the memory lies, ``cpu:0``.
            remote: the access of peers.
            reserved_bytes: bytes from the start that are reserved now. The rest has only addresses
                until ``Buffer.reserve``: transfers and peers are refused, and touching it here ends
                the process. None for all.

        Raises: ConfigError (size); ConflictError (name in use); CapacityError (out of memory).
        """
        if not 0 <= nbytes < MAX_ADDRESS:
            raise ConfigError(
                "transfer.allocate", f"{nbytes} bytes: give 1 or more", field="nbytes"
            )
        self._check_open()
        return self._add(SharedArray(nbytes, reserved_bytes), name, location, remote)

    def register(
        self,
        buffer: Any,
        *,
        location: str = "*",
        remote: Remote = True,
        name: str = "",
        file: int = -1,
        file_offset: int = 0,
    ) -> Buffer:
        """Register memory of the caller, which transfers then read and write in place.

        Args:
            buffer: a contiguous array, CPU tensor (DLPack), bytearray, memoryview ...; kept alive
                until it is unregistered. Read-only memory can be sent, not received into.
            location: where the memory lies, ``cpu:0``; ``*`` if unknown.
            remote: the access of peers.
            name: name by which peers find the buffer; unique in this engine.
            file: descriptor of the file that ``buffer`` is a shared mapping of, so that peers of
                the same user on this host map it too; it stays open while the buffer is registered.
                A process that shortens the file may kill them. While any process may write to the
                file through a grant, it holds a shared lock on it (``F_OFD_SETLK``).
            file_offset: offset in the file at which the buffer begins, bytes.

        Raises: UnsupportedError (not host memory); ShapeError (strided); ConflictError (name in
            use, engine closed); ConfigError (no bytes; no mapping of the file);
            PermissionDeniedError (the file has another owner, or others may write to it).
        """
        self._check_open()
        if not 0 <= file_offset < MAX_ADDRESS:
            raise ConfigError(
                "transfer.register", f"offset {file_offset} of a file", field="file_offset"
            )
        return self._add(wrap_memory(buffer), name, location, remote, file, file_offset)

    def unregister(self, buffer: Buffer, *, deadline_s: float | None = None) -> None:
        """End the registration of a buffer. After the return no transfer and no peer touches the
        memory.

        Raises: NotFoundError if it is not registered; DeadlineError if transfers still run or a
            peer on this host does not unmap it: the buffer then takes no new transfers, and the
            call may be repeated.
        """
        self._check_open()
        if buffer._engine is not self or not buffer._is_registered:
            raise NotFoundError("transfer.unregister", f"{buffer!r} is not registered here")
        self.core.unregister(buffer.offset, self._deadline(deadline_s))
        buffer._release()
        self._held.pop(buffer.offset, None)

    def open(self, address: str, *, deadline_s: float | None = None) -> Segment:
        """Connect to the engine at ``host:port``; both sides prove the secret.

        Raises: PermissionDeniedError (secrets differ); UnsupportedError (versions differ);
            PeerLostError (no engine there); DeadlineError (no answer in time); ConfigError
            (malformed address).
        """
        self._warn_of_slow_tags(not _are_loopback([address]))
        segment_id = self.core.open(address, self._deadline(deadline_s))
        self._segments[segment_id] = address
        return Segment(self, segment_id, address)

    def open_file(
        self,
        path: str | os.PathLike[str],
        *,
        length: int | None = None,
        writable: bool = False,
        direct: bool = False,
    ) -> FileSegment:
        """Open a file as a segment whose addresses are the file's offsets.

        Args:
            path: a regular file.
            length: create a missing file with this many bytes, reserved on the disk, mode 0600; an
                existing one must have this length. None if the file must exist.
            writable: True to allow WRITE.
            direct: True to bypass the page cache where offset and length are multiples of 4096;
                see ``FileSegment.is_direct``.

        Raises: NotFoundError (no such file); PermissionDeniedError (the system
            forbids it); ConflictError (another length); CapacityError (disk full); ConfigError (no
            regular file, empty); UnsupportedError (io_uring is demanded and refused).
        """
        if length is not None and not 1 <= length < MAX_ADDRESS:
            raise ConfigError(
                "transfer.open_file", f"{length} bytes: give 1 or more", field="length"
            )
        segment_id = self.core.open_file(
            os.fspath(path), writable=writable, create_bytes=length or 0, direct=direct
        )
        self._segments[segment_id] = ""
        return FileSegment(self, segment_id, os.fspath(path))

    def close_segment(self, segment: Segment) -> None:
        """Close an opened segment; see ``Segment.close``."""
        self.core.close_segment(segment.id)
        self._segments.pop(segment.id, None)

    @property
    def peer_addresses(self) -> dict[int, str]:
        """The addresses of open segments of other processes, by segment id."""
        return {id_: address for id_, address in self._segments.copy().items() if address}

    def has_segment(self, segment: Segment) -> bool:
        """Return True if the segment was opened by this engine and not closed."""
        return segment.id in self._segments

    def describe(self, segment_id: int, deadline_s: float | None = None) -> SegmentDescription:
        """Ask a segment for its name and buffers. Programs call ``Segment.refresh``."""
        return self.core.describe(segment_id, self._deadline(deadline_s))

    def submit(
        self,
        transfers: Iterable[Transfer],
        *,
        deadline_s: float | None = None,
        transport: TransportName | None = None,
    ) -> Batch:
        """Start to move ranges; returns without waiting.

        Args:
            transfers: in any order; ranges should not overlap.
            deadline_s: seconds from now; None for ``deadline_ms`` of the configuration. The batch
                ends by then, awaited or not.
            transport: the only transport to use; None for any.

        Raises: without moving anything: NotFoundError (buffer or segment unknown); ConfigError
            (beyond the end); PermissionDeniedError (READ into read-only memory); ConflictError
            (engine closed, or belongs to the parent process).
        """
        listed = list(transfers)
        requests = [self._request(transfer) for transfer in listed]
        core = self.core.submit(requests, self._deadline(deadline_s), transport)
        return Batch(self, core, [transfer.length for transfer in listed])

    def submit_ranges(
        self,
        op: Op,
        segment: Segment,
        ranges: Sequence[Range],
        *,
        deadline_s: float | None = None,
        transport: TransportName | None = None,
    ) -> Batch:
        """Start to move many ranges of one segment, like ``submit`` without an object for each.

        Raises: as ``submit``; TypeError for numbers that do not fit in 64 bits.
        """
        segment_id = self._id_of(segment)
        starts: dict[Buffer, int] = {}
        for local in {each[0] for each in ranges}:
            if local._engine is not self:
                raise NotFoundError("transfer.submit", f"{local!r} belongs to another engine")
            starts[local] = local.offset
        number = int(op)
        requests = [
            (number, starts[local], local_offset, segment_id, offset, length)
            for local, local_offset, offset, length in ranges
        ]
        core = self.core.submit(requests, self._deadline(deadline_s), transport)
        return Batch(self, core, [each[3] for each in ranges])

    def prepare(
        self, transfers: Iterable[Transfer], *, transport: TransportName | None = None
    ) -> PreparedBatch:
        """Prepare transfers that will be submitted repeatedly; moves nothing.

        Args:
            transfers: as for ``submit``.
            transport: the only transport to use; None for any.

        Raises: as ``submit`` for errors of a transfer itself. Buffers, segments and rights are
            checked by each submission.
        """
        listed = list(transfers)
        prepared = self.core.prepare([self._request(t) for t in listed], transport)
        return PreparedBatch(self, prepared, [transfer.length for transfer in listed])

    def submit_prepared(self, prepared: PreparedTransfers, deadline_s: float | None) -> CoreBatch:
        """Submit prepared native requests. Programs call ``PreparedBatch.submit``."""
        return self.core.submit_prepared(prepared, self._deadline(deadline_s))

    def notify(
        self, segment: Segment, name: str, payload: bytes = b"", *, deadline_s: float | None = None
    ) -> None:
        """Send a message that appears in the peer's ``notifications`` exactly once.

        Returns when the peer has it. Transfers that ended before are visible to the peer by then.

        Raises: PeerLostError (the connection is lost); CapacityError (too many unread there);
            DeadlineError: it was delivered once or not at all.
        """
        check_text(name, "name")
        if len(payload) > MAX_NOTIFICATION_BYTES or len(name.encode()) > 1024:
            raise ConfigError(
                "transfer.notify",
                f"{len(payload)} bytes, name of {len(name)}: at most {MAX_NOTIFICATION_BYTES} and "
                "1024; bulk bytes are transfers",
                field="payload",
            )
        self.core.notify(segment.id, name, payload, self._deadline(deadline_s))

    def notifications(self, deadline_s: float = 0.0) -> list[Notification]:
        """Return the messages that peers have sent, in order for each peer. Waits for the first
        until the deadline.
        """
        return [Notification(*fields) for fields in self.core.notifications(deadline_s)]

    def serve_calls(
        self, handler: CallHandler, *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Answer peers' calls by ``handler``, which gets them in batches, one batch at a time,
        until the engine is closed.

        Args:
            handler: see ``CallHandler``. It must not block for long, since it delays all callers.
            loop: the event loop on which the handler runs; call this on its thread. None for a
                thread of the engine. A ``PollingLoop`` answers fastest.

        Raises: ConflictError (there is a handler already, or the engine is closed).
        """
        self._check_open()
        if loop is None:
            self._threads.append(start_serving(self.core, handler))
        else:
            serve_on_loop(self.core, handler, loop)

    def call(self, segment: Segment, payload: bytes, *, deadline_s: float | None = None) -> bytes:
        """Send a small request to the peer's handler and wait for the answer, without the GIL.

        Any number of threads may call at once; their calls share a connection and wait only for
        their own answers. A call that returns was executed exactly once.

        Args:
            segment: opened by this engine.
            payload: at most ``MAX_CALL_BYTES``, as the answer.
            deadline_s: seconds from now; None for ``deadline_ms`` of the configuration.

        Raises: the handler's error; UnsupportedError (the peer serves no calls); CapacityError
            (too many unanswered); ConfigError (size); NotFoundError (segment). PeerLostError,
            DeadlineError, CancelledError (engine closed): the call was executed once or not at all,
            and will not be executed after a call that is made from now on.
        """
        return self.core.call(self._id_of(segment), payload, self._deadline(deadline_s))

    def begin_call(self, segment: Segment, payload: bytes) -> PendingCall:
        """Send a request as ``call`` does. The caller may wait for its answer later, or drop it.

        Raises: as ``call``, the errors that are known before the answer.
        """
        return PendingCall(self.core.begin_call(self._id_of(segment), payload))

    async def call_async(
        self, segment: Segment, payload: bytes, *, deadline_s: float | None = None
    ) -> bytes:
        """Send a request and wait for its answer as ``call`` does, without blocking the event loop.
        Cancelling the wait abandons the call.
        """
        return await self.begin_call_async(segment, payload, deadline_s=deadline_s).wait()

    def begin_call_async(
        self, segment: Segment, payload: bytes, *, deadline_s: float | None = None
    ) -> AwaitedCall:
        """Send a request on the running event loop; its answer is awaited later. See
        ``call_async``.
        """
        return begin_awaited(self.core, self._id_of(segment), payload, self._deadline(deadline_s))

    @property
    def quota_rates(self) -> list[float]:
        """Bytes per second that this process may send now by each of its NICs, by its share of the
        board (shared memory in which the host's processes divide a NIC); infinity if not limited.
        """
        return self.core.quota_rates

    def bytes_copied(self, transport: TransportName) -> int:
        """Return the bytes that a transport (local, shm or cma) has copied so far."""
        return self.core.bytes_copied(transport)

    def close(self, *, deadline_s: float | None = None) -> None:
        """End all transfers and registrations, and disconnect from all peers. May be repeated.

        Threads and descriptors are gone on return, or after the last call that another thread still
        makes.

        Raises: DeadlineError if a peer on this host did not unmap a buffer; that memory is then
            kept until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._finalizer.detach()
        _shut_down(self.core, self._held, self._threads, self._deadline(deadline_s))

    def _request(self, transfer: Transfer) -> tuple[int, int, int, int, int, int]:
        local, segment = transfer.local, transfer.segment
        if local._engine is not self or segment._engine is not self:
            raise NotFoundError(
                "transfer.submit", f"{local!r} or {segment!r} belongs to another engine"
            )
        local_offset, offset, length = transfer.local_offset, transfer.offset, transfer.length
        if not (
            0 <= local_offset < MAX_ADDRESS
            and 0 <= offset < MAX_ADDRESS
            and 0 <= length < MAX_ADDRESS
        ):
            raise ConfigError(
                "transfer.submit",
                f"local_offset, offset, length are {local_offset}, {offset}, {length}: give "
                "numbers from 0 to 2^63 - 1",
            )
        op = transfer.op
        if op is not Op.READ and op is not Op.WRITE:
            op = Op(op)
        return op, local.offset, local_offset, segment.id, offset, length

    def _id_of(self, segment: Segment) -> int:
        if segment._engine is not self:
            raise NotFoundError("transfer.call", f"{segment!r} belongs to another engine")
        return segment.id

    def _add(
        self,
        memory: HostMemory | SharedArray,
        name: str,
        location: str,
        remote: Remote,
        file: int = -1,
        file_offset: int = 0,
    ) -> Buffer:
        rights = {
            "name": name,
            "location": location,
            "remote_read": remote in (True, "read"),
            "remote_write": remote in (True, "write"),
        }
        if isinstance(memory, SharedArray):
            offset = self.core.register_shared(memory, **rights)
        else:
            offset = self.core.register_host(memory, **rights, fd=file, file_offset=file_offset)
        self._held[offset] = memory
        return Buffer(self, memory, offset, name=name, location=location)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConflictError("transfer.check", "the engine is closed")

    def _deadline(self, deadline_s: float | None) -> float:
        return self.config.deadline_ms / 1e3 if deadline_s is None else deadline_s


def _shut_down(
    core: TransferCore,
    held: dict[int, HostMemory | SharedArray],
    threads: list[threading.Thread],
    deadline_s: float,
) -> None:
    try:
        core.close(deadline_s)
    except DeadlineError:
        _unreturned.append(dict(held))
        raise
    finally:
        held.clear()
        for thread in threads:
            # A handler may close its own engine, and cannot join its own thread.
            if thread is not threading.current_thread():
                thread.join(deadline_s)


def _are_loopback(addresses: Iterable[str]) -> bool:
    """Return True if all addresses are of loopback, by their text; a host name other than localhost
    is not.
    """
    hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
    return all(host.startswith("127.") or host in ("localhost", "::1") for host in hosts)
