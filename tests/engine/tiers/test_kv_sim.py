"""The real server, scheduler, tiers, store and disaggregation under seeded faults.

Each accepted request ends exactly once, with the right tokens or a terminal error. When the faults
are over, everything is whole again in time, and no block, hold, transfer, staging slot or question
is left. A failing seed prints itself; run it alone by its number.
"""

import pytest
from kv_world import ROLES, KvWorld, Settings

from quick import rest_slow
from tandem.conductor.routes import InstanceRef
from tandem.engine.cluster.member import ClusterMember
from tandem.engine.disaggregation import peers
from tandem.engine.disaggregation.hand_over import HandOver
from tandem.engine.engine import Engine
from tandem.engine.scheduling.holds import BlockHolds
from tandem.engine.scheduling.loads import BlockLoads
from tandem.engine.tiers.config import TierConfig
from tandem.engine.tiers.store_tier import StoreTier
from tandem.sim import run_virtual

GROUP = 10


def run_seed(seed, num_requests=16, **changes):
    settings = Settings(seed)
    for name, value in changes.items():
        assert hasattr(settings, name)
        setattr(settings, name, value)

    async def run():
        world = KvWorld(seed, settings)
        await world.run(num_requests)
        return world

    return run_virtual(run)


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.slow] * (n > 0)) for n in range(0, 100, GROUP)],
)
def test_seeds(first):
    worlds = {seed: run_seed(seed) for seed in range(first, first + GROUP)}
    bad = {seed: world.violations[:3] for seed, world in worlds.items() if world.violations}
    assert not bad
    assert sum(world.ends["length"] for world in worlds.values()) > 10 * GROUP
    assert sum(world.num_loaded for world in worlds.values()) > GROUP
    assert sum(world.num_read for world in worlds.values()) > GROUP
    assert sum(sum(world.cluster.fallbacks.values()) for world in worlds.values()) > 0
    assert sum(world.num_evicted for world in worlds.values()) > 0


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(100, 2100), marks=pytest.mark.slow)], ids=len
)
def test_seeds_of_a_model_with_states(seeds):
    """A wrong state gives wrong tokens: half a point, a late or flipped read, a slot given away."""
    worlds = {seed: run_seed(seed, num_slots=(12, 7)[seed % 2]) for seed in seeds}
    bad = {seed: world.violations[:3] for seed, world in worlds.items() if world.violations}
    assert not bad
    assert sum(world.ends["length"] for world in worlds.values()) > 8 * len(seeds)
    assert sum(world.num_loaded for world in worlds.values()) > 0
    assert sum(world.num_read for world in worlds.values()) > 0


@pytest.mark.parametrize("seed", rest_slow([40, 2192, 7592], [40, 2192, 7481, 7592, 8462]))
def test_seeds_that_failed(seed):
    """40: two of three objects were asked for again, in another order than at first, and a get
    gave each the other's value. 2192, 7481: a pair was apart for ten seconds after one lost
    message. The others: a request that was dropped while its call was on the way stayed at the
    instance.
    """
    assert run_seed(seed).violations == []


def find_violation(seeds, **changes):
    for seed in seeds:
        violations = run_seed(seed, **changes).violations
        if violations:
            return violations[0]
    return None


# Removed safety rules: each is the product's method without one check.


def trust_any_copy(tier, block):
    """A block is stored although its memory may have been given to somebody else."""
    return tier._copy_aside(block)


def trust_any_load(engine, request, block_ids, reason=""):
    """Whatever a transfer left in a block is taken for its content."""
    engine.load_done(request, block_ids)


def free_at_once(loads, request, load, position):
    """Blocks of a load that nobody waits for are free while the transfer goes on."""
    cut = load.pending[position:]
    del load.pending[position:]
    loads._counters.num_failed_loads += len(cut)
    loads._prefix.forget_expected(request, [pending.key for pending in cut])
    for pending in cut:
        load.done.discard(pending.block)
        if loads._in_transfer.pop(pending.block, None) is None:
            continue
        loads._release((pending.block,))


def share_with_anybody(ours, theirs):
    """Blocks of an instance with other weights are read."""


async def trust_bytes(hand_over, batch):
    """A block that was read is taken without asking the prefill what is in it now."""
    done = [
        pending
        for pending in batch
        if pending.num_layers == hand_over._all_layers
        and pending.load.position < hand_over._answer.num_complete
    ]
    hand_over._pending = [pending for pending in hand_over._pending if pending not in done]
    hand_over._take([pending.load for pending in done])


async def trust_state(hand_over, load):
    """A state is taken without asking what the prefill has, and it may be another's by now."""
    while not hand_over._answer.is_held:
        hand_over._note(await hand_over._ask_until_answered())
    hand_over._take([load])


def hold_nothing(holds, request, until_s):
    """A hold does not keep its blocks, so they are given away while they are read."""
    holds._holds[request.request_id] = (request, until_s)


def release_nothing(holds, request_id):
    """A hold that was kept without references ends without any."""
    return holds._holds.pop(request_id, None) is not None


def announce_all(engine, request, num_tokens):
    """Blocks that are not computed yet are announced as complete."""
    return len(request.block_table)


def name_no_model(member):
    """A run of an instance does not tell which model it serves, so an answer goes on anywhere."""
    return InstanceRef(member.name, member.supervisor.num_restarts)


@pytest.mark.parametrize(
    "mutants",
    [
        {(StoreTier, "_copy_unchanged"): trust_any_copy},
        {(Engine, "load_failed"): trust_any_load},
        {(BlockLoads, "_cut"): free_at_once},
        {(peers, "check_peer"): share_with_anybody},
        {(HandOver, "_verify"): trust_bytes},
        {
            (BlockHolds, "hold"): hold_nothing,
            (BlockHolds, "release"): release_nothing,
            (BlockHolds, "list_references"): lambda holds: [],
        },
        {(Engine, "_count_blocks"): announce_all},
        {(ClusterMember, "ref"): name_no_model},
        {(HandOver, "_read_state"): trust_state},
    ],
    ids=lambda mutants: next(iter(mutants.values())).__name__,
)
def test_removed_safety_rules_are_caught(mutants, monkeypatch):
    for (owner, name), mutant in mutants.items():
        is_property = isinstance(getattr(owner, name), property)
        monkeypatch.setattr(owner, name, property(mutant) if is_property else mutant)
    changes = {}
    if (StoreTier, "_copy_unchanged") in mutants:
        # Blocks have to be given away while they wait to be stored.
        tiers = TierConfig(decision="load", prefetch="wait", staging_blocks=2)
        changes = {"roles": ROLES["unified"], "num_blocks": 18, "tiers": tiers}
    if (ClusterMember, "ref") in mutants:
        changes = {"roles": ROLES["unified"], "swaps": True}
    if (HandOver, "_read_state") in mutants:
        changes = {"roles": ROLES["pair"], "num_slots": 12}
    # Seeds that are known to show it first: the rarest would take 27.
    first = {share_with_anybody: 4, name_no_model: 26, trust_any_copy: 4}
    likely = [first[mutant] for mutant in mutants.values() if mutant in first]
    assert find_violation([*likely, *range(60)], **changes) is not None


@pytest.mark.slow
@pytest.mark.parametrize("first", [100, *range(1000, 11_000, 500)])
def test_many_seeds(first):
    bad = {s: w.violations[:3] for s in range(first, first + 500) if (w := run_seed(s)).violations}
    assert not bad
