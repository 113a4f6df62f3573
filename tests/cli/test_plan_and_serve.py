"""Goal: `tandem plan` tells what `tandem serve` does here, value for value, and why."""

import json

import msgspec
import pytest

from tandem._native import read_topology, recommend_threads
from tandem.cli.config import Config
from tandem.cli.planning.serving import follow_wishes
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigError
from tandem.engine import build as building
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.planning import count_users, plan_engine
from tandem.kernels import calibration
from tandem.kernels.calibration import Calibration, find_fingerprint
from tandem.models.config import ModelConfig
from tandem.models.families import open_checkpoint
from tandem.models.loading.expert_disk import ReadRate
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.placement.fitting import read_efficiencies
from tandem.placement.hardware import HardwareSpec, Processor
from tandem.placement.planner import Wishes, make_plan
from tandem.placement.shape import read_shape


def plan(**model):
    return plan_engine(ModelConfig(path="demo", **model), EngineConfig())


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """Keep a calibration of this machine: 100 GB/s and 10 TOPS, of which kernels reach a half."""
    hardware = HardwareSpec(
        name="measured",
        title="this machine",
        processor=Processor(
            title="one",
            cores=recommend_threads(read_topology()).threads,
            ghz=2.0,
            isa="avx512",
            bandwidth_gbps=100,
            bf16_tflops=5,
            int8_tops=10,
            price_usd=0,
            price_source="none",
            source="a test",
        ),
        memory_gib=16,
        source="a test",
    )
    half = msgspec.structs.replace(
        read_efficiencies(), cpu_bandwidth=0.5, cpu_avx=0.5, layer_us=1000
    )
    kept = Calibration(
        fingerprint=find_fingerprint(), hardware=hardware, efficiencies=half, rounds=3, load=0.0
    )
    monkeypatch.setattr(calibration, "DEFAULT_ROOT", tmp_path)
    monkeypatch.setattr(calibration, "calibrate", lambda: kept)
    assert calibration.read_calibration() == kept
    return kept


def test_the_plan_of_the_command_is_what_runs(calibrated, run, monkeypatch):
    """``tandem plan``, ``serve --dry-run`` and an instance's own account, value for value."""
    planned = json.loads(run("plan", "demo", "--json")[1])
    assert planned == json.loads(run("serve", "demo", "--dry-run", "--json")[1])
    configs = []
    make = building.Scheduler
    monkeypatch.setattr(
        building, "Scheduler", lambda config, *rest: configs.append(config) or make(config, *rest)
    )
    built = build_engine(ModelConfig(path="demo"), EngineConfig(), ManualClock())
    assert [list(row) for row in built.info.plan] == planned["rows"]
    assert [list(row) for row in built.info.rejected] == [
        [choice["what"], choice["value"], choice["reason"]] for choice in planned["rejected"]
    ]
    assert [msgspec.to_builtins(config) for config in configs] == [planned["config"]]
    assert (built.info.max_batch_tokens, built.info.num_blocks) == (
        planned["config"]["max_batch_tokens"],
        planned["kv"][0],
    )
    threads = planned["operator_threads"]
    assert threads["routed experts"] == planned["config"]["threads"]
    assert set(threads) == {"attention", "matrices", "routed experts", "torch"}
    text = run("plan", "demo", "--rejected")[1]
    for what, value, why in planned["rows"]:
        assert all(words in text for words in (what, value, why))
    assert "1 to 2" in text
    assert "1 to 2" not in run("plan", "demo")[1]


