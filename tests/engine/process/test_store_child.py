"""Goal: a store that cannot start says why in one line, and leaves nothing behind."""

import asyncio

import pytest

from tandem.core.errors import PeerLostError
from tandem.engine.process.store_child import StoreChild
from tandem.rpc import RpcConfig
from tandem.store.config import StoreConfig

TIMEOUT_S = 120.0


def start_in_vain(**settings) -> str:
    async def work() -> None:
        async with asyncio.timeout(TIMEOUT_S), StoreChild(StoreConfig(**settings), RpcConfig()):
            raise AssertionError("it serves")

    with pytest.raises(PeerLostError) as caught:
        asyncio.run(work())
    return caught.value.what


def test_memory_that_the_machine_does_not_have(tmp_path, capfd):
    segments = tmp_path / "segments"
    words = start_in_vain(memory="511GiB", segment_dir=str(segments))
    assert "needs" in words
    assert "store.memory" in words
    assert list(segments.iterdir()) == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("folder", ["/proc/none", "file"])
def test_a_folder_for_the_disk_that_cannot_be(tmp_path, capfd, folder):
    (tmp_path / "file").touch()
    segments = tmp_path / "segments"
    words = start_in_vain(memory="1MiB", segment_dir=str(segments), ssd_dir=str(tmp_path / folder))
    assert folder in words
    assert list(segments.iterdir()) == []
    assert "Traceback" not in capfd.readouterr().err
