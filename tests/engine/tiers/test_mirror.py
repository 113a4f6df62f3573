"""Goal: KV from the store reaches a device layer by layer behind compute, and changes no bit.

Method: engines on a device that is none, whose streams are threads and whose copies are held back
at seeded moments, over a real store; each engine begins with empty memory. The model has blocks of
all tokens, of windows, or states beside them. Tokens are those of the CPU's engine.
"""

import random
import threading
import time

import pytest
import torch
from far_device import FarDevice
from hybrid import save_hybrid
from test_store_tier import LiveStore, Served
from windowed import save_windowed

from quick import rest_slow
from tandem.core.kv_layout import GqaLayout
from tandem.engine import planning
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.blocks import BlockCopy
from tandem.engine.stepping.messages import StepInput
from tandem.engine.tiers.mirror import KvMirror
from tandem.kernels.fake.device import FakeDevice
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.paged import LayerPlace, PagedKvCache
from tandem.models.config import ModelConfig
from tandem.models.loading import loader

BLOCK = 16
PROMPT = [(7 * i * i + 3) % 120 + 3 for i in range(5 * BLOCK + 5)]
WAIT_S = 60.0
LAYOUT = GqaLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=BLOCK, dtype="float32")
KINDS = {
    "blocks": (lambda place: "demo", {}),
    "windows": (save_windowed, {"num_window_blocks": 40}),
    "states": (save_hybrid, {"num_state_slots": 8}),
}


def hold_back(seed):
    chance = random.Random(seed)
    return lambda _: time.sleep(0.002 * chance.random() if chance.random() < 0.3 else 0)


@pytest.fixture
def far(monkeypatch):
    with FarDevice(hold_back(5)) as device:
        for module in (planning, loader):
            monkeypatch.setattr(module, "open_device", lambda _name: device)
        yield device


@pytest.mark.parametrize("kind", rest_slow(["blocks", "states"], KINDS))
def test_what_the_store_has_reaches_the_device(far, tmp_path, kind):
    save, settings = KINDS[kind]
    path = str(save(tmp_path / "model"))
    shared = {"path": path, "dtype": "float32", "packed_cache": "off", "proof": "off"}
    model = ModelConfig(**shared, device="cuda")
    expected = Served(None, settings, ModelConfig(**shared)).generate(PROMPT)[0]
    made = []
    try:
        with LiveStore(tmp_path) as store:
            made.append(Served(store, settings, model))
            assert made[0].generate(PROMPT) == (expected, 0)
            made[0].wait_stored(5)
            deadline = time.monotonic() + WAIT_S
            while kind == "states" and not made[0].tier.counters.stored_states:
                assert time.monotonic() < deadline, made[0].tier.counters
                time.sleep(0.005)
            while kind == "windows" and made[0].tier.counters.stored_window_blocks < 5:
                assert time.monotonic() < deadline, made[0].tier.counters
                time.sleep(0.005)
            made.append(Served(store, settings, model))
            assert made[1].generate(PROMPT) == (expected, 5 * BLOCK)
            if kind == "blocks":
                # A part of a block that came, which is copied to a block of its own.
                assert made[1].generate([*PROMPT[:70], 9])[1] >= 4 * BLOCK
            counters = made[1].tier.counters
            assert counters.loaded_blocks == 5
            assert counters.loaded_states == (kind == "states")
            assert (counters.loaded_window_blocks > 0) == (kind == "windows")
            # The same blocks, not evicted: nothing is copied again.
            assert made[1].generate(PROMPT)[0] == expected
    finally:
        for served in made:
            served.close()


def make_mirror(device, num_blocks=6):
    memory = device.map_memory(num_blocks * LAYOUT.bytes_per_block)
    cache = PagedKvCache(LAYOUT, num_blocks, device=device, memory=memory.tensor)
    return cache, KvMirror(cache, None)


def full(*numbers):
    return [GroupBlock(Group.FULL, number) for number in numbers]


def test_a_layer_waits_for_its_own_copies_alone():
    """The copies of the last layer are held until the first layer's are waited for."""
    is_first_there, copied = threading.Event(), []

    def hold(name):
        if name == "copy":
            copied.append(name)
            if len(copied) > 2 * 2:
                assert is_first_there.wait(WAIT_S)

    with FakeDevice(hold) as device:
        cache, mirror = make_mirror(device)
        mirror.groups[Group.FULL].view_bytes()[:] = 1
        mirror.note_loaded(full(4, 1))
        loads = mirror.begin(StepInput([]))
        for layer in range(2):
            loads.wait(LayerPlace(0, layer))
            items = cache.view_items()[[1, 4]].view(2, 3, -1)
            assert items[:, layer].all()
        assert not cache.view_items()[4].view(3, -1)[2].any()
        is_first_there.set()
        loads.wait_all()
        assert cache.view_items()[[1, 4]].all()
        assert not cache.view_items()[[0, 2, 3, 5]].any()
        # What has come is copied once.
        assert mirror.begin(StepInput([])) is None


def test_a_step_that_copies_blocks_has_them_first():
    with FakeDevice(hold_back(7)) as device:
        cache, mirror = make_mirror(device)
        mirror.groups[Group.FULL].view_bytes()[:] = 1
        mirror.note_loaded(full(2))
        mirror.begin(StepInput([], [BlockCopy(2, 3, 4)]))
        assert cache.view_items()[2].all()


def test_copies_of_a_step_that_failed_have_ended_before_the_next():
    with FakeDevice(hold_back(8)) as device:
        cache, mirror = make_mirror(device)
        mirror.groups[Group.FULL].view_bytes()[:] = 1
        mirror.note_loaded(full(*range(6)))
        assert isinstance(mirror.begin(StepInput([])), KvArrivals)
        assert mirror.begin(StepInput([])) is None
        assert cache.view_items().all()


def test_what_is_filled_is_on_the_host_when_a_tier_sees_it():
    with FakeDevice(hold_back(9)) as device:
        cache, mirror = make_mirror(device)
        cache.view_items()[3] = torch.arange(LAYOUT.bytes_per_block) % 251
        mirror.save(full(3))
        seen = mirror.groups[Group.FULL].view_bytes().reshape(6, -1)
        assert seen[3].tolist() == cache.view_items()[3].tolist()
        assert not seen[2].any()
