"""Goal: while a model sleeps its packed weights stay mapped, by the process that will wake it.

Method: a supervisor over an instance that is only a control channel, and a folder of packed files;
the kernel's list of this process's mappings tells what is mapped.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tandem.core.wire import InstanceInfo, InstanceStage, StageChanged
from tandem.engine.config import EngineConfig
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.kept_weights import KeptWeights
from tandem.engine.process.supervisor import InstanceSupervisor
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig

WAIT_S = 60.0
INFO = InstanceInfo(
    model="m", architecture="A", dtype="bfloat16", vocab_size=9, max_model_len=9, block_size=1,
    num_blocks=9, kv_bytes_per_token=1, weight_bytes=1, num_parameters=1, eos_token_ids=[],
    weight_version="", system_fingerprint="", kv_identity="", pid=1, load_seconds=0.0,
)  # fmt: skip


class Channel:
    """A ``SessionClient`` of an instance that serves at once."""

    is_connected, silence_s = True, 0.0

    def __init__(self, info):
        self.info = info

    def on_event(self, callback, event_type):
        self.take = callback

    def on_peer_lost(self, callback):
        pass

    async def __aenter__(self):
        asyncio.get_running_loop().call_soon(self.take, None, StageChanged(InstanceStage.READY))
        return self

    async def __aexit__(self, *details):
        pass

    async def call(self, method, request, response_type, *, timeout_s=None):
        return self.info

    def push(self, event):
        pass


class Child:
    """An ``InstanceChild``."""

    pid = 1

    def __init__(self, info):
        self.client = Channel(info)

    async def wait(self):
        await asyncio.Event().wait()

    async def end(self, *, is_lost=False):
        pass


class Starter:
    """A ``Launcher``; says what was mapped when it was asked for the next process."""

    def __init__(self, info, is_mapped):
        self.info, self.is_mapped, self.seen = info, is_mapped, []

    async def start(self, spec):
        self.seen.append(self.is_mapped())
        return Child(self.info)

    async def close(self):
        pass


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    for name in ("layers.0.packed", "layers.1.packed", "layers.2.packed.partial"):
        (tmp_path / name).write_bytes(bytes(8192))
        (tmp_path / name).chmod(0o600)
    return tmp_path


def list_mapped(folder):
    """Return the names of a folder's files that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name for line in lines if str(folder) in line}


def test_weights_are_mapped_from_sleep_to_wake_and_not_when_evicted(folder):
    info = msgspec.structs.replace(INFO, packed_folders=[str(folder)])
    starter = Starter(info, lambda: list_mapped(folder))
    spec = InstanceSpec(model=ModelConfig(path="m"), engine=EngineConfig(), rpc=RpcConfig())
    finished = {"layers.0.packed", "layers.1.packed"}

    async def work():
        async with asyncio.timeout(WAIT_S), InstanceSupervisor(spec, launcher=starter) as instance:
            await instance.wait_ready()
            assert list_mapped(folder) == set()
            await instance.sleep()
            assert list_mapped(folder) == finished
            assert instance.kept_bytes == 2 * 8192
            await instance.wake()
            assert list_mapped(folder) == set(), "the instance maps them itself"
            await instance.sleep()
            await instance.evict()
            assert list_mapped(folder) == set()
            await instance.wake()
            await instance.sleep()
        assert list_mapped(folder) == set(), "nothing is left at the end"

    asyncio.run(work())
    assert starter.seen == [set(), finished, set()], "mapped until the next process has been up"


def test_files_that_others_may_write_and_folders_that_are_gone_are_left_out(folder):
    (folder / "layers.0.packed").chmod(0o666)
    kept = KeptWeights([str(folder), str(folder / "gone")])
    assert list_mapped(folder) == {"layers.1.packed"}
    kept.close()
    assert list_mapped(folder) == set()
