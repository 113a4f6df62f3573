"""The real server, scheduler, tiers, store and disaggregation under seeded faults.

Each accepted request ends exactly once, with the right tokens or a terminal error. When the faults
are over, everything is whole again in time, and no block, hold, transfer, staging slot or question
is left. A failing seed prints itself; run it alone by its number.
"""

import pytest
from kv_world import KvWorld, Settings

from tandem.sim import run_virtual

GROUP = 20


def run_seed(seed, num_requests=24):
    async def run():
        world = KvWorld(seed, Settings(seed))
        await world.run(num_requests)
        return world

    return run_virtual(run)


@pytest.mark.parametrize("first", range(0, 200, GROUP))
def test_seeds(first):
    worlds = {seed: run_seed(seed) for seed in range(first, first + GROUP)}
    bad = {seed: world.violations[:3] for seed, world in worlds.items() if world.violations}
    assert not bad
    assert sum(world.ends["length"] for world in worlds.values()) > 10 * GROUP
    assert sum(world.num_loaded for world in worlds.values()) > GROUP
    assert sum(world.num_read for world in worlds.values()) > GROUP
