"""Goal: processes of a store on several machines offer each other addresses that reach them."""

import logging

from each import each
from tandem.store.services.connect import choose_host_address, choose_master_address


@each(
    ("url", "address"),
    [
        ("ipc:///tmp/tandem/master.sock", "127.0.0.1:0"),
        ("tcp://127.0.0.1:7400", "127.0.0.1:0"),
        ("tcp://10.77.0.1:7400", "10.77.0.1:0"),
        ("tcp://[fd00::1]:7400", "[fd00::1]:0"),
        ("tcp://store.example:7400", "store.example:0"),
        ("tcp://0.0.0.0:7400", "127.0.0.1:0"),
    ],
)
def test_a_master_offers_lanes_where_it_listens(url, address, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose_master_address(url) == address
    assert ("--store.listen" in caplog.text) == ("0.0.0.0" in url)
    caplog.clear()


def test_a_host_offers_its_memory_where_the_master_is_reached():
    assert choose_host_address("tcp://127.0.0.1:7400") == "127.0.0.1:0"
    assert choose_host_address("ipc:///tmp/tandem/master.sock") == "127.0.0.1:0"
    assert choose_host_address("tcp://no-such-host.invalid:7400") == "127.0.0.1:0"
