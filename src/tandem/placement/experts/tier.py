"""Routed experts on disk: sizes of their memory, and whether reading ahead pays off. Pure."""

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from tandem.core.errors import ConfigError

__all__ = [
    "ExpertSizes",
    "GuessGate",
    "TierSizes",
    "count_slot_bytes",
    "predict_missed_bytes",
    "predict_token_seconds",
    "size_tier",
]

MIB = 1 << 20
ALIGNMENT = 4096
"""Alignment in bytes of reads that bypass the page cache."""
MAX_STAGED = 32
"""Largest number of places in the staging area: a prefill computes from one half while the other is
read."""
STAGED_SHARE = 0.1
"""Largest share of the memory for experts that the staging area (places for experts that are not
kept) takes.
"""
MIN_RIGHT = 0.6
"""Share of correct guesses needed before experts are read ahead. A right guess is read while the
previous layer computes; a wrong one costs a disk read and evicts another expert.
"""
REMEMBERED = 0.97
"""Factor on earlier counts at each step, so that some tens of steps matter."""
MIN_GUESSES = 32
"""Number of guessed experts that must have been compared with the actual choices before experts are
first read ahead.
"""


class ExpertSizes(NamedTuple):
    """Number and size of a model's routed experts."""

    num_layers: int
    """Layers whose experts are on disk."""
    num_experts: int
    """Experts of a layer."""
    top_k: int
    expert_bytes: int
    """Bytes of one packed expert, the largest of all layers."""


class TierSizes(NamedTuple):
    """The division of the memory for experts that lie on disk: slots, which keep experts, and
    places of the staging area for others.
    """

    num_slots: int
    """Slots in memory for each layer's experts."""
    num_staged: int
    slot_bytes: int
    reason: str


def count_slot_bytes(expert_bytes: int) -> int:
    """Return the bytes of a place in memory for an expert that is read in whole disk blocks: its
    offset in the file need not be aligned.
    """
    whole = -(-expert_bytes // ALIGNMENT) * ALIGNMENT
    return whole if whole == expert_bytes else whole + ALIGNMENT


def size_tier(sizes: ExpertSizes, *, budget_bytes: int, wanted_slots: int = 0) -> TierSizes:
    """Return how many experts of each layer fit in memory.

    Args:
        sizes: the model's experts.
        budget_bytes: memory for experts, staging area included.
        wanted_slots: requested slots of each layer; 0: as many as fit.

    Raises: ConfigError (not even one slot fits).
    """
    slot = count_slot_bytes(sizes.expert_bytes)
    affordable = int(budget_bytes * STAGED_SHARE) // slot
    num_staged = max(2, min(MAX_STAGED, sizes.num_experts, affordable))
    if wanted_slots:
        count = min(wanted_slots, sizes.num_experts)
        return TierSizes(count, num_staged, slot, "model.expert_slots")
    count = (budget_bytes - num_staged * slot) // (slot * sizes.num_layers)
    if count < 1:
        least = (num_staged + sizes.num_layers) * slot
        raise ConfigError(
            "placement.size_tier",
            f"{budget_bytes / MIB:,.0f} MiB are left for experts, and one slot for each of "
            f"{sizes.num_layers} layers takes {least / MIB:,.0f}: raise --memory, lower "
            "--engine.kv-cache-gib, or choose a smaller --expert-format",
            field="engine.memory",
        )
    reason = f"what {budget_bytes / MIB:,.0f} MiB hold; others are read when they are wanted"
    return TierSizes(min(count, sizes.num_experts), num_staged, slot, reason)


def predict_missed_bytes(
    sizes: ExpertSizes, num_slots: int, hit_rate: float | None = None
) -> float:
    """Return the bytes that a token reads from disk, on average.

    Args:
        sizes: the model's experts.
        num_slots: slots of a layer.
        hit_rate: share of experts found in a slot, from a trace; None: the share of experts that
            have a slot, as with uniform choices. Real choices are less uniform.
    """
    hits = num_slots / sizes.num_experts if hit_rate is None else hit_rate
    return (1 - hits) * sizes.top_k * sizes.num_layers * sizes.expert_bytes


def predict_token_seconds(
    sizes: ExpertSizes,
    num_slots: int,
    *,
    compute_seconds: float,
    read_rate: float,
    hit_rate: float | None = None,
) -> float:
    """Return the seconds that a token's routed experts take on average, without guesses.

    A layer computes its experts in ascending order and begins all reads at once, so the disk rests
    between two layers, and experts after the last one that is read are computed while it rests. The
    longer of reading and computing would count neither.

    Args:
        sizes: the model's experts.
        num_slots: slots of a layer.
        compute_seconds: seconds that a token's experts take with all of them in memory.
        read_rate: bytes per second that the disk reads.
        hit_rate: as for ``predict_missed_bytes``.
    """
    hits = num_slots / sizes.num_experts if hit_rate is None else hit_rate
    read = sizes.expert_bytes / read_rate
    top_k = sizes.top_k
    compute = compute_seconds / (sizes.num_layers * top_k)
    layer = hits**top_k * top_k * compute
    for num_missed in range(1, top_k + 1):
        chance = comb(top_k, num_missed) * (1 - hits) ** num_missed * hits ** (top_k - num_missed)
        # Means over all orders of experts that hit and experts that miss: the number of experts
        # from the last miss to the end, and from the first.
        from_last = (top_k + 1) / (num_missed + 1)
        from_first = top_k + 1 - from_last
        after_last = num_missed * read + from_last * compute
        after_first = read + from_first * compute
        layer += chance * max(top_k * compute, after_last, after_first)
    return sizes.num_layers * layer


class GuessGate:
    """Decision whether the experts that a layer is guessed to choose are read ahead, by how often
    such guesses were right.
    """

    def __init__(self) -> None:
        self.num_guessed = 0.0
        """Number of guessed experts that were in no slot, with older guesses counting less."""
        self.num_right = 0.0

    def note(self, guessed: Sequence[int], chosen: Sequence[int]) -> None:
        """Count how many experts guessed for a step were chosen by the router, whether or not they
        were read ahead.
        """
        right = set(chosen)
        self.num_guessed = REMEMBERED * self.num_guessed + len(guessed)
        self.num_right = REMEMBERED * self.num_right + sum(e in right for e in guessed)

    @property
    def is_open(self) -> bool:
        """True if a layer's experts should be read ahead, as guesses of them were often right."""
        return self.num_guessed >= MIN_GUESSES and self.num_right >= MIN_RIGHT * self.num_guessed
