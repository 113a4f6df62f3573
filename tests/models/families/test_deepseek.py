"""What is special to DeepSeek-V2, V3 and Kimi-K2: names, refusals, layers that predict further."""

import pytest
import torch
from loading import load_checkpoint

from tandem.core.errors import UnsupportedError
from tandem.models.planning.planner import describe_model, plan_model

PROMPT = list(range(3, 40))


def test_kimi_k2_is_deepseek_v3_under_another_name(checkpoint, edit_config, open_session):
    """The published file names code to run; it is not looked for."""
    folder = checkpoint("deepseek_v3")
    want = open_session(load_checkpoint(folder, dtype="float32")).run(PROMPT)
    edit_config(
        folder,
        model_type="kimi_k2",
        architectures=["DeepseekV3ForCausalLM"],
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        seq_aux=True,
    )
    (folder / "configuration_deepseek.py").write_text("raise SystemExit('it ran')")
    spec = describe_model(folder)
    assert (spec.model_type, spec.kv_lora_rank, spec.rope_dim) == ("kimi_k2", 32, 8)
    got = open_session(load_checkpoint(folder, dtype="float32")).run(PROMPT)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("model_type", "changes", "field"),
    [
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"n_shared_experts": 0}, "n_shared_experts"),
    ],
)
def test_what_transformers_would_run_otherwise_is_refused(
    model_type, changes, field, checkpoint, edit_config
):
    folder = checkpoint(model_type)
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedError) as caught:
        plan_model(folder)
    assert caught.value.field == field


def test_layers_that_predict_further_ahead_are_left_out(checkpoint, edit_config, edit_weights):
    folder = checkpoint("deepseek_v3")
    edit_weights(
        folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2)})
    )
    edit_config(folder, num_nextn_predict_layers=1)
    model = load_checkpoint(folder, dtype="float32")
    (reason,) = model.ignored_weights.values()
    assert "further ahead" in reason


def test_the_plan_names_absorbed_matrices_and_counts_their_bytes(checkpoint):
    folder = checkpoint("deepseek_v3", hidden_size=64, intermediate_size=64)
    plan = plan_model(folder, dtype="bfloat16", linear_format="int8g32")
    heads = [m for m in plan.matrices if m.role == "head_matrices"]
    assert [m.shape for m in heads[:2]] == [(4, 32, 16), (4, 24, 32)]
    # 16 inputs are no whole group of 32.
    assert [m.weight_format for m in heads[:2]] == ["bf16", "int8g32"]
    model = load_checkpoint(folder, dtype="bfloat16", linear_format="int8g32")
    # The routers' biases count in float32, whatever the model's type.
    assert model.weight_bytes == plan.weight_bytes
