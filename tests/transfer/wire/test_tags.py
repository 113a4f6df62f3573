"""Tags: nothing that somebody on the path has made or moved is believed, stored or confirmed.

Goal: with tags on, no byte of a slice, no call and no answer but the genuine ones, once and in
their order; sides that cannot agree on tags refuse each other by name. Method: engines on loopback
that are told to use tags, and a proxy that reads every record, alters, doubles, drops, swaps, cuts,
mixes and reflects them, makes right whatever needs no key, and does so for as long as a transfer
may last.
"""

import contextlib
import struct
import threading

import numpy as np
import pytest
import raw_wire as raw
import record_proxy as wire
from raw_wire import RawPeer
from record_proxy import RecordProxy, Way, number, rebuild, renumber
from tests_transfer_world import SECRET, move
from two_hosts import wait_until

from tandem._native import has_gmac
from tandem.core.errors import (
    PeerLostError,
    PermissionDeniedError,
    TandemError,
    UnsupportedError,
)
from tandem.transfer import Op, Transfer

NBYTES = 200_000
"""Several records."""


def flip_payload(_: Way, record: bytes) -> list[bytes]:
    body = bytearray(record[8:-16])
    # Of a frame without a payload, the bytes that were asked for: its check sum is made right.
    body[-1 if len(body) != wire.FRAME_HEADER else 32] ^= 1
    return [rebuild(record, bytes(body))]


def flip_number_of_call(_: Way, record: bytes) -> list[bytes]:
    body = bytearray(record[8:-16])
    body[min(16, len(body) - 1)] ^= 4
    return [rebuild(record, bytes(body))]


def flip_offset(_: Way, record: bytes) -> list[bytes]:
    body = bytearray(record[8:-16])
    body[min(25, len(body) - 1)] ^= 16
    return [rebuild(record, bytes(body))]


def cut_short(_: Way, record: bytes) -> list[bytes]:
    return [rebuild(record, record[8:-17] or b"x")]


def replay(_: Way, record: bytes) -> list[bytes]:
    return [record, renumber(record, number(record) + 1)]


def drop(way: Way, record: bytes) -> list[bytes]:
    if way.held is None:
        way.held = record
        return []
    return [renumber(record, number(way.held))]


def swap(way: Way, record: bytes) -> list[bytes]:
    if way.held is None:
        way.held = record
        return []
    held, way.held = way.held, None
    return [renumber(record, number(held)), renumber(held, number(record))]


def reflect(way: Way, record: bytes) -> list[bytes]:
    assert way.other is not None
    own = way.other.seen[-1] if way.other.seen else record[:-1] + b"x"
    return [renumber(own, number(record))]


def inject(_: Way, record: bytes) -> list[bytes]:
    return [raw.frame(raw.PING), record]


def make_splice(proxy: RecordProxy):
    """Records of the same place, direction and role of an earlier connection."""

    def splice(way: Way, record: bytes) -> list[bytes]:
        earlier = next(proxy.ways_of(way.role, way.direction))
        place = number(record)
        if earlier is way or place >= len(earlier.seen):
            return [record[:-1] + bytes([record[-1] ^ 1])]
        return [earlier.seen[place]]

    return splice


ATTACKS = {
    function.__name__: function
    for function in (
        flip_payload, flip_number_of_call, flip_offset, cut_short, replay, drop, swap, reflect,
        inject,
    )
}  # fmt: skip


