"""Objects, and copies beyond those that are wanted, that go because their space is needed."""

from tandem.store.master.departures import Departures
from tandem.store.master.policies import count_bytes_to_evict
from tandem.store.master.state.space import HostSpace
from tandem.store.master.state.state import StoreState

__all__ = ["Eviction"]

EVICTED_AT_ONCE = 1_000
"""Objects of usual size dropped at a time: some 10 ms in which no call is answered."""
SURPLUS_MS = 1_000
"""For how long a host where surplus copies did not suffice is not looked at for such again."""
BARREN_MS = 50
"""For how long a host where nothing could be evicted is not looked at again."""


class Eviction:
    """Evicts for one master."""

    def __init__(self, state: StoreState, departures: Departures) -> None:
        self._state = state
        self._departures = departures
        self._barren_until_ms: dict[int, int] = {}
        """Hosts where nothing could be evicted a moment ago: looking costs a pass over all rows."""
        self._no_surplus_until_ms: dict[int, int] = {}
        """The same of surplus copies."""

    def note_surplus(self) -> None:
        """There may be copies beyond those wanted: a host has come back, or a copy was made."""
        self._no_surplus_until_ms.clear()

    def evict_over_watermark(self, now_ms: int) -> None:
        """Evict a step on each host that is too full."""
        for host in self._state.writable_hosts():
            num_bytes = count_bytes_to_evict(
                host.used_bytes - host.dropped_bytes,
                host.capacity_bytes,
                high_watermark=self._state.config.high_watermark,
                step=self._state.config.eviction_step,
            )
            if num_bytes > 0:
                self._evict(host, num_bytes, now_ms)

    def evict_for(self, host: HostSpace, length: int) -> None:
        """Make room for one object on a full host; space that is being freed already counts."""
        if host.dropped_bytes - host.leased_bytes < length:
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
        victims = self._state.directory.pick_victims(now_ms, num_bytes, host.number)
        if not victims:
            self._barren_until_ms[host.number] = now_ms + BARREN_MS
        num_kept = sum(self._departures.evict_row(row) for row in victims)
        self._state.counters.objects_demoted += num_kept
        self._state.counters.objects_evicted += len(victims) - num_kept

    def _drop_surplus(self, host: HostSpace, num_bytes: int, now_ms: int) -> int:
        """Drop copies on a host that others have as often as wanted; returns their bytes."""
        if self._no_surplus_until_ms.get(host.number, 0) > now_ms:
            return 0
        state, directory = self._state, self._state.directory
        freed = 0
        for row in directory.pick_surplus(host.number, now_ms, num_bytes):
            holders = [state.hosts[replica.host] for replica in directory.replicas(row)]
            # A copy that is about to go, with its host, is none to rely on.
            num_staying = sum(other.is_settled and not other.is_leaving for other in holders)
            if num_staying > directory.wanted(row):
                freed += directory.size(row)
                self._departures.drop_replica(row, host.number)
                state.counters.replicas_dropped += 1
        if freed < num_bytes:
            self._no_surplus_until_ms[host.number] = now_ms + SURPLUS_MS
        return freed
