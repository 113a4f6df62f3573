"""The roster of a store with an election, in etcd; see docs/design/store/store_roster.md.

Every write is a transaction that compares the leader's key, which has the epoch of its term, so
that a deposed leader can change nothing.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tandem.core.errors import PeerLostError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.election.election import Holder
from tandem.store.election.etcd import LEADER_KEY, encode_leader
from tandem.store.election.etcd_gateway import EtcdGateway, Range, Txn, decode_value, encode_bytes
from tandem.store.election.roster import Batch, Roster, SavedRoster, Tombstone

__all__ = ["EtcdRosterStore"]

MEMBERS_KEY, TOMBSTONES_KEY = "members", "tombstones/"
CHUNK_BYTES = 2**16
"""Bytes of tombstones under one key; a larger single one has its own key. etcd accepts 1.5 MB in a
request.
"""
CHUNKS_AT_ONCE = 2
"""Number of tombstone keys read in one request: the gateway accepts answers of 1 MiB."""


class EtcdRosterStore:
    """The ``RosterStore`` (storage of a store's hosts and removals) of one leader's term, in etcd.

    Args:
        gateway: the client of etcd. Not owned.
        holder: the leader in this term.
        timeout_s: time limit of one call.
        corruption: the log of unreadable keys to extend; None for a new one.
    """

    def __init__(
        self,
        gateway: EtcdGateway,
        holder: Holder,
        *,
        timeout_s: float,
        corruption: CorruptionLog | None = None,
    ) -> None:
        self._gateway = gateway
        self._corruption = CorruptionLog() if corruption is None else corruption
        self._epoch = holder.epoch
        self._is_ours = {
            "key": gateway.key(LEADER_KEY), "target": "VALUE", "value": encode_leader(holder),
        }  # fmt: skip
        self._timeout_s = timeout_s

    async def load(self) -> SavedRoster:
        """Read the roster and all tombstones. Keys of etcd that cannot be parsed are logged and
        skipped.
        """
        gateway = self._gateway
        pair = await gateway.read(gateway.key(MEMBERS_KEY), gateway.deadline_s(self._timeout_s))
        roster = None
        if pair is not None:
            try:
                roster = msgspec.json.decode(decode_value(pair), type=Roster)
            except msgspec.MsgspecError as error:
                self._corruption.note("roster", f"key {MEMBERS_KEY!r} in etcd: {error}")
        # etcd also has the count of terms. In the first leader's term no roster (list of hosts) can
        # have been lost, so that the store is new.
        is_new = pair is None and self._epoch == 1
        return SavedRoster(roster, await self._load_tombstones(), is_new)

    async def _load_tombstones(self) -> list[Batch]:
        gateway, batches = self._gateway, list[Batch]()
        begin = gateway.key(TOMBSTONES_KEY)
        while True:
            request = {"key": begin, "range_end": self._number_key(None), "limit": CHUNKS_AT_ONCE}
            deadline_s = gateway.deadline_s(self._timeout_s)
            found = await gateway.post("kv/range", request, Range, deadline_s)
            for pair in found.kvs:
                key = base64.b64decode(pair.key)
                begin = encode_bytes(key + b"\0")
                number = int(key.rpartition(b"/")[2].partition(b"-")[0], 16)
                try:
                    chunk = msgspec.json.decode(decode_value(pair), type=list[Tombstone])
                except msgspec.MsgspecError as error:
                    self._corruption.note("tombstones", f"key {key!r} in etcd: {error}")
                else:
                    batches.append((number, chunk))
            if not found.more or not found.kvs:
                return batches

    async def save(self, roster: Roster) -> None:
        """Replace the key of the roster (the list of the store's hosts), if this leader's term
        still lasts.
        """
        value = encode_bytes(msgspec.json.encode(roster))
        key = self._gateway.key(MEMBERS_KEY)
        await self._change({"request_put": {"key": key, "value": value}})

    async def add(self, batch: Batch) -> None:
        """Write tombstones (removals of objects) in chunks, under keys that name the number of
        their round (one group of changes), if this leader's term still lasts.
        """
        number, tombstones = batch
        for i, chunk in enumerate(_cut(tombstones)):
            key = self._number_key(number, f"-{i:08x}")
            await self._change({"request_put": {"key": key, "value": encode_bytes(chunk)}})

    async def drop(self, below: int) -> None:
        """Delete the tombstones (removals of objects) of rounds (numbered groups of changes) below
        ``below``, if this leader's term still lasts.
        """
        begin, end = self._gateway.key(TOMBSTONES_KEY), self._number_key(below)
        await self._change({"request_delete_range": {"key": begin, "range_end": end}})

    def _number_key(self, number: int | None, suffix: str = "") -> str:
        """Return the first key in etcd of the tombstones of round ``number`` (a group of changes
        that were written together); for None, the key behind those of all rounds.
        """
        text = "~" if number is None else f"{number:016x}"
        return self._gateway.key(f"{TOMBSTONES_KEY}{text}{suffix}")

    async def _change(self, operation: dict[str, Any]) -> None:
        """Execute an operation of etcd if this leader's term still lasts. Raises: PeerLostError if
        it has ended.
        """
        body = {"compare": [self._is_ours], "success": [operation]}
        deadline_s = self._gateway.deadline_s(self._timeout_s)
        answer = await self._gateway.post("kv/txn", body, Txn, deadline_s)
        if not answer.succeeded:
            raise PeerLostError("store.roster", f"the term of epoch {self._epoch} is over")


def _cut(tombstones: Sequence[Tombstone]) -> Iterator[bytes]:
    """Yield the tombstones (removals of objects) as JSON lists of about ``CHUNK_BYTES`` each."""
    chunk: list[bytes] = []
    size = 0
    for tombstone in tombstones:
        chunk.append(msgspec.json.encode(tombstone))
        size += len(chunk[-1])
        if size >= CHUNK_BYTES:
            yield b"[" + b",".join(chunk) + b"]"
            chunk, size = [], 0
    if chunk:
        yield b"[" + b",".join(chunk) + b"]"