class Pair:
    """A giver that serves calls, and a taker that reaches it through a proxy; tcp, with tags."""

    def __init__(self, world, proxy: RecordProxy, tags: str) -> None:
        self.executed: list[bytes] = []

        def execute(calls):
            self.executed += [call.payload for call in calls]
            return [call.payload for call in calls]

        self.giver = world.engine(name="giver", tags=tags, advertise=(proxy.address,))
        self.giver.serve_calls(execute)
        proxy.target = self.giver.address
        self.taker = world.engine(name="taker", transports=("tcp",), lease_ms=20_000)
        self.old = world.random(NBYTES)
        self.new = world.random(NBYTES)
        self.memory = self.old.copy()
        self.remote = self.giver.register(self.memory, name="buffer")
        self.segment = self.taker.open(proxy.address)
        self.source = self.taker.register(self.new)
        self.target = self.taker.allocate(NBYTES)

    def call_again(self, name: str) -> bool:
        """Call; a connection that was attacked before may still break under the first one."""
        for i in range(3):
            text = f"{name} after {i}".encode()
            with contextlib.suppress(PeerLostError):
                return self.taker.call(self.segment, text) == text
        return False

    def transfer(self, op: Op, local) -> Transfer:
        return Transfer(op, local, self.segment, self.remote.offset, NBYTES)

    @property
    def num_refused(self) -> int:
        return self.giver.core.num_refused_records + self.taker.core.num_refused_records


@pytest.fixture
def proxy():
    with RecordProxy() as proxy:
        yield proxy


@pytest.mark.parametrize("tags", ["always", "hmac"])
@pytest.mark.parametrize("direction", [wire.TO_SERVER, wire.TO_CLIENT], ids=["request", "answer"])
def test_nothing_that_was_tampered_with_is_accepted(world, proxy, tags, direction):
    pair = Pair(world, proxy, tags)
    move(pair.taker, pair.segment, Op.READ, pair.target, pair.remote.offset, NBYTES)
    assert (pair.target.array == pair.old).all()
    assert pair.taker.call(pair.segment, b"genuine") == b"genuine"
    expected_tags = "gmac" if tags == "always" and has_gmac() else "hmac"
    assert {rail.tags for rail in pair.segment.rails} == {expected_tags}
    attacks = {**ATTACKS, "splice": make_splice(proxy)}
    # Each kind of tag is proved on the records themselves (record_test.cc).
    for name in attacks if tags == "always" else ("flip_payload", "splice"):
        pair.target.array[:] = 0
        before = proxy.num_attacks, pair.num_refused

        def attack(way: Way, record: bytes, name=name) -> list[bytes]:
            if way.direction != direction:
                return [record]
            # What opens the control connection passes, or nothing but openings would be tried. A
            # rail's first record is a slice: if it passed, a transfer would go on by one genuine
            # record for each new connection, and could end.
            if way.role == wire.CONTROL and len(way.seen) < 2:
                return [record]
            return attacks[name](way, record)

        proxy.attack = attack
        # A swap needs two of them.
        batches = [
            pair.taker.submit([pair.transfer(op, local)], deadline_s=0.15)
            for op, local in ((Op.WRITE, pair.source), (Op.READ, pair.target))
        ]
        calls = [pair.taker.begin_call(pair.segment, f"{name} {i}".encode()) for i in range(2)]
        for batch, seen in zip(batches, (pair.memory, pair.target.array), strict=True):
            try:
                batch.wait()
            except TandemError:
                continue
            # Only a replay lets the genuine record pass first.
            assert name == "replay", name
            assert ((seen == pair.new) | (seen == pair.old)).all()
        answers = []
        for call in calls:
            try:
                answers.append(call.wait(0.05))
            except TandemError:
                answers.append(None)
        # What is on its way when the deadline ends is still altered, and refused when it arrives.
        wait_until(lambda: proxy.num_attacks > before[0] and pair.num_refused > before[1])  # noqa: B023
        # Not one byte beyond the genuine ones, in their places.
        written = pair.memory
        assert ((written == pair.old) | (written == pair.new)).all(), name
        read = pair.target.array
        assert ((read == 0) | (read == pair.old) | (read == pair.new)).all(), name
        assert [a for a in answers if a is not None] == [
            f"{name} {i}".encode() for i, a in enumerate(answers) if a is not None
        ]
        proxy.attack = None
        pair.memory[:] = pair.old
        # With nobody on the path it goes on as if nothing had been.
        move(pair.taker, pair.segment, Op.READ, pair.target, pair.remote.offset, NBYTES)
        assert (pair.target.array == pair.old).all()
        assert pair.call_again(name)
    assert len(set(pair.executed)) == len(pair.executed)
    assert {text.decode().split()[0] for text in pair.executed} <= {"genuine", *attacks}


