"""Goal: `tandem plan --timeline` draws the lanes of the step that serves, by planned speeds."""

import re

import msgspec
import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.planning.placing import find_machine, find_shape
from tandem.cli.planning.timeline import LAUNCH_S, list_lanes, run_step
from tandem.placement.costs import decode_time, list_decode_layers
from tandem.placement.planner import Wishes, make_plan

MACHINE = "xeon6430x2-4090"


def draw(model, machine, file, *more):
    words = ["plan", model, "--hardware", machine, "--timeline", str(file), *more]
    return CliRunner().invoke(app, words)


def test_a_page_has_both_lanes_and_every_layer(tmp_path):
    file = tmp_path / "out.html"
    result = draw("deepseek-v3", MACHINE, file, "--quality", "int4")
    assert result.exit_code == 0, result.output
    page = file.read_text()
    # No layer is left to add what the last one would defer.
    for kind, first, end in (("layer", 0, 61), ("submit", 3, 61), ("late submit", 3, 60)):
        found = [int(n) for n in re.findall(rf"<title>{kind} (\d+):", page)]
        assert found == list(range(first, end)), kind
    # The last piece of work ends at the right edge; nothing is drawn beyond it.
    ends = [
        float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', page)
    ]
    assert max(ends) == pytest.approx(1600, abs=0.5)
    shares = [int(share) for share in re.findall(r"<td>(\d+)%</td>", page)]
    assert len(shares) == 4
    assert all(0 < share <= 100 for share in shares)
    assert not re.search(r"<script|https?://(?!www.w3.org/2000/svg)", page)


PLANS = [
    # With shared experts, without, with several layers before the first experts; experts on the
    # GPU too, alone and as the longer part; one user, and some; and two GPUs.
    ("deepseek-v3", MACHINE, 1),
    ("deepseek-v3", "8452y-a100", 16),
    ("qwen3-235b-a22b", "6454s-4090", 2),
    ("qwen3-next-80b-a3b", "6454s-4090d", 16),
    ("glm-4.5-air", MACHINE, 4),
    ("gpt-oss-120b", "9355-5090", 1),
]


@pytest.mark.parametrize(("model", "machine", "users"), PLANS)
def test_the_cost_model_is_what_the_orchestration_takes(model, machine, users):
    """The step within 1 % and a launch, busy shares within a hundredth, however many are deferred.

    The cost model takes each layer by itself; the step that serves runs all on a virtual clock.
    """
    spec, eff = find_machine(machine)
    shape, stored = find_shape(model)
    wishes = Wishes(quality="int4", users=users)
    plan = make_plan(spec, shape, wishes, stored_format=stored, efficiencies=eff)
    for deferred in {0, 2, plan.placement.deferred}:
        place = msgspec.structs.replace(plan.placement, deferred=deferred)
        given = {"users": users, "context": plan.wishes.context}
        layers = list_decode_layers(spec, shape, place, eff, **given)
        planned = decode_time(spec, shape, place, eff, **given)
        assert planned.parts.cpu_experts > 0
        assert planned.parts.cpu == 0
        changed = msgspec.structs.replace(plan, placement=place)
        device = run_step(changed, layers, shape, planned.after_layers)
        assert device.end_s == pytest.approx(planned.seconds, rel=0.01, abs=LAUNCH_S)
        for lane in list_lanes(device, planned):
            assert lane.busy == pytest.approx(lane.planned, abs=0.01), lane.name


def test_one_lane_is_refused_in_words(tmp_path):
    result = draw("llama3-70b", "reference", tmp_path / "out.html")
    assert result.exit_code != 0
    assert not (tmp_path / "out.html").exists()
