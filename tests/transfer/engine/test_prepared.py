"""Prepared batches, transfers that continue each other, and what is counted."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests_transfer_world import move

from tandem.core.errors import ConfigError, NotFoundError
from tandem.transfer import Op, Transfer
from tandem.transfer.metrics import TRANSFER_METRICS, TransferCollector

MIB = 1 << 20


@pytest.mark.parametrize("transport", ["tcp", "shm", "cma"])
@pytest.mark.parametrize("order", ["adjacent", "scattered", "with_gaps"])
def test_each_transfer_of_a_batch_counts_its_own_bytes(world, transport, order):
    """Adjacent ones travel as one; their statuses stay their own, zero lengths among them."""
    giver, taker = world.engine(), world.engine()
    remote = giver.allocate(4 * MIB)
    segment = taker.open(giver.address)
    rng = np.random.default_rng(4)
    lengths = [int(n) for n in rng.choice([0, 1, 100, 4096, 65536, 200_000], 64)]
    data = world.random(4 * MIB)
    local = taker.register(data)
    transfers, at = [], 0
    for length in lengths:
        transfers.append(
            Transfer(Op.WRITE, local, segment, remote.offset + at, length, local_offset=at)
        )
        at += length + (7 if order == "with_gaps" else 0)
    if order == "scattered":
        transfers = [transfers[i] for i in rng.permutation(len(transfers))]
    batch = taker.submit(transfers, transport=transport)
    batch.wait(60)
    for index, transfer in enumerate(transfers):
        assert batch.status(index).bytes_done == transfer.length
        begin = transfer.local_offset
        expected = data[begin : begin + transfer.length]
        assert np.array_equal(remote.array[begin : begin + transfer.length], expected)
    if order == "with_gaps":
        moved = np.zeros(4 * MIB, bool)
        for transfer in transfers:
            moved[transfer.local_offset : transfer.local_offset + transfer.length] = True
        assert not remote.array[~moved].any()
    parts = taker.core.counters(segment.id)[transport, "write", "parts"]
    assert (parts < 40) == (order == "adjacent")


def test_adjacent_transfers_in_other_segments_stay_apart(world):
    """Ranges that touch here and there are one run only towards the same segment, same way."""
    givers = [world.engine() for _ in range(2)]
    taker = world.engine(transports=("tcp",))
    remotes = [giver.allocate(8192) for giver in givers]
    segments = [taker.open(giver.address) for giver in givers]
    assert remotes[0].offset == remotes[1].offset
    data = world.random(16384)
    local = taker.register(data)
    at = remotes[0].offset
    transfers = [
        Transfer(Op.WRITE, local, segments[i % 2], at + i * 2048, 2048, local_offset=i * 2048)
        for i in range(4)
    ]
    taker.submit(transfers).wait(60)
    for i in range(4):
        there = slice(i * 2048, (i + 1) * 2048)
        assert np.array_equal(remotes[i % 2].array[there], data[there])
        assert not remotes[1 - i % 2].array[there].any()


def test_prepared_batch_is_submitted_again_and_again(world):
    giver, taker = world.engine(), world.engine()
    remote = giver.allocate(MIB)
    segment = taker.open(giver.address)
    data = world.random(MIB)
    local = taker.register(data)
    prepared = taker.prepare(
        [Transfer(Op.WRITE, local, segment, remote.offset, MIB)], transport="shm"
    )
    assert len(prepared) == 1
    for value in range(3):
        data[:] = value + 1
        batch = prepared.submit(deadline_s=10)
        batch.wait()
        assert batch.status(0).is_done
        assert (remote.array == value + 1).all()
    taker.unregister(local)
    with pytest.raises(NotFoundError):
        prepared.submit()
    again = taker.register(data)
    with pytest.raises(NotFoundError):  # Another buffer at the same address is not meant.
        prepared.submit()
    with pytest.raises(ConfigError):
        taker.prepare([Transfer(Op.WRITE, again, segment, -1, 1)])
    with pytest.raises(ConfigError):
        taker.prepare([], transport="pigeon")


def read(engine) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(TransferCollector(engine))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_metrics_count_what_moved(world, tmp_path):
    giver, taker = world.engine(), world.engine()
    remote = giver.allocate(MIB)
    segment = taker.open(giver.address)
    twin = taker.open(giver.address)  # The same peer twice is one series.
    local = taker.register(world.random(MIB))
    for where in (segment, twin):
        move(taker, where, Op.WRITE, local, remote.offset, 1000, transport="tcp")
    move(taker, segment, Op.READ, local, remote.offset, 300, transport="shm")
    move(taker, taker.local_segment, Op.READ, local, local.offset, 50)
    file = taker.open_file(tmp_path / "f", length=100, writable=True)
    move(taker, file, Op.WRITE, local, 0, 100)
    with pytest.raises(ConfigError):
        move(taker, segment, Op.READ, local, remote.offset + MIB - 1, 2)
    seen = read(taker)
    peer = giver.address

    def moved(peer, transport, op):
        labels = f'op="{op}",peer="{peer}",transport="{transport}"'
        return seen[f"tandem:transfer_bytes_total{{{labels}}}"]

    assert moved(peer, "tcp", "write") == 2000
    assert moved(peer, "shm", "read") == 300
    assert moved("", "local", "read") == 50
    assert moved("", "file", "write") == 100
    assert seen['tandem:transfer_batches_total{outcome="done"}'] == 5
    assert seen['tandem:transfer_batches_total{outcome="config"}'] == 1
    assert seen["tandem:transfer_batches_running"] == 0
    assert seen["tandem:transfer_batch_seconds_count"] == 5
    rails = [key for key in seen if key.startswith("tandem:transfer_rail_bytes_total{")]
    assert len(rails) == 1
    assert seen[rails[0]] == 2000
    buckets = [
        value
        for key, value in seen.items()
        if key.startswith("tandem:transfer_rail_slice_seconds_b")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2
    taker.close()
    assert read(taker) == {}


def test_metrics_page_is_the_table():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/reference/transfer_metrics.md").read_text(
        encoding="utf-8"
    )
    rows = [line for line in page.splitlines() if line.startswith("| `tandem:transfer_")]
    assert rows == [
        f"| `{s.name}` | {s.kind} | {', '.join(s.labels) or 'none'} | {s.help} |"
        for s in TRANSFER_METRICS
    ]