def test_a_flipped_bit_costs_a_connection_and_no_byte(world, proxy):
    """One attack in a transfer: the slices go over a new connection, and the bytes are right."""
    pair = Pair(world, proxy, "always")
    is_done = []

    def attack(way: Way, record: bytes) -> list[bytes]:
        if is_done or way.role != wire.RAIL or len(way.seen) < 3:
            return [record]
        is_done.append(True)
        return flip_payload(way, record)

    proxy.attack = attack
    pair.taker.submit([pair.transfer(Op.WRITE, pair.source)]).wait()
    assert (pair.memory == pair.new).all()
    assert pair.num_refused == 1


@pytest.mark.parametrize("what", ["version", "tags", "choice"])
def test_the_choice_of_tags_cannot_be_altered(world, proxy, what):
    def greet(kind: int, payload: bytes) -> bytes:
        if what == "version" and kind == wire.HELLO:
            return payload[:2] + struct.pack("<H", 4) + payload[4:]
        if what == "tags" and kind == wire.CHALLENGE:
            return payload[:-34] + b"\0\0" + payload[-32:]
        if what == "choice" and kind == wire.PROOF:
            return b"\0" + payload[1:]
        return payload

    giver, taker = world.engine(), world.engine(tags="always", lease_ms=300)
    proxy.target, proxy.greet = giver.address, greet
    with pytest.raises(TandemError) as refusal:
        taker.open(proxy.address, deadline_s=1)
    if what == "tags":
        assert isinstance(refusal.value, PermissionDeniedError)


def test_sides_that_have_no_tags_are_refused_by_name(world):
    """Version 4 knows none: whoever needs them says which versions there are."""
    needs, plain = world.engine(tags="always"), world.engine()
    with RawPeer.connect(plain.address, SECRET, raw.CONTROL, max_version=4):
        pass
    challenge = raw.greet(needs.address, raw.CONTROL, max_version=4)
    assert struct.unpack_from("<HHH", challenge) == (0, 5, 5)
    with raw.listen() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            with RawPeer(listener.accept()[0]) as peer:
                peer.refuse_versions(SECRET, 1, 4)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(UnsupportedError, match="versions 1 to 4, we 5 to 5"):
            needs.open(address, deadline_s=60)
        server.join(60)


@pytest.mark.parametrize(
    ("server", "client", "expected"),
    [("auto", "auto", ""), ("always", "never", "best"), ("auto", "hmac", "hmac"),
     ("hmac", "always", "hmac"), ("never", "never", "")],
)  # fmt: skip
def test_a_connection_has_tags_if_one_side_asks(world, server, client, expected):
    """Loopback leaves no host: there nobody asks of himself."""
    giver, taker = world.engine(tags=server), world.engine(tags=client, transports=("tcp",))
    remote = giver.register(np.ones(1000, np.uint8), name="buffer")
    segment = taker.open(giver.address)
    local = taker.allocate(1000)
    move(taker, segment, Op.READ, local, remote.offset, 1000)
    best = "gmac" if has_gmac() else "hmac"
    assert [rail.tags for rail in segment.rails] == [best if expected == "best" else expected]
    assert (local.array == 1).all()


def test_slow_tags_are_warned_of_at_the_start(world, caplog):
    world.engine(tags="always")
    assert bool(caplog.records) is not has_gmac()
    caplog.clear()
    world.engine(tags="hmac")
    assert "HMAC-SHA256" in caplog.text
