"""Goal: what a live server takes beside its steps is found, and its figures are then predicted.

Method: the live server is a simulated one with known times beside its steps, which the fit is not
told; other loads at other rates must then be predicted by the scenario that it finds.
"""

import msgspec
import pytest

from tandem.sim.cluster.calibration import CalibrationFile, LearntInstance
from tandem.sim.cluster.requests import scale_rows
from tandem.sim.cluster.run import run_scenario
from tandem.sim.cluster.steps import Calibration
from tandem.sim.study.live import (
    NEAR,
    FittedLoad,
    compare_figures,
    draw_rows,
    find_capacity,
    fit_overheads,
    make_scenario,
    render_errors,
)

COSTS = Calibration(
    step_s=4e-3, prefill_token_s=1e-4, prefill_context_s=1e-9, decode_s=4e-4, decode_token_s=1e-8
)


def make(*roles):
    instances = [
        LearntInstance(
            name=role,
            role=role,
            costs=COSTS,
            num_steps=100,
            kv_tokens=4096,
            kv_bytes_per_token=3072,
            block_size=16,
            max_batch_tokens=2048,
            max_model_len=2048,
        )
        for role in roles
    ]
    return make_scenario(CalibrationFile(instances=tuple(instances)), store_tokens=20_000)


@pytest.mark.parametrize(
    "roles", [("unified",), pytest.param(("prefill", "decode"), marks=pytest.mark.slow)]
)
def test_times_beside_steps_are_found_and_other_loads_predicted(roles):
    guess = make(*roles)
    real = msgspec.structs.replace(guess, request_ms=12.0)
    if roles == ("unified",):
        (group,) = real.instances
        costs = msgspec.structs.replace(group.calibration, gap_s=2e-3, decode_s=8e-4)
        group = msgspec.structs.replace(group, calibration=costs)
        real = msgspec.structs.replace(real, instances=(group,))
    else:
        links = msgspec.structs.replace(real.links, latency_us=20_000.0)
        real = msgspec.structs.replace(real, links=links)

    def serve(rows, rate):
        return run_scenario(real, scale_rows(rows, rate)).report

    capacity = find_capacity(guess, draw_rows(24, 1))
    loads = []
    for load in (0.7, 0.3):
        rows = draw_rows(30, 2)
        rate = load * capacity
        loads.append(FittedLoad(list(scale_rows(rows, rate)), serve(rows, rate)))
    fitted = fit_overheads(guess, loads)
    found = []
    for load in (0.3, 0.5, 0.7):
        rows = draw_rows(30, 3)
        rate = load * capacity
        before = compare_figures("s", guess, rows, rate, load, serve(rows, rate))
        found += compare_figures("s", fitted, rows, rate, load, serve(rows, rate))
        assert max(abs(each.error) for each in before) > 0.2
    assert [each.figure for each in found] == 3 * ["TTFT", "TPOT", "throughput"]
    assert max(abs(each.error) for each in found) < NEAR
    assert "**9 of 9 figures are within 15%.**" in render_errors(found, "A machine.")
