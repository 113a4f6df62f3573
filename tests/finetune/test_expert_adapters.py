"""Goal: LoRA of routed experts learns what PEFT's would, and its files are PEFT's.

Method: tiny models with random weights that bf16 holds, so that packing changes none. The oracle is
plain transformers with plain PEFT, in float64 for gradients and in float32 for logits.
"""

import json
import shutil
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.cli.main import app
from tandem.core.errors import ConfigError, CorruptionError, UnsupportedError
from tandem.finetune.export import export_merged
from tandem.finetune.forecast.fake_step import StepShape, simulate_step
from tandem.finetune.forecast.prediction import predict_run
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.expert_adapters import adapt_model
from tandem.finetune.training.loss import compute_loss, find_head
from tandem.finetune.training.model import load_frozen
from tandem.finetune.training.trainer import finetune, make_lora_config
from tandem.finetune.tuned import TunedModel
from tandem.models.families import open_checkpoint
from tandem.models.loading.hub import DEMO_FOLDER
from tandem.models.loading.loader import load_model
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.describe import Describer
from tandem.models.planning.layers import list_layers
from tandem.models.planning.planner import plan_model

IDS = torch.tensor([list(range(5, 45)), list(range(60, 20, -1))])
BF16_BOUND = 2**-6
"""Four roundings to bf16 give 2^-7 for a layer (tests/kernels/experts/test_adapted_experts.py); two
layers, and attention between them, at most twice that."""
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 128},
    # Inputs first, and gate and up in turn.
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 128},
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """The folder of a tiny model of a family."""
    return _save(request.param, tmp_path_factory.mktemp("checkpoint"))


one_family = pytest.mark.parametrize(
    "checkpoint", rest_slow(["qwen3_moe"], FAMILIES), indirect=True, scope="module"
)
"""Of whole runs; gradients and merged weights, where layouts differ, are those of each family."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The first of them."""
    return _save("qwen3_moe", tmp_path_factory.mktemp("qwen"))


def _save(family, folder):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Large enough that experts and their adapters matter.
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return str(folder)


def make_keys(checkpoint, folder="out", **changes):
    keys = {"model_name_or_path": checkpoint, "output_dir": str(folder), "lora_rank": 4}
    return make_recipe({**keys, "lora_target": "all,experts", **changes})


def adapt(model, checkpoint, **changes):
    return adapt_model(model, make_lora_config(make_keys(checkpoint, **changes), model))


def draw_adapter(model):
    """Give every factor random weights: those of B begin as zeros."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            value = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = value.to(parameter.dtype)
    return model


@pytest.fixture(autouse=True)
def _quiet():
    """transformers and PEFT tell of names that will change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def take_gradients(model, ids=IDS):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return loss.item(), grads


def measure(got, want):
    return {n: float((got[n].double() - w).norm() / w.norm()) for n, w in want.items()}


def load_plain(checkpoint, dtype):
    # The experts' other implementations take no float64.
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, **options)


