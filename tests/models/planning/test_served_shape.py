"""Goal: the cost model sees a served model as its modules are, with the bytes of its plan."""

from pathlib import Path

import msgspec
import pytest

from tandem import models
from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import plan_model
from tandem.placement.costs import DENSE, EXPERTS, FormatShares
from tandem.placement.fitting import read_efficiencies
from tandem.placement.served import fit_formats, place_served, read_served
from tandem.placement.shape import read_shape

FIELDS = ("kind", "dense_weights", "expert_weights", "num_experts", "top_k", "window", "decode_ops")


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next"]
)
def test_a_plan_has_the_shape_of_its_configuration(model_type, checkpoint):
    folder = checkpoint(model_type)
    plan = plan_model(folder, dtype="bfloat16")
    asked = read_shape(open_checkpoint(folder).config.to_dict(), model_type)
    kv_bytes = 2 * sum(layer.kv_items for layer in asked.layers)
    served = read_served(plan, kv_bytes=kv_bytes)
    for ours, want in zip(served.layers, asked.layers, strict=True):
        told = {name: getattr(ours, name) for name in FIELDS}
        want_told = {name: getattr(want, name) for name in FIELDS}
        if (
            model_type == "gpt_oss"
        ):  # The configuration's count has biases, a plan's matrix has not.
            del told["expert_weights"], want_told["expert_weights"]
        assert told == want_told
        assert ours.attention_weights == pytest.approx(want.attention_weights, rel=0.05)
        assert ours.shared_weights == pytest.approx(want.shared_weights, rel=0.05)
        assert ours.kv_items == want.kv_items
    if model_type == "qwen3_next":
        assert sum(layer.kind == "state" for layer in served.layers) > 0
        assert served.state_bytes > 0


@pytest.mark.parametrize("expert_format", ["int8row", "none"])
def test_bytes_of_weights_are_those_of_the_plan(expert_format, checkpoint):
    plan = plan_model(checkpoint("qwen3_moe"), dtype="bfloat16", expert_format=expert_format)
    place, shape = place_served(plan, chunk_tokens=64), read_served(plan, kv_bytes=0)
    assert place.expert_bytes * shape.expert_weights == pytest.approx(plan.expert_bytes)
    assert place.expert_format == ("bf16" if expert_format == "none" else EXPERTS)
    assert (place.accelerators, place.chunk_tokens) == (0, 64)


def test_mixtures_of_formats_reach_what_their_parts_do():
    """The time of all bytes is the sum of the times of each format's."""
    shares = {"int8": FormatShares(bandwidth=0.3, compute=0.2)}
    shares["bf16"] = FormatShares(bandwidth=0.9, compute=0.6)
    eff = msgspec.structs.replace(read_efficiencies(), formats=shares)
    demo = Path(models.__file__).parent / "demo"
    mixed = plan_model(demo, dtype="bfloat16", expert_format="int8", linear_format="int8")
    assert fit_formats(mixed, eff).formats[EXPERTS] == shares["int8"]
    dense = [m for m in mixed.matrices if m.role not in ("experts", "embedding")]
    assert {m.weight_format for m in dense} == {"int8g128", "bf16"}
    # Routers stay in bf16.
    time = sum(m.size_bytes / (0.3 if m.weight_format == "int8g128" else 0.9) for m in dense)
    between = fit_formats(mixed, eff).formats[DENSE]
    assert between.bandwidth == pytest.approx(sum(m.size_bytes for m in dense) / time)
    assert 0.2 < between.compute < 0.6
    plain = plan_model(demo, dtype="bfloat16", expert_format="none", linear_format="none")
    assert fit_formats(plain, eff).formats == eff.formats
