"""Goal: this machine is measured once, plausibly, and planned with."""

import json

import msgspec
import pytest

from tandem._native import kernel_isas, read_topology, recommend_threads
from tandem.kernels import calibration
from tandem.kernels.calibration import Calibration, calibrate, find_fingerprint, read_calibration


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return calibrate(budget_s=0, num_experts=16)


def test_what_is_measured_is_this_machine(measured):
    spec, eff = measured.hardware, measured.efficiencies
    assert spec.processor is not None
    assert spec.cores == recommend_threads(read_topology()).threads
    assert spec.processor.isa in kernel_isas()[-1]
    # From a tenth of a phone's to ten times a large server's.
    assert 0.1 < spec.cpu_bandwidth_gbps < 10_000
    assert 0.001 < spec.cpu_tflops(is_int8=True) < 10_000
    assert 0 < spec.memory_gib * 2**30 <= read_topology().memory_total_bytes
    assert 0 < eff.cpu_bandwidth <= 1
    assert 0 < eff.cpu_avx <= 1
    assert min(eff.step_us, eff.layer_us, eff.experts_us, eff.norm_ns) > 0
    assert set(eff.formats) >= {"int8", "int4", "int4g32", "q4k", "q6k", "bf16"}
    assert all(0 < min(s.bandwidth, s.compute) <= 1 for s in eff.formats.values())
    assert measured.rounds == 2


def test_it_is_measured_once_for_a_fingerprint(measured, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(calibration, "calibrate", lambda: calls.append(1) or measured)
    assert read_calibration(tmp_path) == measured
    assert read_calibration(tmp_path) == measured
    assert len(calls) == 1
    # Another fingerprint, and a file that is damaged, are measured again.
    monkeypatch.setattr(calibration, "find_fingerprint", lambda: "another")
    read_calibration(tmp_path)
    assert len(calls) == 2
    file = tmp_path / f"{measured.fingerprint}.json"
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "calibrate", lambda: calls.append(1) or measured)
    file.write_text("{")
    assert read_calibration(tmp_path) == measured
    assert len(calls) == 3
    assert json.loads(file.read_text())["fingerprint"] == find_fingerprint()


def test_a_folder_that_cannot_be_written_keeps_nothing(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda: measured)
    (tmp_path / "file").touch()
    assert read_calibration(tmp_path / "file") == measured


def test_a_load_of_others_is_told(measured):
    calm = msgspec.structs.replace(measured, load=0.0)
    assert "--measure" not in calm.describe()
    busy = msgspec.structs.replace(measured, load=2.0 * measured.hardware.cores)
    assert "--measure" in busy.describe()


def test_a_model_is_planned_for_this_machine(measured, tmp_path, monkeypatch, capsys):
    from tandem.cli.commands.plan import plan

    monkeypatch.setattr(calibration, "DEFAULT_ROOT", tmp_path)
    monkeypatch.setattr(calibration, "calibrate", lambda: measured)
    plan(model="demo", hardware="measured", context=512, json=True, help_all=False)
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"]["name"] == "measured"
    assert report["plan"]["decode_rate"] > 0
    assert report["efficiencies"]["layer_us"] == measured.efficiencies.layer_us
