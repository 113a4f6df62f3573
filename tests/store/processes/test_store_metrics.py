"""The metrics page of a master says what happened, and the reference says what the page says."""

import asyncio
import urllib.request
from pathlib import Path

import pytest
from etcd_server import find_free_port
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.errors import UnsupportedError
from tandem.rpc import make_identity, make_runtime_dir
from tandem.store import ClientService, HostService, MasterService, StoreConfig
from tandem.store.corruption_log import CorruptionLog
from tandem.store.metrics import METRICS
from tandem.store.services.connect import check_version
from tandem.store.services.master import next_epoch

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics_store.md"


def test_the_reference_lists_every_metric_and_no_other():
    rows = [line for line in REFERENCE.read_text().splitlines() if line.startswith("| `")]
    listed = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    expected = [
        [f"`{m.name}`", m.kind, ", ".join(m.labels) if m.labels else "none", m.help]
        for m in METRICS
    ]
    assert listed == expected


def read_page(address: tuple[str, int], path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.asyncio
async def test_the_page_counts_what_was_done(tmp_path):
    folder = make_runtime_dir()
    config = StoreConfig(
        master=f"ipc://{folder}/m.sock",
        name="h1",
        segment_dir=str(tmp_path / "segments"),
        segment_bytes=2**20,
        ssd_dir=str(tmp_path / "ssd"),
        ssd_bytes=2**22,
        recovery_ms=0,
        location_cache=0,
        metrics_port=find_free_port(),
    )
    async with MasterService(config) as master, HostService(config) as host:
        await asyncio.wait_for(host.host.is_joined.wait(), 60)
        async with ClientService(config) as service:
            client = service.client
            await client.put("key", b"value")
            await client.get("key")
            await client.get_many(["key", "none"])
            async with asyncio.timeout(60):
                while not (await client.status()).hosts[0].disk.num_objects:
                    await asyncio.sleep(0.01)
            page = await asyncio.to_thread(read_page, master.metrics_address)
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(read_page, master.metrics_address, "/secret")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["tandem:store_objects",] == 1
    assert samples["tandem:store_value_bytes",] == 5
    assert samples["tandem:store_hits_total",] == 2
    assert samples["tandem:store_misses_total",] == 1
    assert samples["tandem:store_host_up", ("host", "h1")] == 1
    assert samples["tandem:store_call_seconds_count", ("method", "locate")] == 2
    joined = "tandem:store_channel_events_total", ("event", "peers_joined")
    assert samples[joined] == 2, "the host and the client"
    names = {name for name, *_ in samples}
    for metric in METRICS:
        suffix = "_bucket" if metric.kind == "histogram" else ""
        assert metric.name + suffix in names, metric.name


def test_versions_one_apart_interoperate_and_others_are_refused_by_name():
    ours = make_identity("ours", "", {"store": "5"})
    for version in ("4", "5", "6"):
        check_version(make_identity("theirs", "", {"store": version}), ours)
    for compat in ({"store": "3"}, {"store": "7"}, {"store": "x"}, {}):
        with pytest.raises(UnsupportedError, match="store version"):
            check_version(make_identity("theirs", "", compat), ours)


def test_epochs_rise_with_each_master(tmp_path):
    assert [next_epoch(tmp_path, CorruptionLog()) for _ in range(3)] == [1, 2, 3]
