"""Goal: sweeps run what is missing, once; capacities are where they are; pictures carry themselves.

Method: sweeps get a runner that counts, a file that was cut short, and a changed scenario; the
search for a rate gets a curve whose edge is known; pages are looked at for what they need.
"""

import msgspec
import pytest

from tandem.core.errors import ConfigError
from tandem.sim.cluster.generators import Generator, generate_rows
from tandem.sim.cluster.run import run_scenario
from tandem.sim.cluster.scenario import change_scenario, parse_changes, parse_scenario
from tandem.sim.study.advice import advise, list_options
from tandem.sim.study.capacity import Probe, find_capacity, price_hour, price_tokens
from tandem.sim.study.pictures import draw_curves, draw_load, write_page
from tandem.sim.study.sweeps import list_points, run_sweep

TEXT = """
instances:
  - {count: 1, hardware: 8xa800, model: llama3-70b}
  - {count: 2, hardware: 8xa800, model: llama3-70b}
slo: {ttft: 5000}
"""
SCENARIO = parse_scenario(TEXT, "test")


def test_fields_are_changed_by_path():
    changes = parse_changes(["instances.*.step_overhead_ms=3", "instances.1.count=4", "seed=7"])
    changed = change_scenario(SCENARIO, changes)
    assert [group.step_overhead_ms for group in changed.instances] == [3.0, 3.0]
    assert [group.count for group in changed.instances] == [1, 4]
    assert changed.seed == 7
    for wrong in ("colour=red", "instances.5.count=1", "store.tokens=3", "seed=x", "load.limit=-1"):
        with pytest.raises(ConfigError):
            change_scenario(SCENARIO, parse_changes([wrong]))
    with pytest.raises(ConfigError, match="PATH=VALUE"):
        parse_changes(["seed"])


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path):
    ran = []

    def run(scenario, folder, name):
        ran.append((scenario.policy, scenario.load.rate_scale))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return {"goodput": scenario.load.rate_scale}

    path = tmp_path / "sweep.jsonl"
    axes = ["policy=load,prefix", "load.rate_scale=1,2"]
    with pytest.raises(KeyboardInterrupt):
        run_sweep(SCENARIO, axes, path, jobs=1, run=run)
    assert len(path.read_text().splitlines()) >= 2
    path.write_text(path.read_text().rstrip("\n")[:-5])  # The last line was being written.
    ran.clear()
    points = run_sweep(SCENARIO, axes, path, jobs=1, run=lambda s, f, n: run(s, f, n))
    assert 2 <= len(ran) + 1 <= 4
    assert [p.values for p in points] == [
        {"policy": p, "load.rate_scale": r} for p in ("load", "prefix") for r in (1, 2)
    ]
    assert [p.report["goodput"] for p in points] == [1.0, 2.0, 1.0, 2.0]
    ran.clear()
    run_sweep(SCENARIO, axes, path, jobs=2, run=run)
    assert ran == []
    other = msgspec.structs.replace(SCENARIO, seed=2)
    keys = {p.key for p in list_points(other, axes)}
    assert keys.isdisjoint(p.key for p in points)


@pytest.mark.parametrize("edge", [0.3, 1.0, 5.7])
def test_the_largest_rate_is_found(edge):
    tried = []

    def measure(scale):
        tried.append(scale)
        attained = 1.0 if scale <= edge else 0.5
        return Probe(
            rate_scale=scale,
            request_rate=scale,
            attained=attained,
            goodput=scale * attained,
            tokens_per_s=100 * scale,
        )

    found = find_capacity(measure, share=0.9, tolerance=0.02)
    assert found.best is not None
    assert edge / 1.02 <= found.best.rate_scale <= edge
    assert len(tried) == len(set(tried)) < 20
    never = find_capacity(measure, share=1.1, tolerance=0.1)
    assert never.best is None


def test_prices():
    assert price_hour(SCENARIO, {"8xa800": 10.0}) == 30.0
    assert price_tokens(36.0, 1000.0) == pytest.approx(10.0)
    with pytest.raises(ConfigError, match="no price of 8xa800"):
        price_hour(SCENARIO, {})


def test_advice_is_what_brings_most_for_least():
    prices = {"8xa800": 16.0, "8468v-8xh800": 30.0}
    options = list_options(SCENARIO, prices, None)
    assert [(o.machine, o.role) for o in options] == [
        ("", ""),
        ("8xa800", "unified"),
        ("8468v-8xh800", "unified"),
    ]
    assert sum(group.count for group in options[1].scenario.instances) == 4
    assert options[2].scenario.instances[-1].hardware == "8468v-8xh800"
    # 3 x 16 now; the dearer one does not fit any more.
    assert len(list_options(SCENARIO, prices, 70.0)) == 2
    attained = iter([0.5, 0.9, 0.9])
    found = advise(options, lambda scenario: (next(attained), 1.0))
    assert [each.machine for each in found] == ["8xa800", "8468v-8xh800", ""]


@pytest.mark.slow
def test_pictures_and_pages(tmp_path):
    run = run_scenario(SCENARIO, generate_rows(Generator(requests=20, rate=2.0)))
    draw_load(run, tmp_path / "load.png")
    draw_curves({"a": [(2.0, 1.5), (1.0, 1.0)], "b": [(1.0, 0.5)]}, tmp_path / "goodput.png")
    pictures = [tmp_path / "load.png", tmp_path / "goodput.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    write_page(tmp_path / "page.html", "A <run>", {"T": [("a", "b"), (1, "<x>")]}, pictures)
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert 'src="http' not in page
    assert "&lt;run&gt;" in page
    assert "<td>&lt;x&gt;</td>" in page
