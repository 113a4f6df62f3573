"""Replay of a routing trace through cache policies: hit rates by size, policy and layer.

The first half of the trace warms the caches and gives the static policy its experts; rates are of
the second half, so no policy but the oracle is measured on the data that it was made from. Pure.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tandem.placement.experts.cache import (
    EXPERT_POLICIES,
    CachePolicy,
    OraclePolicy,
    StaticPolicy,
)

__all__ = ["ORACLE", "STATIC", "LayerChoices", "Replay", "replay_layers"]

STATIC = "static"
ORACLE = "oracle"
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Cache sizes that are replayed, as shares of a layer's experts."""

LayerChoices = Sequence[Sequence[int]]
"""Distinct experts of each step of one layer, in the order of the steps."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The result of replaying a trace of chosen experts through one cache policy at one cache
    size.
    """

    policy: str
    capacity: int
    """Experts of a layer that the cache holds."""
    hit_rate: float
    """Hit rate over all layers."""
    by_layer: list[float]
    loads_per_step: float
    """Experts loaded in a step, all layers together."""


class _Score(NamedTuple):
    hits: int
    uses: int
    loads: int


def replay_layers(
    layers: Sequence[LayerChoices],
    num_experts: int,
    *,
    capacities: Sequence[int] | None = None,
    note_progress: Callable[[int, int], None] | None = None,
) -> list[Replay]:
    """Replay the trace through all policies at all sizes.

    Args:
        layers: choices of each layer, all with equally many steps, at least two.
        num_experts: experts of a layer.
        capacities: cache sizes; None: a sixteenth to three quarters of the experts.
        note_progress: called with (replays done, replays in total).
    """
    if capacities is None:
        capacities = sorted({max(1, round(share * num_experts)) for share in SHARES})
    names = [STATIC, *EXPERT_POLICIES, ORACLE]
    replays: list[Replay] = []
    for capacity in capacities:
        for name in names:
            scores = [_run(name, capacity, choices, num_experts) for choices in layers]
            replays.append(_sum_up(name, capacity, scores, len(layers[0]) - len(layers[0]) // 2))
            if note_progress is not None:
                note_progress(len(replays), len(capacities) * len(names))
    return replays


def _make(name: str, capacity: int, choices: LayerChoices, num_experts: int) -> CachePolicy:
    if name == ORACLE:
        return OraclePolicy(capacity, choices)
    if name == STATIC:
        counts = [0] * num_experts
        for chosen in choices[: len(choices) // 2]:
            for expert in chosen:
                counts[expert] += 1
        return StaticPolicy(capacity, counts)
    return EXPERT_POLICIES[name](capacity)


def _run(name: str, capacity: int, choices: LayerChoices, num_experts: int) -> _Score:
    policy = _make(name, capacity, choices, num_experts)
    held: set[int] = set()
    hits = uses = loads = 0
    for place, chosen in enumerate(choices):
        num_hits = len(held.intersection(chosen))
        insertions = policy.touch(chosen, len(chosen))
        for insertion in insertions:
            held.discard(insertion.evicted)
            held.add(insertion.expert_id)
        if place >= len(choices) // 2:
            hits += num_hits
            uses += len(chosen)
            loads += len(insertions)
    return _Score(hits, uses, loads)


def _sum_up(name: str, capacity: int, scores: list[_Score], num_steps: int) -> Replay:
    uses = sum(score.uses for score in scores)
    return Replay(
        policy=name,
        capacity=capacity,
        hit_rate=sum(score.hits for score in scores) / max(1, uses),
        by_layer=[score.hits / max(1, score.uses) for score in scores],
        loads_per_step=sum(score.loads for score in scores) / num_steps,
    )
