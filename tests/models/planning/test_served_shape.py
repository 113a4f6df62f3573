"""Goal: the cost model sees a served model as its modules are, with the bytes of its plan."""

import pytest

from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import plan_model
from tandem.placement.served import place_served, read_served
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
    assert place.expert_format == ("bf16" if expert_format == "none" else "int8")
    assert (place.accelerators, place.chunk_tokens) == (0, 64)