def test_a_measured_machine_chooses_the_step_and_tells_speeds(calibrated):
    planned = plan(dtype="bfloat16")
    rates = planned.forecast.chunk_rates
    best = max(rates.values())
    assert planned.config.max_batch_tokens == min(n for n, r in rates.items() if r >= 0.98 * best)
    told = {(what, value) for what, value, _ in planned.rejected_rows()}
    assert {("step", f"{n} tokens") for n in rates} - told == {
        ("step", f"{planned.config.max_batch_tokens} tokens")
    }
    asked = plan_engine(ModelConfig(path="demo"), EngineConfig(max_batch_tokens=777, max_running=8))
    assert asked.config.max_batch_tokens == 777
    crowd = plan_engine(ModelConfig(path="demo"), EngineConfig(max_running=3000))
    assert crowd.config.max_batch_tokens >= 3000
    # A rate that one user alone gets is given to one.
    alone = count_users(planned, planned.forecast.decode_rate)
    assert alone == 1
    assert count_users(planned, planned.forecast.decode_rate / 3) > 1


def test_speeds_count_the_disk_that_experts_are_read_from(calibrated, monkeypatch, tmp_path):
    """A slow disk makes answers and prompts slower, and does not if every expert has a slot."""

    def predict(slots, rate):
        read = ReadRate(8, 1 << 20, rate)
        monkeypatch.setattr("tandem.engine.planning.measure_reads", lambda *_: read)
        made = plan(dtype="bfloat16", expert_slots=slots, packed_cache=str(tmp_path))
        assert made.model.tier is not None
        return made.forecast

    whole = plan(dtype="bfloat16").forecast
    cached = predict(8, 1e6)
    assert cached.decode_rate == pytest.approx(whole.decode_rate, rel=0.01)
    assert cached.prefill_rate == pytest.approx(whole.prefill_rate, rel=0.01)
    slow, slower = predict(2, 1e6), predict(2, 1e5)
    assert slow.decode_rate < 0.5 * whole.decode_rate
    assert slower.decode_rate == pytest.approx(slow.decode_rate / 10, rel=0.2)
    assert slower.prefill_rate == pytest.approx(slow.prefill_rate / 10, rel=0.2)
    # Fewer bits are less to read.
    assert min(slower.format_rates.values()) > slower.decode_rate
    assert predict(2, 0.0) is None


def test_a_machine_elsewhere_is_planned_by_the_same_rules(calibrated):
    """Placed like another machine's, the model gets this one's formats, step and threads."""
    here = plan(dtype="bfloat16")
    shape = read_shape(open_checkpoint(DEMO_FOLDER).config.to_dict(), "demo")
    there = make_plan(
        calibrated.hardware,
        shape,
        Wishes(context=2048, quality="stored"),
        stored_format="bf16",
        efficiencies=calibrated.efficiencies,
    )
    assert there.placement.expert_format == here.model.experts.weight_format
    assert there.placement.dense_format == here.model.linear.weight_format
    assert there.placement.chunk_tokens == here.config.max_batch_tokens
    assert there.placement.deferred == here.model.num_deferred_experts
    assert there.threads["routed experts"] == here.operator_threads["routed experts"]
    assert there.decode_rate == pytest.approx(here.forecast.decode_rate, rel=0.05)


def test_an_unmeasured_machine_says_so():
    planned = plan(dtype="bfloat16")
    assert planned.forecast is None
    rows = {what: (value, why) for what, value, why in planned.rows()}
    assert rows["step"][0] == "2048 tokens"
    assert "not measured" in rows["speed"][1]
    assert count_users(planned, 1.0) == 0


def test_wishes_are_settings_of_serve(calibrated, run):
    words = ["plan", "demo", "--users", "8", "--context", "512", "--quality", "int8"]
    text = run(*words)[1]
    line = next(line for line in text.splitlines() if line.startswith("serve it so: "))
    flags = line.removeprefix("serve it so: tandem ").split()
    served = json.loads(run(*flags, "--dry-run", "--json")[1])
    assert json.loads(run(*words, "--json")[1]) == served
    assert served["config"]["max_running"] == 8
    assert served["model"]["experts"]["weight_format"].startswith("int8")
    with pytest.raises(ConfigError, match="give one of them"):
        follow_wishes(Config(engine=EngineConfig(max_running=4)), context=0, users=8, quality="")
