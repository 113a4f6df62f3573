"""Goal: the sum of what a reader was told is what the instance holds, however it was told."""

import random
from types import SimpleNamespace

import pytest

from tandem.engine.process import inventory as module
from tandem.engine.process.inventory import BlockInventory, cut_key


def make_key(number):
    return number.to_bytes(8, "little") + bytes(24)


@pytest.mark.parametrize("seed", range(10))
def test_readers_know_what_is_held_whenever_they_came(seed, monkeypatch):
    monkeypatch.setattr(module, "MAX_CHANGES", 7)
    chance, inventory = random.Random(seed), BlockInventory()
    held, known = set(), {}
    for step in range(600):
        if step in (0, 200):
            inventory.open(step)
            known[step] = set()
        match chance.randrange(40):
            case 0:
                inventory.note_cleared()
                held.clear()
            case n if n < 25:
                number = chance.randrange(50)
                inventory.note_stored(SimpleNamespace(key=make_key(number)))
                held.add(number)
            case n if n < 35 and held:
                number = chance.choice(sorted(held))
                inventory.note_removed(make_key(number))
                held.discard(number)
            case _:
                take(inventory, known)
    for _ in range(20):
        take(inventory, known)
    assert known == {0: held, 200: held}
    inventory.close(0)
    assert inventory.take(0) is None


def take(inventory, known):
    for reader, keys in known.items():
        changes = inventory.take(reader)
        if changes is not None:
            if changes.is_reset:
                keys.clear()
            keys.difference_update(changes.removed)
            keys.update(changes.stored)


def test_the_store_has_what_is_written_there_until_a_lookup_misses_it():
    for write, expected in (("write_through", [3]), ("on_evict", []), ("off", [])):
        inventory = BlockInventory(write)
        inventory.open("server")
        inventory.note_stored(SimpleNamespace(key=make_key(3)))
        assert inventory.take("server").in_store == expected
        inventory.note_removed(make_key(3))
        assert inventory.take("server").in_store == ([3] if write == "on_evict" else [])
        inventory.note_in_store([make_key(3)], is_there=False)
        assert inventory.take("server").lost_in_store == [cut_key(make_key(3))]
        assert inventory.take("server") is None


def test_a_block_is_in_the_group_while_any_state_follows_it():
    inventory = BlockInventory()
    inventory.open("server")
    first, second = (SimpleNamespace(parent_key=make_key(3)) for _ in range(2))
    inventory.note_state_kept(first)
    inventory.note_state_kept(second)
    inventory.note_state_removed(first)
    assert inventory.take("server").group_stored == [cut_key(make_key(3))]
    inventory.note_state_removed(second)
    assert inventory.take("server").group_removed == [cut_key(make_key(3))]
    # A snapshot that a step in flight reads outlives a flush.
    inventory.note_state_kept(first)
    inventory.note_cleared()
    inventory.note_state_removed(first)
    changes = inventory.take("server")
    assert (changes.is_reset, changes.group_stored) == (True, [])
    inventory.note_state_kept(second)
    assert inventory.take("server").group_stored == [cut_key(make_key(3))]


def test_windows_are_told_to_a_reader_who_comes_later():
    inventory = BlockInventory()
    for number in (4, 5):
        inventory.note_window_kept(SimpleNamespace(key=make_key(number)))
    inventory.note_window_removed(make_key(4))
    inventory.open("server")
    assert inventory.take("server").group_stored == [cut_key(make_key(5))]
    assert inventory.take("server") is None
