"""The KV store of a simulated cluster: the master's directory and policies, without data.

Each instance's machine has a segment (a region of memory that the store manages). A block is put
into the segment of the machine that computed it; a segment that is too full evicts its least
recently used blocks, by the store's own watermark, step and order. Reading a block uses the links
between its machine and the reader, or the machine's own bus if both are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem._native import fill_rows, locate_rows
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.request import Request
from tandem.engine.tiers.config import TierConfig
from tandem.sim.cluster.links import Link, Links
from tandem.store.config import StoreConfig
from tandem.store.master.policies import count_bytes_to_evict
from tandem.store.master.state.index import NO_ROW, Directory, Passes, Replica

__all__ = ["SimStore", "StoreShare", "StoreSpec"]


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a scenario's KV store."""

    tokens: Annotated[int, Meta(ge=1)]
    """Tokens of KV in the segment of each instance."""
    scope: Literal["global", "local"] = "global"
    """Blocks that an instance finds: with ``global``, those of all instances' segments; with
    ``local``, those in its own segment only.
    """
    bus_gb_per_s: Annotated[float, Meta(gt=0)] = 100.0
    """GB/s between a machine's memory and its accelerators, in each direction."""
    tiers: TierConfig = TierConfig()
    """Settings of the KV tiers (when to store and load), the same as ``tiers`` of a server."""


@dataclass(eq=False)
class StoreShare:
    """The store's segment (memory) on one machine: its size and use, and the links by which its
    blocks move.
    """

    number: int
    capacity_bytes: int
    egress: Link
    ingress: Link
    bus: Link
    used_bytes: int = 0


class SimStore:
    """The KV blocks that the machines' segments of a simulated store hold.

    Args:
       spec: settings in the scenario.
       links: network that carries blocks.
       block_bytes: bytes of a block.
       now_s: the clock.
    """

    def __init__(
        self, spec: StoreSpec, links: Links, block_bytes: int, now_s: Callable[[], float]
    ) -> None:
        self.spec = spec
        self.directory = Directory(Passes(fill_rows, locate_rows))
        self.block_bytes = block_bytes
        self.num_evicted = 0
        self.on_change: Callable[[Sequence[bytes], Sequence[bytes]], None] | None = None
        """Called with the keys of blocks that all instances can find from now on, and the keys of
        blocks that no instance can find any more.
        """
        self._links, self._now_s = links, now_s
        self._config = StoreConfig()
        self._segments: list[StoreShare] = []

    def add_segment(self, tokens_bytes: int, egress: Link, ingress: Link, bus: Link) -> StoreShare:
        """Add the segment (memory for KV blocks) of a machine, with the machine's network ports and
        bus; return it.
        """
        segment = StoreShare(len(self._segments), tokens_bytes, egress, ingress, bus)
        self._segments.append(segment)
        return segment

    def put(self, segment: StoreShare, keys: Sequence[bytes]) -> None:
        """Add KV blocks, given by their keys, to a segment, except those that its machine can
        already find in the store.
        """
        directory = self.directory
        stored: list[bytes] = []
        removed: list[bytes] = []
        for key in keys:
            name = self._name(segment, key)
            row = directory.find(name)
            if row != NO_ROW:
                directory.touch(row)
                continue
            stored.append(key)
            directory.insert(
                name,
                size=self.block_bytes,
                checksum=0,
                version=1,
                replicas=[Replica(segment.number, 0)],
            )
            segment.used_bytes += self.block_bytes
        num_bytes = count_bytes_to_evict(
            segment.used_bytes,
            segment.capacity_bytes,
            high_watermark=self._config.high_watermark,
            step=self._config.eviction_step,
        )
        if num_bytes > 0:
            now_ms = int(self._now_s() * 1e3)
            for row in directory.victims.pick(now_ms, num_bytes, segment.number):
                removed.append(bytes.fromhex(directory.key[row].rpartition("/")[2]))
                directory.remove(row)
                segment.used_bytes -= self.block_bytes
                self.num_evicted += 1
        if self.on_change is not None and self.spec.scope == "global" and (stored or removed):
            self.on_change(stored, removed)

    def count_stored(self, segment: StoreShare, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt, given by their keys in order, an instance on
        the segment's machine can find in the store, and record their use.
        """
        directory = self.directory
        until_ms = int(self._now_s() * 1e3) + self._config.lease_ms
        count = 0
        for key in keys:
            row = directory.find(self._name(segment, key))
            if row == NO_ROW:
                break
            directory.touch(row)
            directory.extend_lease(row, until_ms)
            count += 1
        return count

    def load(
        self,
        segment: StoreShare,
        loads: Sequence[BlockLoad],
        on_done: Callable[[Request, Sequence[BlockLoad]], None],
        on_failed: Callable[[Request, Sequence[BlockLoad]], None],
    ) -> None:
        """Move blocks of one request to an instance; each block is reported once, as loaded or
        failed.
        """
        request = loads[0].request
        by_source: dict[int, list[BlockLoad]] = {}
        missing: list[BlockLoad] = []
        for load in loads:
            row = self.directory.find(self._name(segment, load.key))
            if row == NO_ROW:
                missing.append(load)
            else:
                source = self.directory.copies.replicas(row)[0].host
                by_source.setdefault(source, []).append(load)
        for number, some in by_source.items():
            source = self._segments[number]
            if source is segment:
                used: tuple[Link, ...] = (segment.bus,)
            else:
                used = (source.egress, segment.ingress)
            size_bytes = len(some) * self.block_bytes
            self._links.start(used, size_bytes, partial(on_done, request, some))
        if missing:
            on_failed(request, missing)

    def _name(self, segment: StoreShare, key: bytes) -> str:
        name = key.hex()
        return name if self.spec.scope == "global" else f"{segment.number}/{name}"
