"""Measurement of the path to a segment: round-trip times and throughput of each transport.

Measuring only reads the peer's memory, into memory of its own, so it does not change a peer that
serves others.
"""

import time
from typing import Literal

import msgspec

from tandem.core.errors import TandemError
from tandem.transfer.batch import Op, Transfer
from tandem.transfer.buffer import Buffer, RemoteBuffer
from tandem.transfer.engine import TransferEngine
from tandem.transfer.segment import Segment

__all__ = ["PathReport", "PathTransport", "measure_path"]

SMALL_BYTES = 4096
LARGE_BYTES = 16 * 2**20
NUM_SMALL = 51
MEASURE_S = 0.3


class PathTransport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one transport on a path. Values are None, with the reason, if the transport
    cannot be used.
    """

    transport: Literal["shm", "cma", "tcp"]
    latency_us: float | None
    """Median time of a READ of 4 KiB (less if the buffer is shorter), microseconds."""
    throughput_gbps: float | None
    """Gigabits of data a second: the best READ of up to 16 MiB in about a third of a second."""
    reason: str = ""


class PathReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measured properties of the path from this process to another one's memory."""

    peer: str
    name: str
    round_trip_us: float
    """Median round-trip time of a query on the control connection, microseconds."""
    buffer: str | None
    """Name of the buffer that was read; None if the peer offers none, so that no transport was
    measured.
    """
    transports: list[PathTransport]
    rails: list[str]


def measure_path(engine: TransferEngine, address: str, *, deadline_s: float = 10.0) -> PathReport:
    """Measure the path from an engine to the segment at ``host:port``.

    Args:
        engine: has the cluster's secret; its settings determine the rails (paths between pairs of
            NICs).
        address: the peer's address.
        deadline_s: for each step, seconds.

    Raises: as ``TransferEngine.open``.
    Cost: about two seconds, in which it uses the path's full bandwidth.
    """
    with engine.open(address, deadline_s=deadline_s) as segment:
        trips: list[float] = []
        for _ in range(NUM_SMALL):
            begin = time.perf_counter()
            segment.refresh(deadline_s)
            trips.append(time.perf_counter() - begin)
        readable = [buffer for buffer in segment.buffers.values() if buffer.can_read]
        # Choose shared memory, which every transport reaches, and a long buffer, which gives better
        # throughput figures.
        remote = max(readable, key=lambda b: (b.is_shared, b.length), default=None)
        transports = []
        if remote is not None:
            local = engine.allocate(min(remote.length, LARGE_BYTES))
            with local:
                for name in ("shm", "cma", "tcp"):
                    transports.append(  # noqa: PERF401 - one at a time, they would disturb each other
                        _measure(engine, segment, remote, local, name, deadline_s)
                    )
        return PathReport(
            peer=address,
            name=segment.name,
            round_trip_us=_median(trips) * 1e6,
            buffer=None if remote is None else remote.name or f"@{remote.offset}",
            transports=transports,
            rails=[f"{rail.local or 'any'} -> {rail.remote}" for rail in segment.rails],
        )


def _measure(
    engine: TransferEngine,
    segment: Segment,
    remote: RemoteBuffer,
    local: Buffer,
    transport: Literal["shm", "cma", "tcp"],
    deadline_s: float,
) -> PathTransport:
    def read(length: int) -> float:
        transfer = Transfer(Op.READ, local, segment, remote.offset, length)
        begin = time.perf_counter()
        engine.submit([transfer], transport=transport, deadline_s=deadline_s).wait()
        return time.perf_counter() - begin

    try:
        small = min(SMALL_BYTES, remote.length)
        read(small)
        latency_s = _median([read(small) for _ in range(NUM_SMALL)])
        large = min(LARGE_BYTES, remote.length)
        best_s = read(large)
        end = time.monotonic() + MEASURE_S
        while time.monotonic() < end:
            best_s = min(best_s, read(large))
    except TandemError as error:
        return PathTransport(
            transport=transport, latency_us=None, throughput_gbps=None, reason=str(error)
        )
    return PathTransport(
        transport=transport,
        latency_us=latency_s * 1e6,
        throughput_gbps=large * 8 / best_s / 1e9,
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
