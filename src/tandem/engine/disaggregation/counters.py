"""What reads from other instances count, for the metrics."""

from dataclasses import dataclass, field

__all__ = ["PeerReadCounters"]


@dataclass(slots=True)
class PeerReadCounters:
    """Totals since start."""

    read_blocks: int = 0
    """Taken, after they were verified."""
    read_bytes: int = 0
    """Of all reads, those included that were not taken."""
    hidden_seconds: float = 0.0
    """Of reads begun while the prefill still ran."""
    exposed_seconds: float = 0.0
    """Of reads begun after it had ended."""
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks by reason: the code of the error, ``dropped`` or ``offline``."""
