"""Goal: 200 streams at a time over a prefill and a decode instance, for minutes, cost no memory.

Method: clients that ask again and again; memory, descriptors and segments of all processes are
compared between the first minute's end, when caches are warm, and the end.
"""

import asyncio
import json
import time

import httpx
import pytest
from process_tree import measure_usage

NUM_STREAMS = 200
WARM_UP_S = 45.0
MAX_TOKENS = 32
TIMEOUT_S = 300.0
GROWTH_MIB = 48.0
"""Of all processes together: allocators keep some of what a busier moment needed."""


async def stream_until(client, index, end_s, counts):
    turn = 0
    while time.monotonic() < end_s:
        turn += 1
        body = {
            "model": "demo",
            "prompt": f"# part {index} of {turn}\ndef part_{index}(x):\n" + "    x = x + 1\n" * 8,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        end, num_events = "silence", 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                counts[f"status {response.status_code}"] = response.text
                continue
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        end = str(event["error"])
                        break
                    num_events += 1
                    end = event["choices"][0]["finish_reason"] or end
        counts[end] = counts.get(end, 0) + 1


async def run_load(server, minutes):
    """Return counts of ends, and usage when warm and at the end of the load."""
    counts, warm = {}, None
    begin_s = time.monotonic()
    end_s = begin_s + 60 * minutes
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        tasks = [
            asyncio.create_task(stream_until(client, i, end_s, counts)) for i in range(NUM_STREAMS)
        ]
        await asyncio.sleep(WARM_UP_S)
        warm = await asyncio.to_thread(measure_usage, server.process.pid)
        while not all(task.done() for task in tasks) and time.monotonic() < end_s - 1:
            await asyncio.sleep(1.0)
        under_load = await asyncio.to_thread(measure_usage, server.process.pid)
        await asyncio.gather(*tasks)
    return counts, warm, under_load


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(10, marks=pytest.mark.long),
    ],
)
def test_200_streams_end_well_and_memory_stays_flat(serve_demo, minutes):
    # Few blocks, so that the cache is full before the first measurement.
    flags = ["--engine.num-kv-blocks", "384", "--engine.max-model-len", "512"]
    with serve_demo("--prefill", "1", "--decode", "1", *flags) as server:
        idle = measure_usage(server.process.pid)
        counts, warm, under_load = asyncio.run(run_load(server, minutes))
        print(f"\n{minutes} min: {counts}\nwarm {warm}\nend  {under_load}")
        assert set(counts) == {"length"}, counts
        assert counts["length"] >= NUM_STREAMS
        server.wait_until(lambda: server.is_idle() and not server.stats()["num_held"], 60)
        assert under_load.num_processes == warm.num_processes
        # Under load the clients' own connections are among them, as many as happen to be open.
        after = measure_usage(server.process.pid)
        assert after.num_descriptors <= idle.num_descriptors + 16
        assert under_load.num_segments <= warm.num_segments
        assert under_load.pss_mib <= warm.pss_mib + GROWTH_MIB
