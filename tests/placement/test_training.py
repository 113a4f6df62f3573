"""Goal: a run of fine-tuning elsewhere is predicted by counts, beside what is published of it."""

import json

import pytest

from tandem.placement.catalog import find_hardware, find_model, read_published
from tandem.placement.fitting import read_efficiencies
from tandem.placement.predictions import LARGE_ERROR, explain_row
from tandem.placement.shape import read_shape
from tandem.placement.training import TrainingWishes, list_training, plan_training_on

WHERE = "8488c-2x4090-48g"


def train(model, machine=WHERE, **wishes):
    shape = read_shape(find_model(model).config, model)
    eff = read_efficiencies()
    return plan_training_on(find_hardware(machine), shape, TrainingWishes(**wishes), eff)


def test_published_runs_are_predicted_and_each_outlier_is_explained():
    figures = list_training(read_efficiencies("published"))
    told = {(row.rate, row.vram_gb, row.dram_gb) for row in read_published().training}
    assert {(227.6, 5.5, 30), (40.35, 70, 1250), (36.55, 81, 2100)} <= told
    assert len(figures) == 3 * len(told)
    for figure in figures:
        name = f"{figure.row} {figure.what}"
        assert bool(explain_row(name)) == (abs(figure.error) > LARGE_ERROR), figure
    dram = [abs(figure.error) for figure in figures if figure.what == "DRAM GB"]
    assert max(dram) < 0.1


def test_memory_is_counted_by_device():
    planned = train("deepseek-v3", tokens=512)
    gpu, dram = planned.memory
    experts = 58 * 256 * 3 * 7168 * 2048
    assert dram.parts["routed experts"] == 2 * experts
    assert gpu.parts["frozen weights"] == pytest.approx(2 * (671.0e9 - experts), rel=0.005)
    # Ranks double what is trained; checkpoints keep a layer's input for its inside.
    wide = train("deepseek-v3", tokens=512, rank=16)
    assert wide.trainable_parameters == 2 * planned.trainable_parameters
    kept = train("deepseek-v3", tokens=512, is_checkpointed=True).memory[0].parts["activations"]
    assert kept < gpu.parts["activations"] / 10
    assert planned.fits
    assert not train("kimi-k2", "6454s-4090", tokens=512).fits


def test_memory_that_gpu_and_cpu_share_is_counted_once():
    memory = train("qwen3-30b-a3b", "dgx-spark", tokens=1).memory
    assert [(each.device, each.capacity_bytes) for each in memory] == [("DRAM", 119 << 30)]
    assert {"routed experts", "contexts of the GPUs"} <= set(memory[0].parts)


def test_an_adapter_has_the_weights_of_its_modules():
    """Qwen3-30B-A3B: q, k, v and o of 48 layers, whose routed experts are not trained."""
    heads, kv_heads, width, head = 32, 4, 2048, 128
    each = 4 * width + (2 * heads + 2 * kv_heads) * head
    assert train("qwen3-30b-a3b", tokens=64).trainable_parameters == 8 * 48 * each


def test_a_step_without_a_gpu_is_passes_over_the_cpu():
    """Bound by reading: 16 products of experts for 6, and two passes over all else."""
    planned = train("qwen3-30b-a3b", "reference", tokens=1, accumulation=4)
    spec, eff = find_hardware("reference"), read_efficiencies()
    shape = read_shape(find_model("qwen3-30b-a3b").config, "qwen3-30b-a3b")
    bandwidth = spec.cpu_bandwidth_gbps * 1e9 * eff.formats["bf16"].bandwidth
    layer = shape.layers[0]
    experts = 48 * 8 * layer.expert_weights * 2 / bandwidth
    others = (shape.attention_weights + shape.dense_weights + shape.head_weights) * 2 / bandwidth
    assert planned.step_s == pytest.approx(4 * (experts * 16 / 6 + others * 2), rel=0.01)
    assert {memory.device for memory in planned.memory} == {"DRAM"}


def test_the_command_predicts_a_run_of_a_model_that_is_not_here(tmp_path, capsys):
    from typer import BadParameter

    from tandem.cli.commands.finetune import finetune

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: deepseek-v3\ndataset: d\ntemplate: deepseek3\ncutoff_len: 512\n"
        "output_dir: out\nbf16: true\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 16\n"
    )
    finetune(recipe, ["gradient_checkpointing=true"], dry_run=True, hardware=WHERE, json=True)
    report = json.loads(capsys.readouterr().out)
    want = next(f for f in list_training(read_efficiencies("published")) if f.row == "sft-v3")
    assert report["plan"]["tokens_per_s"] == pytest.approx(want.predicted)
    assert report["wishes"]["accumulation"] == 16
    finetune(recipe, [], dry_run=True, hardware=WHERE, json=False)
    assert "tokens/s" in capsys.readouterr().out
    with pytest.raises(BadParameter, match="dry-run"):
        finetune(recipe, [], dry_run=False, hardware=WHERE, json=False)
