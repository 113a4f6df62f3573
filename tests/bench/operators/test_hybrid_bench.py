"""Goal: the benchmark of hybrid steps runs every case over a fake device; wrong sums fail."""

import pytest

from tandem.bench.harness import run_cases
from tandem.bench.operators import hybrid
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.fake.device import FakeDevice


@pytest.fixture
def device():
    with FakeDevice() as made:
        yield made


def test_cases_measure_every_way(device):
    cases = hybrid.make_cases(quick=True, device=device)
    records = list(run_cases("hybrid", cases, budget_s=0.01, rounds=1))
    assert [record.check for record in records] == ["ok"] * 7
    words = " ".join(record.case for record in records)
    for word in ("graph=on", "graph=off", "uploaded", "cached", "deferred=2", "prompt=40"):
        assert word in words
    assert all("device=fake" in record.case for record in records)
    decodes = [record for record in records if "batch" in record.case]
    for record in decodes:
        names = {record.baseline_name, *record.others}
        assert names == {"all on the device", "torch offload"}


def test_a_graph_is_one_launch(device):
    layers = hybrid.Layers(device, hybrid.TINY, "int4g32")
    found = []
    for is_captured in (True, False):
        decode = hybrid.Decode(layers, 1, is_captured=is_captured)
        found.append(hybrid.describe_step(decode))
        decode.close()
    assert found[0].startswith("1 launches")
    assert int(found[1].split()[0]) > 20


def test_other_sums_give_no_time(device, monkeypatch):
    run = NativeExperts.run

    def double(self, x, ids, weights, out):
        run(self, x, ids, weights, out)
        out.tensor.mul_(2)

    monkeypatch.setattr(NativeExperts, "run", double)
    record = next(
        run_cases("hybrid", hybrid.make_cases(quick=True, device=device), budget_s=0.01, rounds=1)
    )
    assert record.ours is None
    assert "of the norm" in record.check
