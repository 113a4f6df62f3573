"""Using an adapter: answers, scores, a merged checkpoint, and adapters that are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.core.errors import (
    ConflictError,
    CorruptionError,
    UnsupportedError,
)
from tandem.finetune.export import export_merged
from tandem.finetune.metrics import measure_matches, measure_texts, split_tokens
from tandem.finetune.tuned import TunedModel

MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
NAME = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A random adapter of two projections in each layer of the demo model."""
    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(6):
        for name, rows in (("q_proj", 256), ("v_proj", 128)):
            tensors[NAME.format(layer, name, "A")] = torch.randn(4, 256, generator=generator) / 16
            tensors[NAME.format(layer, name, "B")] = torch.randn(rows, 4, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": "demo"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def changed(adapter, tmp_path):
    """Return ``change(config, tensors)``: a copy of the adapter's folder with other contents."""

    def change(edit=None, **config):
        folder = tmp_path / "changed"
        shutil.copytree(adapter, folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if edit is not None:
            tensors = load_file(folder / "adapter_model.safetensors")
            edit(tensors)
            save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    return change


def test_the_merged_checkpoint_answers_as_the_adapter_does(adapter, tmp_path):
    """``export`` writes W + scale B A; the base model answers otherwise."""
    merged = export_merged("demo", adapter, tmp_path / "merged")
    tuned = TunedModel("demo", adapter, num_threads=2)
    answer = tuned.answer(MESSAGES, max_tokens=6)
    assert TunedModel(str(merged), num_threads=2).answer(MESSAGES, max_tokens=6) == answer
    assert TunedModel("demo", num_threads=2).answer(MESSAGES, max_tokens=6) != answer
    before, after = (load_file(f / "model.safetensors") for f in _folders(merged))
    name = "model.layers.2.self_attn.q_proj.weight"
    update = load_file(adapter / "adapter_model.safetensors")
    a, b = (update[NAME.format(2, "q_proj", half)] for half in "AB")
    wanted = (before[name].float() + 2.0 * b @ a).to(before[name].dtype)
    assert torch.equal(after[name], wanted)
    assert sum(not torch.equal(before[key], after[key]) for key in before) == 12
    with pytest.raises(ConflictError):
        export_merged("demo", adapter, merged)


def _folders(merged):
    from tandem.models.loading.hub import DEMO_FOLDER

    return DEMO_FOLDER, merged


@pytest.mark.slow
def test_chat_command(adapter):
    """``tandem chat --adapter`` answers in this process."""
    words = ["chat", "demo", "--adapter", str(adapter), "--prompt", "Hi", "--max-tokens", "3"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert "text" in json.loads(result.stdout)


def test_metrics():
    """Equal texts score 100; the scores are those of the definitions."""
    text = ["the cat sat on the mat"]
    same = measure_texts(text, text) | measure_matches(text, text)
    assert all(value == pytest.approx(100) for value in same.values())
    scores = measure_texts(["the cat sat"], ["the dog sat"])
    assert scores["bleu-1"] == pytest.approx(200 / 3)
    assert scores["rouge-1"] == pytest.approx(200 / 3)
    assert scores["rouge-2"] == 0
    assert measure_matches([" a", "b"], ["a", "c"]) == {"exact_match": 50}


def test_chinese_is_measured_by_characters():
    """Without spaces, words would make any difference a whole miss."""
    assert split_tokens("你好 World!") == ["你", "好", "world"]
    scores = measure_texts(["我爱北京"], ["我爱上海"])
    assert scores["bleu-1"] == pytest.approx(50)
    assert scores["rouge-l"] == pytest.approx(50)


def test_what_peft_would_believe_is_read_with_care_first(changed, tmp_path):
    """What is hostile is a matter of ``models.adapter_files``: here it is asked in time."""
    key = NAME.format(0, "q_proj", "A")
    folder = changed(lambda tensors: tensors.update({key: torch.zeros(5, 256)}))
    for read in (TunedModel, lambda *args: export_merged(*args, tmp_path / "merged")):
        with pytest.raises(CorruptionError, match=r"lora_A of .*q_proj is \[5, 256\]"):
            read("demo", folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    for read in (TunedModel, lambda *args: export_merged(*args, tmp_path / "merged")):
        with pytest.raises(UnsupportedError, match="pickle"):
            read("demo", folder)
    shutil.rmtree(folder)
    folder = changed(lambda tensors: tensors.update({"../evil": torch.zeros(1)}))
    with pytest.raises(UnsupportedError, match="evil"):
        TunedModel("demo", folder)


def test_adapters_of_another_model_are_not_merged(changed, tmp_path):
    """A weight that the checkpoint does not have, or of another size; no folder is left."""

    def move(tensors):
        for half in "AB":
            tensors[NAME.format(9, "q_proj", half)] = tensors.pop(NAME.format(0, "q_proj", half))

    folder = changed(move)
    with pytest.raises(UnsupportedError, match=r"layers\.9"):
        export_merged("demo", folder, tmp_path / "merged")
    shutil.rmtree(folder)
    name = NAME.format(0, "q_proj", "B")
    folder = changed(lambda tensors: tensors.update({name: torch.zeros(9, 4)}))
    with pytest.raises(CorruptionError, match=r"is \[9, 4\], needs \[256, 4\]"):
        export_merged("demo", folder, tmp_path / "merged")
    assert [p.name for p in tmp_path.iterdir()] == ["changed"]
