"""Goal: when the ratio of prefill to decode is wrong, roles change until it is right, then stay.

Method: a simulated cluster of two prefill and two decode instances under a load of long prompts
that turns into one of long answers; the same load with fixed roles is the measure.
"""

import pytest
from sim_scenarios import ONE, draw_rows, make

from tandem.conductor import role_balance
from tandem.core.loads.traces import TraceRow
from tandem.sim.cluster.run import run_scenario
from tandem.sim.cluster.scenario import change_scenario

FREE = "prefill_context_s: 0, decode_token_s: 0"
COSTS = f"{{step_s: 0.01, prefill_token_s: 1e-4, decode_s: 0.016, {FREE}}}"
FLEET = f"""
instances:
  - {{count: 2, role: prefill, calibration: {COSTS}, kv_tokens: TOKENS, kv_bytes_per_token: 1000,
     engine: ENGINE}}
  - {{count: 2, role: decode, calibration: {COSTS}, kv_tokens: TOKENS, kv_bytes_per_token: 1000,
     engine: ENGINE}}
links: {{gbps: 80, efficiency: 1.0, latency_us: 0}}
slo: {{ttft: 2000, tpot: 50}}
"""
PHASE_S = 60
LONG_PROMPTS, LONG_ANSWERS = (8192, 4, 2.8), (512, 50, 2.5)
"""Tokens of a prompt and of an answer, and requests a second."""
BOTH = (8192, 50, 4.0)
"""More than the cluster can serve, whatever the roles."""


def draw_phases(*phases, phase_s=PHASE_S):
    rows, fresh = [], iter(range(10**9))
    for number, (prompt, answer, rate) in enumerate(phases):
        for i in range(int(phase_s * rate)):
            ids = [next(fresh) for _ in range(prompt // 512)]
            at_s = number * phase_s + i / rate
            rows.append(TraceRow(at_s * 1e3, prompt, answer, ids))
    return rows


def run(roles, rows):
    return run_scenario(change_scenario(make(FLEET), {"roles": roles}), rows)


def test_roles_follow_a_load_that_turns():
    rows = draw_phases(LONG_PROMPTS, LONG_ANSWERS)
    fixed, followed = run("fixed", rows), run("load", rows)
    switches = followed.report.role_switches
    assert fixed.report.role_switches == ()
    assert {"prefill", "decode"} == {each.role for each in switches}
    assert switches[0].role == "prefill" and switches[0].at_s < PHASE_S
    assert len(switches) <= 4, "it flaps"
    assert followed.report.failed == 0
    assert [r.output_tokens for r in followed.records] == [row.output_length for row in rows]
    assert followed.report.goodput > 1.3 * fixed.report.goodput


@pytest.mark.parametrize("load", [(4096, 4, 1.0), (512, 12, 1.0)])
def test_a_load_that_is_served_well_changes_no_role(load):
    assert run("load", draw_phases(load)).report.role_switches == ()


def test_a_cluster_that_is_too_small_does_not_flap():
    """Both sides miss their objectives: no instance helps elsewhere."""
    both = run("load", draw_phases(BOTH, phase_s=25))
    assert both.report.role_switches == ()


def test_unified_instances_stay_what_they_are():
    outcome = run_scenario(change_scenario(make(ONE), {"roles": "load"}), draw_rows(50, gap_ms=20))
    assert outcome.report.role_switches == ()


def test_without_hysteresis_it_would_flap(monkeypatch):
    monkeypatch.setattr(role_balance, "LOW", 10.0)
    monkeypatch.setattr(role_balance, "MAX_BUSY", 10.0)
    monkeypatch.setattr(role_balance, "PAUSE_S", 0.0)
    assert len(run("load", draw_phases(BOTH, phase_s=25)).report.role_switches) > 8
