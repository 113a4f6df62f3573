"""The model benchmark runs at toy size, so that it cannot rot: command, check and record."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from tandem.bench.harness import BenchRecord
from tandem.bench.serving import model as model_bench
from tandem.cli.commands import bench as command


@pytest.fixture
def run_case(capsys):
    """Run the command in this process: another one would import torch and transformers first."""
    num_threads = torch.get_num_threads()

    def run(pattern):
        command.bench("model", json=Path("-"), cases=[pattern], quick=True, with_peers=False)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    yield run
    torch.set_num_threads(num_threads)


def test_a_quick_case_checks_and_compares(run_case, monkeypatch):
    monkeypatch.setattr(command, "QUICK_BUDGET_S", 0.1)
    monkeypatch.setattr(command, "QUICK_ROUNDS", 1)
    (record,) = run_case("format=int4g32 phase=decode batch=16")
    assert record["case"] == "format=int4g32 phase=decode batch=16"
    assert set(record) == set(BenchRecord.__struct_fields__)
    assert record["check"] == "ok"
    assert record["ratio"] > 0
    assert record["ceiling"] > 0


@pytest.mark.slow
def test_latent_attention_has_cases_of_its_own(run_case):
    eight, four = run_case("mla format=int*phase=prefill*")
    assert eight["case"] == "mla format=int8g128 phase=prefill tokens=128"
    assert four["case"] == "mla format=int4g32sym phase=prefill tokens=128"
    for record in (eight, four):
        assert record["check"] == "ok"
        assert record["ratio"] > 0


@pytest.mark.parametrize(
    "name",
    [
        name if name == "bf16" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(model_bench.LARGEST_ERROR)
    ],
)
def test_a_failed_check_reports_no_time(name, monkeypatch):
    monkeypatch.setitem(model_bench.LARGEST_ERROR, name, 0.0)
    # The model lies in a folder that goes with the generator.
    with contextlib.closing(model_bench.make_cases(quick=True)) as cases:
        case = next(case for case in cases if f"format={name} " in case.name)
        assert "logits differ by" in case.check()


@pytest.mark.slow
def test_a_hybrid_tells_its_rules_share_and_what_a_turn_costs(run_case):
    prefill, turn = run_case("hybrid format=int8g128 phase=[pt]*")
    assert prefill["case"] == "hybrid format=int8g128 phase=prefill tokens=128"
    assert turn["case"] == "hybrid format=int8g128 phase=turn history=512 message=64"
    assert (prefill["check"], turn["check"]) == ("ok", "ok")
    milliseconds, share = prefill["limits"]["gated delta rules"]
    assert 0 < milliseconds < prefill["ours"]
    assert 0 < share < 1
    assert turn["baseline_name"].startswith("computing all")
    assert turn["ratio"] > 1


@pytest.mark.slow
def test_glm_flash_and_gemma4_have_cases_of_their_own(run_case):
    records = run_case("g*format=int8g* phase=prefill*")
    assert [r["case"] for r in records] == [
        "glm format=int8g128 phase=prefill tokens=128",
        "gemma4 format=int8g64 phase=prefill tokens=128",
    ]
    assert all(record["check"] == "ok" and record["ratio"] > 0 for record in records)
