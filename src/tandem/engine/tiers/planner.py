"""The decision whether blocks that a lower tier has are loaded or computed.

It applies the inequality of the Mooncake paper (FAST'25, equation 2), with measured rates instead
of peak figures: loading n blocks takes ``latency + n * block_bytes / bandwidth``, computing them
``n * block_size / prefill_rate``. The prefill rate is an average over whole prefills. It is too
high for the far end of a long context, where attention costs more; there fewer blocks are loaded
than would pay off, never more.

A decision against loads ends the measurements that it rests on, so the predicted time of a load
ages: while nothing is loaded it falls, until one is tried. Once the rate is that of the store
again, loads go on; else the next try is as far away.

Pure: time and measurements are arguments.
"""

from collections.abc import Sequence

from tandem.engine.scheduling.loads import LoadDecision
from tandem.engine.scheduling.request import Request
from tandem.engine.tiers.config import TierConfig

__all__ = ["CostTierPlanner", "RateEstimate"]

DECAY = 0.2
"""Weight of a new measurement; earlier ones keep 1 - ``DECAY`` of theirs."""
HALF_LIFE_S = 60.0
"""Time in which the predicted duration of a load halves while nothing is loaded, in seconds."""
COLD_WAIT_S = 1.0
"""Seconds that a request waits for a load while one of the rates is unknown."""
MIN_PREFILL_TOKENS = 32
"""Smallest number of prefilled tokens in a step that is measured; in smaller steps the fixed cost
dominates."""


class RateEstimate:
    """A rate in units per second over the recent past; None until something was measured.

    It is the quotient of two decaying sums, so a long measurement counts for more than a short one,
    in which fixed costs dominate.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float | None:
        """Units per second; None until something was measured."""
        return self._amount / self._seconds if self._seconds > 0 else None

    def note(self, amount: float, seconds: float) -> None:
        """Add one measurement; it is ignored if amount or time is zero."""
        if amount <= 0 or seconds <= 0:
            return
        self._amount = self._amount * (1 - DECAY) + amount
        self._seconds = self._seconds * (1 - DECAY) + seconds

    def fade(self, share: float) -> None:
        """Let earlier measurements count with this share of their weight beside later ones."""
        self._amount *= share
        self._seconds *= share


class CostTierPlanner:
    """The ``TierPlanner`` of an engine with a store: it loads blocks if that is predicted to be
    faster.

    Args:
        config: policy and limits.
        block_size: tokens per block.
        block_bytes: bytes of one block in all layers.
    """

    def __init__(self, config: TierConfig, *, block_size: int, block_bytes: int) -> None:
        self._config = config
        self._block_size = block_size
        self._block_bytes = block_bytes
        self.load_rate = RateEstimate()
        """Bytes per second from the store into blocks, waits included."""
        self.prefill_rate = RateEstimate()
        """Tokens per second of prefills."""
        self._has_loaded = False
        """True if something was loaded since the last choice."""
        self._loaded_s: float | None = None
        """Time of the first choice after the last load, monotonic seconds."""

    def note_step(self, num_prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Update the prefill rate by a step's tokens and duration, where a decoded token counts
        like one of a prompt. Steps with few prefill tokens are ignored.
        """
        if num_prefill_tokens >= MIN_PREFILL_TOKENS:
            self.prefill_rate.note(num_tokens, seconds)

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Update the rate at which KV is loaded, by the size and the duration of a load."""
        self.load_rate.note(size_bytes, seconds)
        self._has_loaded = True

    def read_load_speed(self) -> float:
        """Return for how many tokens the KV is loaded per second from lower tiers; 0 while unknown.
        Callable from any thread.
        """
        rate = self.load_rate.per_s
        return 0.0 if rate is None else rate / self._block_bytes * self._block_size

    def estimate_load_s(self, num_blocks: int) -> float | None:
        """Return the predicted seconds to load a number of blocks; None while unknown."""
        rate = self.load_rate.per_s
        return None if rate is None else num_blocks * self._block_bytes / rate

    def estimate_compute_s(self, num_blocks: int) -> float | None:
        """Return the predicted seconds to compute a number of blocks; None while unknown."""
        rate = self.prefill_rate.per_s
        return None if rate is None else num_blocks * self._block_size / rate

    def choose_load(
        self, request: Request, keys: Sequence[bytes], num_matched: int, now_s: float
    ) -> LoadDecision:
        """Choose how many blocks to load, by the predicted times to load and to compute them."""
        if self._has_loaded or self._loaded_s is None:
            self._has_loaded, self._loaded_s = False, now_s
        num_held = min(request.num_stored_blocks - num_matched, len(keys))
        if num_held <= 0 or self._config.decision == "compute":
            return LoadDecision(0)
        load_s = self.estimate_load_s(num_held)
        compute_s = self.estimate_compute_s(num_held)
        is_slow = load_s is not None and compute_s is not None and load_s >= compute_s
        if self._config.decision == "auto" and is_slow:
            age = 0.5 ** ((now_s - self._loaded_s) / HALF_LIFE_S)
            if load_s * age >= compute_s:
                return LoadDecision(0)
            # Try a load. Its rate says more than those of long ago.
            self.load_rate.fade(age)
            self._loaded_s = now_s
        return LoadDecision(num_held, self._choose_wait_s(compute_s))

    def _choose_wait_s(self, compute_s: float | None) -> float:
        deadline_s = self._config.load_deadline_ms / 1e3
        match self._config.prefetch:
            case "best_effort":
                return 0.0
            case "wait":
                return deadline_s
            case "timeout":
                # Wait at most as long as computing the tokens would take, so that a failed load at
                # most doubles the request's delay.
                wait_s = COLD_WAIT_S if compute_s is None else compute_s
                return min(max(wait_s, self._config.min_wait_ms / 1e3), deadline_s)
