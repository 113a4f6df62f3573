"""Goal: experts on disk are computed from the right bytes, or a read's error is raised.

Method: a disk of the test's own that ends reads in any order, late, or with errors, and writes to
their places only then; what is computed is checked against the expert's bytes each time. Sequences
of steps are seeded. The real reader reads files that are short, cut or written to.
"""

import os
import random

import numpy as np
import pytest

from each import each
from tandem._native import DirectReader
from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    InternalError,
    NotFoundError,
    TandemError,
)
from tandem.kernels.cpu.expert_slots import ExpertTier, LayerSlots
from tandem.placement.experts.cache import LruPolicy

ALIGNMENT = 64
EXPERT_BYTES = 160
"""No multiple of the alignment: experts begin at different places of their ranges."""
SLOT_BYTES = 256
NUM_EXPERTS = 12


class Disk:
    """Experts whose bytes are their numbers; a read writes them when it ends, and not before."""

    def __init__(self, num_places, chance):
        self.memory = np.zeros(num_places * SLOT_BYTES, np.uint8)
        self.chance = chance
        self.files = 0
        self.open = {}
        self.errors = {}
        self.same_as = {}
        """Numbers of files that were opened again, and their first numbers."""
        self.hangs = False
        self.count = 0

    def array(self):
        return self.memory

    def add_file(self, path):
        self.files += 1
        return self.files - 1

    def begin(self, file, offset, length, at):
        for _, other in self.open.values():
            assert other != at, "a place that a read may still write to is used again"
        self.count += 1
        self.open[self.count] = (file, offset), at
        # What a torn read would leave.
        self.memory[at : at + SLOT_BYTES] = 255
        return self.count

    def is_done(self, read):
        return not self.hangs and self.chance.random() < 0.5

    def finish(self, read, timeout_ms):
        if self.hangs:
            raise DeadlineError("test", f"{timeout_ms} ms")
        (file, offset), at = self.open.pop(read)
        file = self.same_as.get(file, file)
        expert_id = offset // EXPERT_BYTES
        if error := self.errors.get((file, expert_id)):
            raise error
        first = at + offset % ALIGNMENT
        self.memory[first : first + EXPERT_BYTES] = 16 * file + expert_id


class World:
    """Layers over one tier, and what they computed."""

    def __init__(self, seed, *, num_slots=3, num_staged=2, num_layers=2):
        self.chance = random.Random(seed)
        self.disk = Disk(num_slots * num_layers + num_staged, self.chance)
        self.tier = ExpertTier(
            self.disk,
            slot_bytes=SLOT_BYTES,
            num_slots=num_slots * num_layers,
            num_staged=num_staged,
            max_insertions=num_slots,
            alignment=ALIGNMENT,
        )
        self.layers = [
            LayerSlots(
                self.tier,
                "experts",
                expert_bytes=EXPERT_BYTES,
                num_experts=NUM_EXPERTS,
                num_slots=num_slots,
                policy=LruPolicy(num_slots),
            )
            for _ in range(num_layers)
        ]

    def run(self, layer_idx, ids, *, is_cached=True):
        """Run a layer and check that each expert was computed once, in order, from its bytes."""
        layer, done, calls = self.layers[layer_idx], [], []

        def compute(first, end, is_added):
            assert is_added == bool(calls)
            calls.append(first)
            for expert_id in sorted(set(ids)):
                if not first <= expert_id < end:
                    continue
                place = layer.places[expert_id]
                found = self.disk.memory[place : place + EXPERT_BYTES]
                assert (found == 16 * layer_idx + expert_id).all(), (expert_id, found)
                done.append(expert_id)

        layer.run(np.array(ids, np.int64), compute, is_cached=is_cached)
        assert done == sorted(e for e in set(ids) if e >= 0)
        assert calls

    def pick(self):
        return [self.chance.randrange(-1, NUM_EXPERTS) for _ in range(self.chance.randrange(9))]


@each("seed", range(20))
def test_any_sequence_of_steps_computes_the_right_experts(seed):
    chance = random.Random(seed)
    world = World(seed, num_slots=chance.randrange(1, 6), num_staged=chance.randrange(1, 6))
    for _ in range(60):
        layer_idx = chance.randrange(2)
        if chance.random() < 0.3:
            world.layers[layer_idx].guess([chance.randrange(NUM_EXPERTS) for _ in range(2)])
        world.run(layer_idx, world.pick(), is_cached=chance.random() < 0.7)
    assert world.tier.counters.hits > 0
    assert world.tier.counters.guessed_right > 0


def test_a_slot_is_not_read_again_and_a_prefill_leaves_it():
    world = World(0)
    world.run(0, [1, 2, 3])
    assert world.disk.count == 3
    world.run(0, [3, 1, 2, 2])
    assert world.disk.count == 3
    world.run(0, list(range(NUM_EXPERTS)), is_cached=False)
    assert world.disk.count == NUM_EXPERTS
    world.run(0, [1, 2, 3])
    assert world.disk.count == NUM_EXPERTS
    counters = world.tier.counters
    assert (counters.hits, counters.inserted, counters.passed) == (9, 3, 9)
    assert counters.read_bytes == 12 * EXPERT_BYTES


