"""What the store tier counts; apart, so that reading it imports no store."""

from dataclasses import dataclass, field

__all__ = ["TierCounters"]


@dataclass(slots=True)
class TierCounters:
    """Totals since start."""

    num_lookups: int = 0
    num_lookup_timeouts: int = 0
    """Lookups that were not answered, or not in time."""
    asked_blocks: int = 0
    found_blocks: int = 0
    """Blocks that lookups found beyond what they asked for."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    existing_blocks: int = 0
    """Blocks that were in the store already."""
    load_failures: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks by reason: the code of the error, or ``foreign`` for one of another size."""
    store_failures: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks by reason: the code of the error, ``overwritten``, ``staging_full``, ``queue_full``
    or ``offline``."""
