"""Goal: the picture shows each layer's parts on their devices, and is a file of its own."""

import re
from xml.etree import ElementTree

import msgspec
import pytest

from tandem.placement.catalog import find_hardware, find_model
from tandem.placement.fitting import read_efficiencies
from tandem.placement.plan_picture import LANE, render_picture
from tandem.placement.planner import Wishes, make_plan
from tandem.placement.shape import read_shape

SVG = "{http://www.w3.org/2000/svg}"
TITLE = re.compile(r"layer (\d+), (.+): ([\d.]+) MiB on the (GPU|CPU)")


@pytest.fixture
def drawn():
    known = find_model("deepseek-v3")
    shape = read_shape(known.config, "deepseek-v3")
    spec = find_hardware("6454s-4090d")
    plan = make_plan(
        spec,
        shape,
        Wishes(),
        stored_format=known.stored_format,
        efficiencies=read_efficiencies(),
    )
    return plan, spec, shape, render_picture(plan, spec, shape)


def test_bars_are_the_parts_of_each_layer(drawn):
    plan, spec, shape, text = drawn
    assert f"deepseek-v3 on {spec.title}" in text
    root = ElementTree.fromstring(text)
    bars = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        found = TITLE.fullmatch("" if title is None else title.text or "")
        if found:
            bars.append((rect, *found.groups()))
    by_layer = {int(layer) for _, layer, *_ in bars}
    assert by_layer == set(range(len(shape.layers)))
    sums: dict[tuple[str, str], float] = {}
    for _, _, part, mib, device in bars:
        sums[part, device] = sums.get((part, device), 0.0) + float(mib)
    held = {(part, m.device): size for m in plan.memory for part, size in m.parts.items()}
    assert sums["attention", "GPU"] == pytest.approx(held["attention", "GPU"] / 2**20, rel=0.01)
    experts = sums["routed experts", "CPU"] + sums.get(("routed experts", "GPU"), 0.0)
    assert experts == pytest.approx(held["routed experts", "DRAM"] / 2**20, rel=0.01)
    lengths = {float(rect.get("width")) / float(mib) for rect, _, _, mib, _ in bars}
    assert max(lengths) == pytest.approx(min(lengths), rel=0.05), "one scale for all"
    ends = [float(r.get("x", 0)) + float(r.get("width")) for r in root.iter(f"{SVG}rect")]
    assert max(ends) <= float(root.get("width"))
    assert max(float(rect.get("width")) for rect, *_ in bars) <= LANE


def test_it_loads_nothing_and_any_name_is_text(drawn):
    plan, spec, shape, text = drawn
    assert "href" not in text and "<script" not in text and "url(" not in text
    for choice in plan.choices:
        assert choice.what in text
    odd = msgspec.structs.replace(plan, model='<script>"&')
    ElementTree.fromstring(render_picture(odd, spec, shape))
    assert "<script" not in render_picture(odd, spec, shape)
