"""An instance's statistics for the metrics, collected from its parts."""

from tandem.core.wire import InstanceStage, InstanceStats
from tandem.engine.disaggregation.counters import PeerReadCounters
from tandem.engine.engine import EngineCounters
from tandem.engine.scheduling.plan import SchedulerStats
from tandem.engine.tiers.counters import TierCounters

__all__ = ["make_stats"]


def make_stats(
    stage: InstanceStage,
    stats: SchedulerStats,
    counters: EngineCounters,
    tier: TierCounters,
    *,
    block_size: int,
    reads: PeerReadCounters | None = None,
    store_state: str | None = None,
) -> InstanceStats:
    """Return a snapshot; ``tier`` is all zeros without a store, ``reads`` None without peers.

    ``store_state`` is that of the session with the store; None without one.
    """
    reads = PeerReadCounters() if reads is None else reads
    return InstanceStats(
        stage=stage,
        store_links={} if store_state is None else {store_state: 1},
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_loading=stats.num_loading,
        num_held=stats.num_held,
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_preemptions=stats.num_preemptions,
        prefix_query_tokens=stats.num_prefix_query_tokens,
        prefix_hit_tokens=stats.num_prefix_hit_tokens,
        store_hit_tokens=stats.num_store_hit_tokens,
        evicted_tokens=stats.num_evicted_blocks * block_size,
        num_steps=counters.num_steps,
        num_finished=counters.num_finished,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        step_seconds=counters.step_seconds,
        num_lookups=tier.num_lookups,
        num_lookup_timeouts=tier.num_lookup_timeouts,
        lookup_tokens=tier.asked_blocks * block_size,
        loaded_blocks=tier.loaded_blocks,
        loaded_tokens=tier.loaded_blocks * block_size,
        loaded_bytes=tier.loaded_bytes,
        load_seconds=tier.load_seconds,
        stored_blocks=tier.stored_blocks,
        stored_tokens=tier.stored_blocks * block_size,
        stored_bytes=tier.stored_bytes,
        store_seconds=tier.store_seconds,
        store_existing_blocks=tier.existing_blocks,
        peer_read_blocks=reads.read_blocks,
        peer_read_bytes=reads.read_bytes,
        peer_read_hidden_seconds=reads.hidden_seconds,
        peer_read_exposed_seconds=reads.exposed_seconds,
        # Copies: the threads of the tier and of the reads count on.
        peer_read_failures=dict(reads.failures),
        load_failures=dict(tier.load_failures),
        store_failures=dict(tier.store_failures),
    )
