"""Eviction of objects, and of surplus copies, when a host needs space."""

from tandem.store.master.departures import Departures
from tandem.store.master.policies import count_bytes_to_evict
from tandem.store.master.state.ledger import Space
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState

__all__ = ["Eviction"]

EVICTED_AT_ONCE = 1_000
"""Number of objects of mean size that one call evicts at most: some 10 ms in which no call is
answered.
"""
SURPLUS_MS = 1_000
"""Milliseconds for which a host with too few surplus copies is not searched for surplus copies
again.
"""
BARREN_MS = 50
"""Milliseconds for which a host without evictable objects is not searched again."""


class Eviction:
    """Evicts objects, and surplus copies (more than the put asked for), for one master."""

    def __init__(self, state: StoreState, departures: Departures) -> None:
        self._state = state
        self._departures = departures
        self._barren_until_ms: dict[int, int] = {}
        """Time until which a host without evictable objects is skipped, by host number. A search is
        a pass over all rows.
        """
        self._no_surplus_until_ms: dict[int, int] = {}
        """Time until which a host without enough surplus copies is skipped, by host number."""

    def note_surplus(self) -> None:
        """Note that objects may have new surplus copies (more than their puts asked for): a host
        has returned, or a copy was made.
        """
        self._no_surplus_until_ms.clear()

    def evict_over_watermark(self, now_ms: int) -> None:
        """Evict objects on each host whose used share of memory is above the configured high
        watermark: the excess and one more step of bytes.
        """
        for host in self._state.writable_hosts():
            num_bytes = count_bytes_to_evict(
                host.used_bytes - host.ledger.dropped_bytes,
                host.capacity_bytes,
                high_watermark=self._state.config.high_watermark,
                step=self._state.config.eviction_step,
            )
            if num_bytes > 0:
                self._evict(host, num_bytes, now_ms)

    def evict_for(self, host: HostSpace, length: int) -> None:
        """Evict for one object on a full host, unless enough space is about to become free
        there.
        """
        if host.ledger.count_bytes(Space.WIPING) < length:
            step = int(host.capacity_bytes * self._state.config.eviction_step)
            self._state.counters.forced_evictions += 1
            self._evict(host, max(length, step), self._state.now_ms())

    def _evict(self, host: HostSpace, num_bytes: int, now_ms: int) -> None:
        if self._barren_until_ms.get(host.number, 0) > now_ms:
            return
        mean_bytes = self._state.directory.total_bytes // max(1, len(self._state.directory)) + 1
        num_bytes = min(num_bytes, EVICTED_AT_ONCE * mean_bytes)
        num_bytes -= self._drop_surplus(host, num_bytes, now_ms)
        if num_bytes <= 0:
            return
        victims = self._state.directory.victims.pick(now_ms, num_bytes, host.number)
        if not victims:
            self._barren_until_ms[host.number] = now_ms + BARREN_MS
        num_kept = sum(self._departures.evict_row(row) for row in victims)
        self._state.counters.objects_demoted += num_kept
        self._state.counters.objects_evicted += len(victims) - num_kept

    def _drop_surplus(self, host: HostSpace, num_bytes: int, now_ms: int) -> int:
        """Drop copies on a host of objects that have enough copies elsewhere. Return the bytes
        dropped.
        """
        if self._no_surplus_until_ms.get(host.number, 0) > now_ms:
            return 0
        state, directory = self._state, self._state.directory
        freed = 0
        for row in directory.victims.pick_surplus(host.number, now_ms, num_bytes):
            holders = [state.hosts[replica.host] for replica in directory.copies.replicas(row)]
            # Count only copies on hosts that stay: a copy on a host that is leaving does not count.
            num_staying = sum(other.is_settled and not other.is_leaving for other in holders)
            if num_staying > directory.wanted[row]:
                freed += directory.size[row]
                self._departures.drop_replica(row, host.number)
                state.counters.replicas_dropped += 1
        if freed < num_bytes:
            self._no_surplus_until_ms[host.number] = now_ms + SURPLUS_MS
        return freed
