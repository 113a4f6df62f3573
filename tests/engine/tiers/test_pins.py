"""Pins of blocks are bounded for each client and end by themselves."""

from tandem.engine.tiers.pins import PinLedger

KEYS = [bytes([i]) for i in range(6)]


def test_a_client_pins_leading_blocks_as_far_as_there_is_room():
    ledger = PinLedger(4)
    assert ledger.take("ann", KEYS[:3], 10.0, 0.0) == KEYS[:3]
    # A longer prefix of the same conversation: what is pinned already takes no more room.
    assert ledger.take("ann", KEYS, 10.0, 1.0) == KEYS[:4]
    assert ledger.find_left(KEYS[0], 1.0) == 10.0
    assert ledger.find_left(KEYS[4], 1.0) == 0.0
    assert ledger.take("bob", KEYS[4:], 10.0, 1.0) == KEYS[4:]
    assert PinLedger(0).take("ann", KEYS, 10.0, 0.0) == []


def test_pins_end_and_make_room():
    ledger = PinLedger(2)
    ledger.take("ann", KEYS[:2], 20.0, 0.0)
    ledger.take("ann", KEYS[:1], 5.0, 1.0)
    assert ledger.find_left(KEYS[0], 10.0) == 10.0
    assert ledger.take("ann", KEYS[2:3], 20.0, 10.0) == []
    assert ledger.find_left(KEYS[0], 20.0) == 0.0
    assert ledger.take("ann", KEYS[2:], 20.0, 30.0) == KEYS[2:4]
    assert ledger.find_left(KEYS[2], 30.0) == 20.0