@pytest.fixture(scope="module")
def exact(checkpoint):
    """(loss, gradients) of transformers and PEFT in float64, whose modules are as in a run."""
    model = load_plain(checkpoint, torch.float64)
    config = make_lora_config(make_keys(checkpoint), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A fixture of a module is made before those of a test.
        tuned = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return take_gradients(draw_adapter(tuned))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gradients_are_those_of_float64(is_checkpointed, checkpoint, exact):
    """Of every factor of every layer; computed again under checkpointing, they are the same."""
    model = load_frozen(checkpoint, expert_format="bf16", num_threads=2).model
    tuned = draw_adapter(adapt(model, checkpoint)).train()
    if is_checkpointed:
        tuned.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        tuned.enable_input_require_grads()
    loss, grads = take_gradients(tuned)
    assert grads.keys() == exact[1].keys()
    off = measure(grads, exact[1])
    assert sum(".experts." in name for name in off) == 8
    assert max(off.values()) < BF16_BOUND, off
    assert loss == pytest.approx(exact[0], rel=BF16_BOUND)


def test_a_mutant_is_caught(checkpoint, exact):
    """Gate and up of the adapters exchanged: what a wrong order of B's rows would be."""
    model = load_frozen(checkpoint, expert_format="bf16", num_threads=2).model
    tuned = draw_adapter(adapt(model, checkpoint))
    for name, parameter in tuned.named_parameters():
        if "experts.base_layer.lora_B" in name:
            parameter.data = parameter.data.roll(len(parameter) // 2 + 1, 0)
    off = measure(take_gradients(tuned)[1], exact[1])
    assert max(v for n, v in off.items() if "experts.base_layer.lora_A" in n) > 8 * BF16_BOUND


def test_accumulated_gradients_are_the_sum(qwen):
    """Two backward passes add up, also for experts that one of them gives no token."""
    model = load_frozen(qwen, expert_format="int8", num_threads=2).model
    tuned = draw_adapter(adapt(model, qwen))
    each = []
    for row in IDS:
        tuned.zero_grad()
        each.append({n: g.clone() for n, g in take_gradients(tuned, row[None])[1].items()})
    tuned.zero_grad()
    take_gradients(tuned, IDS[:1])
    _, both = take_gradients(tuned, IDS[1:])
    assert all(torch.equal(both[n], each[0][n] + each[1][n]) for n in both)


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory, make_values):
    """A whole run in float32 over bf16 experts: (keys, folder)."""
    folder = tmp_path_factory.mktemp("run") / "out"
    values = make_values(
        folder,
        model_name_or_path=checkpoint,
        expert_format="bf16",
        lora_target="all,experts",
        lora_dropout=0,
        plot_loss=False,
    )
    finetune(make_recipe(values))
    return values, folder


@one_family
def test_the_adapter_loads_in_plain_peft(run, checkpoint):
    """Its logits there are ours within the rounding of activations; without it, far from them."""
    _, folder = run
    base = load_plain(checkpoint, torch.float32)
    with torch.no_grad():
        without = base(IDS).logits
        want = peft.PeftModel.from_pretrained(base, folder)(IDS).logits
        got = TunedModel(checkpoint, folder, expert_format="bf16", num_threads=2)._model(IDS).logits

    def find_distance(logits):
        # A rounding may change which expert a token has: nine of ten tokens tell.
        off = (logits - want).norm(dim=-1) / want.norm(dim=-1)
        return float(off.flatten().quantile(0.9))

    assert find_distance(got) < BF16_BOUND
    assert find_distance(without) > 4 * BF16_BOUND
    names = load_file(folder / "adapter_model.safetensors")
    factors = {n: t for n, t in names.items() if ".experts." in n}
    assert len(factors) == 8
    assert all(t.any() for t in factors.values())


@one_family
def test_a_resumed_run_is_the_same_bit_by_bit(run, tmp_path):
    """From the middle checkpoint."""
    values, folder = run
    shutil.copytree(folder / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again = {**values, "output_dir": str(tmp_path / "again"), "resume_from_checkpoint": True}
    finetune(make_recipe(again))
    first, second = (
        load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@one_family
def test_training_goes_on_from_an_adapter(run, tmp_path):
    """``adapter_name_or_path`` begins where the other run ended."""
    values, folder = run
    more = {**values, "output_dir": str(tmp_path / "more"), "adapter_name_or_path": str(folder)}
    finetune(make_recipe({**more, "learning_rate": 1e-12, "max_steps": 1}))
    first, second = (
        load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "more")
    )
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_the_merged_checkpoint_computes_what_the_adapter_does(run, checkpoint, tmp_path):
    """In float32 with transformers' experts; the stored dtype rounds nothing here.

    The checkpoints have both layouts: a tensor for each matrix of an expert, and one for all.
    """
    stored = load_file(f"{checkpoint}/model.safetensors")
    is_stacked = "model.layers.0.mlp.experts.down_proj" in stored
    assert is_stacked == ("model.layers.0.mlp.experts.0.down_proj.weight" not in stored)
    assert is_stacked == (open_checkpoint(checkpoint).config.model_type == "gpt_oss")
    _, folder = run
    merged = export_merged(checkpoint, folder, tmp_path / "merged")
    with torch.no_grad():
        got = load_plain(merged, torch.float32)(IDS).logits
        want = peft.PeftModel.from_pretrained(load_plain(checkpoint, torch.float32), folder)(
            IDS
        ).logits
    assert float((got - want).norm() / want.norm()) < 1e-5


@one_family
def test_evaluation_takes_the_adapter(run, checkpoint, tmp_path):
    """What was learned is measured: the trained rows are likelier with the adapter."""
    _, folder = run
    rows = [{"instruction": "What is the name?", "input": "", "output": "The name is eman."}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))

    def score(adapter):
        words = ["eval", str(checkpoint), "--data", str(path), "--expert-format", "bf16"]
        words += ["--adapter", str(adapter)] if adapter else []
        result = CliRunner().invoke(app, [*words, "--max-tokens", "2", "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["metrics"]["perplexity"]

    assert score(folder) < score(None)


@one_family
def test_what_is_hostile_is_refused(run, checkpoint, tmp_path):
    """Shapes of another model, parameters that the configuration does not name."""
    _, folder = run

    def change(name, edit=None, **config):
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("checkpoint-*"))
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        tensors = load_file(tmp_path / name / "adapter_model.safetensors")
        if edit is not None:
            edit(tensors)
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
        return tmp_path / name

    key = next(n for n in load_file(folder / "adapter_model.safetensors") if "experts.lora_A" in n)
    short = change("short", lambda tensors: tensors.update({key: tensors[key][:-1].clone()}))
    with pytest.raises(CorruptionError, match=r"lora_A of .*experts is \[15, 128\]"):
        TunedModel(checkpoint, short)
    with pytest.raises(CorruptionError, match="base_layer is the adapter of no parameter"):
        TunedModel(checkpoint, change("one", target_parameters=["experts.down_proj"]))
    with pytest.raises(ConfigError, match="target_parameters"):
        TunedModel(checkpoint, change("number", target_parameters=7))


def test_serving_refuses_them_by_name(qwen, tmp_path):
    """Until the serving kernels add them."""
    frozen = load_frozen(qwen, num_threads=2).model
    adapt(frozen, qwen).save_pretrained(tmp_path)
    pool = ThreadPool(2)
    formats = {"expert_format": "none", "linear_format": "none"}
    model = load_model(plan_model(qwen, dtype="float32", **formats), pool)
    model.enable_adapters(1)
    with pytest.raises(UnsupportedError, match="routed experts"):
        model.adapters.read(tmp_path)


def test_recipes_that_cannot_be_obeyed(qwen):
    """Dropout of a parameter, which PEFT refuses; unknown names; a model without experts."""
    model = build_skeleton(open_checkpoint(qwen).config, None)
    with pytest.raises(ConfigError, match="lora_dropout") as error:
        make_lora_config(make_keys(qwen, lora_dropout=0.1), model)
    assert error.value.field == "lora_dropout"
    with pytest.raises(ConfigError, match="choose of all, experts, "):
        make_lora_config(make_keys(qwen, lora_target="gate_up"), model)
    only = make_lora_config(make_keys(qwen, lora_target="experts"), model)
    assert only.target_parameters == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    dense = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["llama"](hidden_size=32, num_hidden_layers=1, vocab_size=64)
    )
    with pytest.raises(ConfigError, match="has no routed experts"):
        make_lora_config(make_keys(qwen, lora_target="all,experts"), dense)


@pytest.mark.usefixtures("free_step")
def test_the_dry_run_counts_them(qwen, make_values, tmp_path):
    """The weights that are trained are those of the run."""
    values = make_values(tmp_path, model_name_or_path=qwen, expert_format="int8", lora_dropout=0)
    predicted = predict_run(make_recipe({**values, "lora_target": "all,experts"}))
    model = adapt(load_frozen(qwen, expert_format="int8", num_threads=2).model, qwen)
    real = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert predicted.trainable_parameters == real


@pytest.mark.slow  # test_prediction.py compares what a step keeps.
@pytest.mark.parametrize("expert_format", ["int8", "none"])
def test_the_dry_run_counts_what_is_kept(expert_format, qwen):
    """For the backward pass: without packed experts, PEFT keeps the merged weights of all."""
    frozen = load_frozen(qwen, expert_format=expert_format, num_threads=2).model
    head = find_head(frozen)
    model = adapt(frozen, qwen).train()
    real = _measure_kept(model, head)
    shape = StepShape(
        num_rows=2,
        num_tokens=40,
        is_bf16=False,
        has_packed_experts=expert_format != "none",
        has_packed_linear=False,
        is_checkpointed=False,
    )

    def make():
        return build_skeleton(open_checkpoint(qwen).config, None)

    recipe = make_keys(qwen)
    cost = simulate_step(
        make,
        list_layers(Describer(build_skeleton(open_checkpoint(qwen).config))),
        shape,
        lambda m: adapt_model(m, make_lora_config(recipe, m), is_empty=True),
    )
    # Fakes are also counted that are alive but not saved.
    assert 0.9 * real < cost.kept_bytes < 1.35 * real


def _measure_kept(model, head):
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_loss(model.get_base_model(), head, {"input_ids": IDS, "labels": IDS})
    return sum(kept.values())
