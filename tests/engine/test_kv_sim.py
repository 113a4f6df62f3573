"""The real scheduler, tiers and store under seeded faults: no wrong token, and nothing is kept.

Each accepted request ends exactly once, right, unless its instance was killed. In the end no block,
staging slot or transfer is left over. A failing seed prints itself; run it alone by its number.
"""

import pytest
from kv_world import TierWorld, draw_settings

from tandem.engine.engine import Engine
from tandem.engine.loads import BlockLoads
from tandem.engine.tiers.store_tier import StoreTier
from tandem.sim import run_virtual

GROUP = 20


def run_seed(seed, num_requests=24):
    faults, tiers, crashes = draw_settings(seed)

    async def run():
        world = TierWorld(seed, faults, tiers, crashes=crashes)
        await world.run(num_requests)
        return world

    return run_virtual(run)


@pytest.mark.parametrize("first", range(0, 200, GROUP))
def test_seeds(first):
    worlds = {seed: run_seed(seed) for seed in range(first, first + GROUP)}
    bad = {seed: world.violations[:3] for seed, world in worlds.items() if world.violations}
    assert not bad
    assert sum(world.num_right for world in worlds.values()) > 10 * GROUP
    assert sum(world.num_loaded for world in worlds.values()) > GROUP


def find_violation(num_seeds=60):
    for seed in range(num_seeds):
        violations = run_seed(seed).violations
        if violations:
            return violations[0]
    return None


def trust_any_copy(tier, block):
    """Mutant: a block is stored although its memory may have been given to somebody else."""
    return tier._copy_aside(block)


def trust_any_read(engine, request, block_ids, reason=""):
    """Mutant: whatever a transfer left in a block is taken for its content."""
    engine.load_done(request, block_ids)


def free_at_once(loads, request, load, position):
    """Mutant: blocks of a load that nobody waits for are free while the transfer goes on."""
    cut = load.pending[position:]
    del load.pending[position:]
    loads.num_failed += len(cut)
    loads._prefix.forget_expected(request, [pending.key for pending in cut])
    for pending in cut:
        load.done.discard(pending.block_id)
        if loads._in_transfer.pop(pending.block_id, None) is None:
            continue
        loads._release((pending.block_id,))


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (StoreTier, "_copy_unchanged", trust_any_copy),
        (Engine, "load_failed", trust_any_read),
        (BlockLoads, "_cut", free_at_once),
    ],
)
def test_removed_safety_rules_are_caught(owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    assert find_violation() is not None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 11_000, 500))
def test_many_seeds(first):
    bad = {s: w.violations[:3] for s in range(first, first + 500) if (w := run_seed(s)).violations}
    assert not bad
