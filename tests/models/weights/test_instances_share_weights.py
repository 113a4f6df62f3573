"""Goal: two instances of one model need the memory of its packed weights once.

Method: two instance processes, started as a server starts them, that serve a request each; the
kernel's Pss of the mapped file (what is shared counts half) is compared to its Rss.
"""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.cluster.client import ClusterClient, make_specs
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.config import EngineConfig
from tandem.engine.process.fork_server import ForkServer
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.launcher import ProcessLauncher
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig

START_TIMEOUT_S = 240.0


def read_mapping(pid, folder):
    """(Rss, Pss) in KiB of all that a process maps of the files of a folder."""
    sizes, is_ours = {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0]:
            is_ours = str(folder) in line
        elif is_ours and name in sizes:
            sizes[name] += int(value.split()[0])
    return sizes["Rss"], sizes["Pss"]


async def serve_and_look(folder):
    config = ClusterConfig(unified=2)
    common = InstanceSpec(
        model=ModelConfig(path="demo", expert_format="int8g32", packed_cache=str(folder)),
        engine=EngineConfig(num_kv_blocks=64, max_model_len=512),
        rpc=RpcConfig(),
        log_level="error",
    )
    specs = make_specs(config, common)
    async with (
        asyncio.timeout(START_TIMEOUT_S),
        ForkServer() as forks,
        ClusterClient(
            specs, config, is_staggered=True, make_launcher=partial(ProcessLauncher, forks)
        ) as cluster,
    ):
        await cluster.wait_ready()
        prompts = [list(range(5 + 300 * i, 305 + 300 * i)) for i in range(6)]
        streams = [
            await cluster.submit(
                AddRequest(
                    request_id=str(i),
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_tokens=2, ignore_eos=True),
                )
            )
            for i, prompt in enumerate(prompts)
        ]
        for stream in streams:
            assert [output.finish_reason async for output in stream][-1] == "length"
        return [read_mapping(each.pid, folder) for each in cluster.instances]


@pytest.mark.slow
def test_two_instances_map_one_packed_file(tmp_path):
    folder = tmp_path / "packed"
    folder.mkdir(mode=0o700)
    mapped = asyncio.run(serve_and_look(folder))
    packed_kib = sum(path.stat().st_size for path in folder.rglob("*.packed")) >> 10
    assert packed_kib > 0
    for resident, proportional in mapped:
        assert resident >= packed_kib / 2, (mapped, packed_kib)
        assert proportional <= 0.75 * resident, (mapped, packed_kib)
