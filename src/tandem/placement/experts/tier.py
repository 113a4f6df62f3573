"""Routed experts that lie on disk: sizes of their memory, and whether guesses pay. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.core.errors import ConfigError

__all__ = [
    "ExpertSizes",
    "GuessGate",
    "TierSizes",
    "count_slot_bytes",
    "predict_missed_bytes",
    "size_tier",
]

MIB = 1 << 20
ALIGNMENT = 4096
"""The alignment of what is read past the page cache."""
MAX_STAGED = 32
"""Places for experts that pass by: a prefill computes one half while the other is read."""
STAGED_SHARE = 0.1
"""The largest share of the memory for experts that is staging area."""
MIN_RIGHT = 0.6
"""Share of guesses that must be right before experts are read for them. A right one is read while
the layer before computes; a wrong one costs the disk an expert, and another one its slot."""
REMEMBERED = 0.97
"""Weight of what was known before a step, of some tens of steps together."""
MIN_GUESSES = 32
"""Guesses that are compared before the first is acted on."""


class ExpertSizes(NamedTuple):
    """The routed experts of a model."""

    num_layers: int
    """Layers that have experts on disk."""
    num_experts: int
    """Experts of a layer."""
    top_k: int
    expert_bytes: int
    """Bytes of one expert as it is packed, the largest of all layers."""


class TierSizes(NamedTuple):
    """Memory for experts that lie on disk."""

    num_slots: int
    """Slots of each layer."""
    num_staged: int
    slot_bytes: int
    reason: str


def count_slot_bytes(expert_bytes: int) -> int:
    """Return the bytes of a place for an expert that begins anywhere in a file."""
    whole = -(-expert_bytes // ALIGNMENT) * ALIGNMENT
    return whole if whole == expert_bytes else whole + ALIGNMENT


def size_tier(sizes: ExpertSizes, *, budget_bytes: int, wanted_slots: int = 0) -> TierSizes:
    """Return how many experts of each layer memory holds.

    Args:
        sizes: of the model.
        budget_bytes: for experts, staging area included.
        wanted_slots: of each layer, as asked for; 0 is as many as fit.

    Raises: ConfigError (not one slot fits).
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
    """Return the bytes that a token reads from disk.

    Args:
        sizes: of the model.
        num_slots: of a layer.
        hit_rate: of experts that are found in a slot, as a trace has it; None: choices are even,
            so that it is the share of experts that have one. Real ones are less even.
    """
    hits = num_slots / sizes.num_experts if hit_rate is None else hit_rate
    return (1 - hits) * sizes.top_k * sizes.num_layers * sizes.expert_bytes


class GuessGate:
    """Decides whether guesses of a layer's experts pay, by how often they were right."""

    def __init__(self) -> None:
        self.num_guessed = 0.0
        """Guesses of experts that were not held, older ones counting less."""
        self.num_right = 0.0

    def note(self, guessed: Sequence[int], chosen: Sequence[int]) -> None:
        """Compare the guesses of a step with its choices, whether or not they were acted on."""
        right = set(chosen)
        self.num_guessed = REMEMBERED * self.num_guessed + len(guessed)
        self.num_right = REMEMBERED * self.num_right + sum(e in right for e in guessed)

    @property
    def is_open(self) -> bool:
        """True if experts should be read before they are asked for."""
        return self.num_guessed >= MIN_GUESSES and self.num_right >= MIN_RIGHT * self.num_guessed
