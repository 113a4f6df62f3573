"""Goal: a simulated instance is as fast as the live one that its costs come from.

Method: a conductor learns the costs of steps whose times follow a rule; the file that is made of
what it tells gives the same times in the simulator.
"""

import msgspec
import pytest
from sim_scenarios import make

from tandem.conductor.conductor import Conductor
from tandem.conductor.fleet import InstanceFacts
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import InstanceRef
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.instance_status import InstanceStatus
from tandem.core.loads.traces import TraceRow
from tandem.core.wire import InstanceInfo, InstanceStage, StageChanged, StepRecord
from tandem.sim.cluster.calibration import (
    CalibrationFile,
    calibrate_scenario,
    learn_instances,
    read_calibration,
    write_calibration,
)
from tandem.sim.cluster.run import run_scenario
from tandem.sim.cluster.scenario import parse_scenario

INFO = InstanceInfo(
    model="tiny",
    architecture="Qwen3ForCausalLM",
    dtype="float32",
    vocab_size=512,
    max_model_len=4096,
    block_size=512,
    num_blocks=64,
    max_batch_tokens=2048,
    kv_bytes_per_token=64,
    weight_bytes=1 << 20,
    num_parameters=1 << 18,
    eos_token_ids=[0],
    weight_version="f" * 64,
    system_fingerprint="fp",
    kv_identity="f" * 64,
    pid=1,
    load_seconds=0.5,
)


def take(prefill, decodes):
    return 0.02 + 2e-4 * prefill + 1e-3 * decodes


def list_status(num_steps=200, roles=("unified",)):
    conductor = Conductor(make_policy("prefix"))
    for role in roles:
        conductor.join(role, role)
        conductor.serve(InstanceRef(role, 0), InstanceFacts(64, 512, 4096, 2048))
        for number in range(num_steps):
            prefill, decodes = 16 * (number % 9), number % 5
            record = StepRecord(prefill, prefill * 8.0, decodes, 100 * decodes, 0.0)
            record = msgspec.structs.replace(record, seconds=take(prefill, decodes))
            conductor.note_steps(role, [record])
    return [
        InstanceStatus(
            name=role,
            role=role,
            stage=StageChanged(InstanceStage.READY),
            step_error=conductor.get_step_error(role),
            step_costs=conductor.get_step_costs(role),
        )
        for role in roles
    ]


def test_a_run_takes_the_time_that_the_live_instance_would(tmp_path):
    found = learn_instances(list_status(), INFO)
    path = tmp_path / "calibration.yaml"
    write_calibration(path, msgspec.structs.replace(found, request_ms=5.0))
    scenario = calibrate_scenario(
        parse_scenario("instances: [{count: 1}]", "test"), read_calibration(path)
    )
    assert scenario.instances[0].engine.block_size == 512
    record = run_scenario(scenario, [TraceRow(0.0, 500, 3, [1])]).records[0]
    assert record.ttft_s == pytest.approx(0.005 + take(500, 0), rel=0.05)
    assert record.tpot_s == pytest.approx(take(0, 1), rel=0.05)


def test_costs_of_alike_instances_are_averaged_by_their_steps():
    one = learn_instances(list_status(), INFO).instances[0]
    slow = msgspec.structs.replace(
        one,
        num_steps=600,
        costs=msgspec.structs.replace(one.costs, step_s=one.costs.step_s + 0.4),
    )
    file = CalibrationFile(instances=(one, slow))
    costs = calibrate_scenario(make("instances: [{}]"), file).instances[0].calibration
    assert costs.step_s == pytest.approx(one.costs.step_s + 0.3)


def test_what_no_live_instance_tells_of_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="64 steps"):
        learn_instances(list_status(num_steps=63), INFO)
    # A pair whose prefill instance has learnt too little is not a decode instance alone.
    pair = [*list_status(63, ("prefill",)), *list_status(200, ("decode",))]
    with pytest.raises(ConfigError, match="no prefill instance has computed 64 steps"):
        learn_instances(pair, INFO)
    found = learn_instances(list_status(), INFO)
    with pytest.raises(ConfigError, match="no prefill instance, but unified"):
        calibrate_scenario(make("instances: [{role: prefill}]"), found)
    with pytest.raises(ConfigError, match="hardware and model"):
        run_scenario(make("instances: [{}]"), [])
    with pytest.raises(NotFoundError):
        read_calibration(tmp_path / "none")
    path = tmp_path / "odd.yaml"
    path.write_text("instances: []")
    with pytest.raises(ConfigError, match="instances"):
        read_calibration(path)
