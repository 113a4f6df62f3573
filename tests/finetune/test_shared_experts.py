"""Adapters of shared experts and dense blocks in MoE families, from training to use."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem._native import ThreadPool
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.trainer import finetune
from tandem.finetune.tuned import TunedModel
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen2-MoE with random weights: shared experts in both layers."""
    config = CONFIG_MAPPING["qwen2_moe"](
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return str(folder)


def compute_served(checkpoint, adapter, ids):
    """Return the logits [T, V] of the model that is served, with the adapter loaded into it."""
    formats = {"expert_format": "none", "linear_format": "none"}
    pool = ThreadPool(2)
    model = load_model(plan_model(checkpoint, dtype="float32", **formats), pool)
    model.enable_adapters(1)
    digest = model.adapters.install(model.adapters.read(adapter)).digest
    chunk = SequenceChunk(ids, 0, [1, 0, 2], "all", digest)
    return model.forward(PagedBatch.build([chunk], 16), model.allocate_kv(3, block_size=16))


@pytest.mark.parametrize("expert_format", ["bf16", pytest.param("none", marks=pytest.mark.slow)])
def test_shared_experts_are_trained_saved_and_resumed(
    expert_format, checkpoint, make_values, tmp_path
):
    """PEFT would take their names for routed experts: nothing of those, all of these."""
    values = make_values(
        tmp_path / "out",
        model_name_or_path=checkpoint,
        expert_format=expert_format,
        num_train_epochs=1,
        save_steps=1,
    )
    finetune(make_recipe(values))
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    kinds = {re.search(r"layers\.\d+\.(.+)\.lora_[AB]\.weight$", name)[1] for name in adapter}
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    assert kinds == attention | {f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
    assert all(t.abs().max() > 0 for name, t in adapter.items() if ".lora_B." in name)
    with_it, without = (
        TunedModel(checkpoint, folder, expert_format=expert_format)
        for folder in (tmp_path / "out", None)
    )
    loaded = dict(with_it._model.named_parameters())
    assert sum(".shared_expert." in name and "lora_" in name for name in loaded) == 12
    for name, stored in adapter.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], stored)
    del without
    if expert_format == "none":  # Both sides in float32.
        ids = list(range(5, 45))
        with torch.no_grad():
            want = with_it._model(torch.tensor([ids])).logits[0]
        got = compute_served(checkpoint, tmp_path / "out", ids)
        assert float((got - want).norm() / want.norm()) < 1e-5
    again = {**values, "output_dir": str(tmp_path / "again"), "resume_from_checkpoint": True}
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "out" / "checkpoint-1", tmp_path / "again" / "checkpoint-1")
    finetune(make_recipe(again))
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
