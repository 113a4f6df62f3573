"""`tandem finetune --dry-run`: what is predicted is what a run takes."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from quick import rest_slow
from tandem.cli.main import app
from tandem.finetune.forecast import prediction
from tandem.finetune.forecast.fake_step import StepShape, simulate_step
from tandem.finetune.forecast.prediction import predict_run
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.loss import PIECE_BYTES, compute_loss, find_head
from tandem.finetune.training.model import count_weight_bytes, load_frozen
from tandem.finetune.training.trainer import count_steps, finetune
from tandem.models.families import open_checkpoint
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.describe import Describer
from tandem.models.planning.layers import list_layers

SHAPE = StepShape(
    num_rows=2,
    num_tokens=16,
    is_bf16=False,
    has_packed_experts=True,
    has_packed_linear=False,
    is_checkpointed=False,
)


def make_demo():
    return build_skeleton(open_checkpoint("demo").config, None)


def list_demo_layers():
    return list_layers(Describer(build_skeleton(open_checkpoint("demo").config)))


@pytest.mark.usefixtures("free_step")
@pytest.mark.parametrize("expert_format", ["none", "int8"])
def test_weights_are_counted_as_they_are_loaded(expert_format, make_values, tmp_path):
    """Experts and all other weights together are within a hundredth of the loaded model's."""
    recipe = make_recipe(make_values(tmp_path / "out", expert_format=expert_format))
    predicted = predict_run(recipe)
    sizes = {part.name: part.size_bytes for part in predicted.parts}
    loaded = count_weight_bytes(load_frozen("demo", expert_format=expert_format).model)
    assert sizes["routed experts"] + sizes["other weights"] == pytest.approx(loaded, rel=0.01)


def test_the_steps_and_the_trained_weights_are_those_of_the_run(make_values, tmp_path):
    """Counts that the Trainer and PEFT come to themselves."""
    values = make_values(tmp_path / "out", num_train_epochs=1.5, plot_loss=False)
    recipe = make_recipe(values)
    predicted = predict_run(recipe)
    assert predicted.fits
    assert predicted.tokens_per_s > 0
    report = finetune(recipe)
    assert predicted.data.num_rows == report.num_examples
    assert predicted.trainable_parameters == report.trainable_parameters
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert predicted.num_steps == count_steps(recipe, report.num_examples) == state["max_steps"]


def measure_kept(model, head, ids) -> int:
    """Bytes that torch keeps for the backward pass of a real step, weights left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_loss(model.get_base_model(), head, {"input_ids": ids, "labels": ids})
    return sum(kept.values())


@pytest.mark.parametrize("expert_format", rest_slow(["int8"], ["int8", "f32", "none"]))
def test_kept_bytes_are_those_of_a_real_step(expert_format, adapt):
    """Against the tensors that autograd saves on the demo model."""
    frozen = load_frozen("demo", expert_format=expert_format)
    head = find_head(frozen.model)
    assert head is not None
    model = adapt(frozen.model).train()
    real = measure_kept(model, head, torch.randint(3, 4000, (2, 64)))
    shape = dataclasses.replace(SHAPE, num_tokens=64, has_packed_experts=expert_format != "none")
    shape = dataclasses.replace(shape, has_f32_experts=expert_format == "f32")
    cost = simulate_step(make_demo, list_demo_layers(), shape, adapt)
    # Fakes are also counted that are alive but not saved.
    assert 0.95 * real < cost.kept_bytes < 1.35 * real


@pytest.mark.parametrize("is_bf16", rest_slow([False], [False, True]))
def test_logits_are_never_alive_at_once(is_bf16, adapt):
    """The run takes its loss in pieces, so a wide vocabulary costs no more than one of them."""

    def run(vocabulary):
        def make():
            config = open_checkpoint("demo").config
            config.vocab_size = vocabulary
            return build_skeleton(config, None)

        shape = dataclasses.replace(SHAPE, num_tokens=512, is_bf16=is_bf16)
        return simulate_step(make, list_demo_layers(), shape, adapt).peak_bytes

    narrow, wide = run(4096), run(131072)
    # All logits in float32 would be 512 MiB.
    assert wide - narrow < 2 * PIECE_BYTES


FREE_HALF = """
from tandem.finetune.training.allocator import map_large_blocks

def read_anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10

assert map_large_blocks()
first = bytearray(16 << 20)
del first  # Would make all blocks below 16 MiB small ones.
blocks = [bytearray(b"x" * (1 << 20)) for _ in range(64)]
before = read_anonymous()
del blocks[::2]
print(before - read_anonymous())
"""


def test_what_a_step_frees_is_returned():
    """Every second of 64 blocks, whose places a heap would keep; in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", FREE_HALF], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(result.stdout) > 31 << 20


def test_checkpointing_keeps_less_and_computes_more(adapt):
    """The two sides of gradient_checkpointing."""

    def run(*, is_checkpointed):
        shape = dataclasses.replace(SHAPE, is_checkpointed=is_checkpointed)
        return simulate_step(make_demo, list_demo_layers(), shape, adapt)

    plain, checkpointed = run(is_checkpointed=False), run(is_checkpointed=True)
    assert checkpointed.kept_bytes < plain.kept_bytes / 2
    assert checkpointed.torch_flops > 1.2 * plain.torch_flops


def test_what_to_change_where_it_does_not_fit(make_values, tmp_path, monkeypatch):
    """Keys are named in order until it fits; nothing that fits is changed."""
    known = {}

    def simulate_once(make, layers, shape, adapt):
        if shape not in known:
            known[shape] = simulate_step(make, layers, shape, adapt)
        return known[shape]

    # The second prediction begins with what the first has simulated; the rank stays the same.
    monkeypatch.setattr(prediction, "simulate_step", simulate_once)
    values = make_values(tmp_path / "out", per_device_train_batch_size=8, lora_rank=64)
    recipe = make_recipe(values)
    whole = predict_run(recipe)
    assert whole.changes == ()
    base = sum(p.size_bytes for p in whole.parts if p.name not in ("activations", "temporaries"))
    tight = predict_run(recipe, available_bytes=(base + whole.total_bytes) // 2)
    assert not tight.fits
    assert tight.changes[0] == "per_device_train_batch_size=1"
    assert "gradient_accumulation_steps=16" in tight.changes
    assert tight.changed_bytes <= tight.available_bytes


@pytest.mark.usefixtures("free_step")
def test_data_that_is_not_there_is_told_beside_the_figures(make_values, tmp_path):
    """The command shows the table, names the error, and ends with status 1."""
    values = make_values(tmp_path / "out", dataset="absent", cutoff_len=32)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(values))
    result = CliRunner().invoke(app, ["finetune", str(path), "--dry-run"])
    assert result.exit_code == 1
    assert "would be refused" in result.stdout
    assert "'absent'" in result.stdout
    assert "routed experts" in result.stdout
    assert not (tmp_path / "out").exists()
