"""Goal: a store that cannot start says why in one line and leaves nothing behind; one that is lost
or hangs is replaced, soon if the last one served."""

import asyncio
import logging
import sys

import pytest

from tandem.core.errors import PeerLostError
from tandem.engine.process import store_child
from tandem.engine.process.store_child import StoreChild
from tandem.rpc import RpcConfig
from tandem.store.config import StoreConfig
from tandem.store.process import READY

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


@pytest.mark.parametrize("folder", [pytest.param("/proc/none", marks=pytest.mark.slow), "file"])
def test_a_folder_for_the_disk_that_cannot_be(tmp_path, capfd, folder):
    (tmp_path / "file").touch()
    segments = tmp_path / "segments"
    words = start_in_vain(memory="1MiB", segment_dir=str(segments), ssd_dir=str(tmp_path / folder))
    assert folder in words
    assert list(segments.iterdir()) == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
def children(monkeypatch):
    """Start stand-ins instead: "serves" says that it does, "hangs" says nothing, "dies" ends."""
    programs = {
        "serves": f"print({READY.decode().strip()!r}, flush=True); sys.stdin.buffer.read()",
        "hangs": "sys.stdin.buffer.read()",
        "dies": "",
    }
    todo = []

    async def start(module, *, stdout):
        return await asyncio.create_subprocess_exec(
            sys.executable, "-Sc", f"import sys; sys.stdin.readline(); {programs[todo.pop(0)]}",
            stdin=asyncio.subprocess.PIPE, stdout=stdout,
        )  # fmt: skip

    monkeypatch.setattr(store_child, "start_child", start)
    return todo


def test_one_that_hangs_is_replaced_and_success_shortens_the_pause(children, monkeypatch, caplog):
    """Method: each stand-in that serves is lost at once; the pauses are read from the log."""
    monkeypatch.setattr(store_child, "START_TIMEOUT_S", 2.0)
    monkeypatch.setattr(store_child, "RESTART_PAUSE_S", 0.001)
    lost = asyncio.Event()
    seen = []

    async def watch(*_):
        await lost.wait()
        lost.clear()
        return "it is silent"

    monkeypatch.setattr(store_child, "watch_master", watch)
    children += ["serves", "hangs", "dies", "serves", "dies", "serves"]

    async def work() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            async with StoreChild(StoreConfig(memory="1MiB"), RpcConfig()) as child:
                for restarts in (3, 5):
                    seen.append(child.status)
                    lost.set()
                    while child.status.num_restarts != restarts or child.status.stage != "serving":
                        seen.append(child.status)
                        await asyncio.sleep(0)
                seen.append(child.status)

    caplog.set_level(logging.ERROR)
    asyncio.run(work())
    losses = [r.args for r in caplog.records if "store_lost" in r.msg]
    reasons = [str(reason) for reason, _ in losses]
    assert "did not start" in reasons[1]
    pauses = [pause for _, pause in losses]
    assert pauses == [0.001, 0.001 * 2, 0.001 * 4, 0.001, 0.001 * 2]
    assert (seen[0].stage, seen[0].num_restarts) == ("serving", 0)
    assert "restarting" in {status.stage for status in seen}
    assert (seen[-1].stage, seen[-1].num_restarts) == ("serving", 5)
    assert "status 0" in seen[-1].detail, "why the last one was lost"


def test_one_that_hangs_at_first_is_an_error(children, monkeypatch):
    monkeypatch.setattr(store_child, "START_TIMEOUT_S", 0.5)
    children += ["hangs"]
    assert "did not start" in start_in_vain(memory="1MiB")