@each("seed", range(20))
def test_steps_after_failed_reads_compute_the_right_experts(seed):
    """Errors and stalls come and go; no place is used while a read may write to it."""
    world = World(seed, num_staged=3)
    chance, num_failed, num_right = world.chance, 0, 0
    for _ in range(120):
        world.disk.hangs = chance.random() < 0.15
        world.disk.errors = {
            (chance.randrange(2), chance.randrange(NUM_EXPERTS)): InternalError("test", "EIO")
            for _ in range(chance.randrange(3))
        }
        layer_idx = chance.randrange(2)
        try:
            if chance.random() < 0.3:
                world.layers[layer_idx].guess([chance.randrange(NUM_EXPERTS)])
            world.run(layer_idx, world.pick(), is_cached=chance.random() < 0.7)
            num_right += 1
        except TandemError:
            num_failed += 1
    assert num_failed > 5
    assert num_right > 20
    world.disk.hangs, world.disk.errors = False, {}
    for layer_idx in (0, 1):
        # Every slot and every staged place is usable again.
        world.run(layer_idx, list(range(NUM_EXPERTS)), is_cached=False)
        world.run(layer_idx, [0, 1, 2])
        world.run(layer_idx, [3, 4, 5])
    assert world.tier.counters.read_bytes > 0


@pytest.fixture
def blob(tmp_path):
    path = tmp_path / "blob"
    path.write_bytes(random.Random(1).randbytes(3 * 70_000))
    return path


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_ranges_come_whole(blob, backend):
    """Ranges of every alignment, more parts than are in flight at a time."""
    reader = DirectReader(1 << 20, depth=2, part_bytes=4096, backend=backend)
    file, data = reader.add_file(str(blob)), blob.read_bytes()
    ranges = [(0, 70_000), (70_000, 70_000), (140_000, 70_000), (4096, 1), (209_999, 1)]
    begun = []
    at = 0
    for offset, length in ranges:
        begun.append((reader.begin(file, offset, length, at), offset, length, at))
        at += DirectReader.count_span(offset, length)
    for read, offset, length, place in reversed(begun):
        reader.finish(read, 10_000)
        first = place + offset % DirectReader.ALIGNMENT
        assert reader.array()[first : first + length].tobytes() == data[offset : offset + length]
        with pytest.raises(NotFoundError):
            reader.finish(read, 0)
    assert reader.bytes_read >= sum(length for _, length in ranges)


def test_a_file_that_changed_is_an_error(blob):
    reader = DirectReader(1 << 20, part_bytes=4096)
    file = reader.add_file(str(blob))
    reader.finish(reader.begin(file, 0, 70_000, 0), 10_000)
    with blob.open("r+b") as opened:
        opened.truncate(100_000)
    with pytest.raises(CorruptionError, match=r"ends at byte 10\d{4}, before 1\d{5}"):
        reader.finish(reader.begin(file, 70_000, 70_000, 0), 10_000)
    # What is there is not what was packed.
    with pytest.raises(CorruptionError, match="was written to since"):
        reader.finish(reader.begin(file, 0, 10, 0), 10_000)


def test_a_file_written_in_place_is_an_error(blob):
    reader = DirectReader(1 << 20)
    file = reader.add_file(str(blob))
    os.utime(blob, ns=(0, 10**18))
    with pytest.raises(CorruptionError, match="was written to since"):
        reader.finish(reader.begin(file, 0, 10, 0), 10_000)


def test_wrong_ranges_are_refused(blob, tmp_path):
    reader = DirectReader(8192)
    file = reader.add_file(str(blob))
    for offset, length, at in [(0, 8193, 0), (0, 10, 1), (4095, 4098, 0), (0, 1, 8192), (0, 0, 0)]:
        with pytest.raises(ConfigError):
            reader.begin(file, offset, length, at)
    with pytest.raises(ConfigError):
        reader.begin(file, 209_999, 2, 0)
    with pytest.raises(NotFoundError):
        reader.begin(1, 0, 1, 0)
    with pytest.raises(NotFoundError):
        reader.add_file(str(tmp_path / "none"))
    with pytest.raises(ConfigError):
        DirectReader(8192, part_bytes=100)


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_file_that_was_touched_is_read_again_if_its_content_is_the_same(is_cached):
    """A backup or a copy of its times must not end every answer; other content must."""
    world, looks = World(1, num_layers=1), []
    touched = CorruptionError("test", "was written to since it was opened")
    layer, disk = world.layers[0], world.disk
    layer._is_unchanged = lambda: looks.append(1) or len(looks) == 1
    world.run(0, [0, 1], is_cached=is_cached)
    begin = disk.finish

    def finish(read, timeout_ms):
        (file, _), _ = disk.open[read]
        if file in stale:
            del disk.open[read]
            raise touched
        begin(read, timeout_ms)

    stale, disk.finish, disk.same_as = {0}, finish, {1: 0}
    world.run(0, [2, 3, 4, 5], is_cached=is_cached)
    world.run(0, [0, 1, 6], is_cached=is_cached)
    assert (len(looks), disk.files) == (1, 2), "looked once, not for each read"
    stale.add(1)
    with pytest.raises(CorruptionError, match="was written to"):
        world.run(0, [7], is_cached=is_cached)
    layer._is_unchanged = None
    with pytest.raises(CorruptionError, match="was written to"):
        world.run(0, [7], is_cached=is_cached)
