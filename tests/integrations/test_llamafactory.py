"""`llamafactory-cli` lines of the KTransformers tutorial, with its recipe unchanged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.integrations.llamafactory import translate
from tutorial import RECIPE, RULE, RULE_PATH

INFERENCE = """\
model_name_or_path: opensourcerelease/DeepSeek-V3-bf16
adapter_name_or_path: saves/Kllama_deepseekV3
template: deepseek
infer_backend: ktransformers  # choices: [huggingface, vllm, sglang, ktransformers]
trust_remote_code: true

use_kt: true # use KTransformers as LoRA sft backend to inference
kt_optimize_rule: examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml
cpu_infer: 32
chunk_size: 8192
"""
EXPORT = """\
model_name_or_path: opensourcerelease/DeepSeek-V3-bf16
adapter_name_or_path: saves/Kllama_deepseekV3
template: deepseek
trust_remote_code: true
export_dir: output/merged
export_size: 5
export_device: cpu
export_legacy_format: false
"""
MODEL, ADAPTER = "opensourcerelease/DeepSeek-V3-bf16", "saves/Kllama_deepseekV3"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A LLaMA-Factory checkout as the tutorial leaves it."""
    monkeypatch.chdir(tmp_path)
    files = {
        "examples/train_lora/deepseek3_lora_sft_kt.yaml": RECIPE,
        "examples/inference/deepseek3_lora_sft_kt.yaml": INFERENCE,
        "examples/merge_lora/deepseek3.yaml": EXPORT,
        RULE_PATH: RULE,
        "data/dataset_info.json": '{"identity": {"file_name": "identity.json"}}',
        "data/identity.json": json.dumps(
            [{"instruction": f"hi {i}", "input": "", "output": "Hello!"} for i in range(30)]
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_line_has_a_tandem_command(folder):
    """train, chat, export and version; words after the file go along."""
    train = ["examples/train_lora/deepseek3_lora_sft_kt.yaml", "max_samples=100"]
    assert translate(["train", *train]) == ["finetune", *train]
    chat = ["chat", "examples/inference/deepseek3_lora_sft_kt.yaml"]
    assert translate(chat) == ["chat", MODEL, "--adapter", ADAPTER]
    assert translate([*chat, "adapter_name_or_path=null"]) == ["chat", MODEL]
    export = translate(["export", "examples/merge_lora/deepseek3.yaml"])
    assert export == ["export", MODEL, "--adapter", ADAPTER, "--out", "output/merged"]
    assert translate(["version"]) == ["version"]
    api = ["api", "examples/inference/deepseek3_lora_sft_kt.yaml", "adapter_name_or_path=null"]
    assert translate(api) == ["serve", MODEL]


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["chat", "absent.yaml"], NotFoundError, r"absent\.yaml"),
        (["chat"], ConfigError, "YAML file"),
        (["trian", "x.yaml"], ConfigError, "one of train"),
        (["webui"], UnsupportedError, "tandem finetune"),
        (["eval", "x.yaml"], UnsupportedError, "tandem eval"),
        (["chat", "chat.yaml", "template=empty"], UnsupportedError, "template"),
        (["chat", "chat.yaml", "model_name_or_path=null"], ConfigError, "model_name_or_path"),
        (["export", "chat.yaml"], ConfigError, "export_dir"),
        (["export", "chat.yaml", "export_quantization_bit=4"], UnsupportedError, "quantization"),
        (["export", "chat.yaml", "export_legacy_format=true"], UnsupportedError, "legacy"),
        (["api", "chat.yaml"], UnsupportedError, "merge it"),
    ],
)
def test_what_has_no_equivalent_is_refused_with_the_nearest(words, kind, message, folder):
    """Nothing is passed over that would do something else."""
    (folder / "chat.yaml").write_text(INFERENCE)
    with pytest.raises(kind, match=message):
        translate(words)


def make_tiny_deepseek(folder: Path) -> None:
    """A DeepSeek-V3 with random weights where the tutorial's recipe looks for the model."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    from tandem.models.loading.hub import DEMO_FOLDER

    config = DeepseekV3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_tutorials_lines_run(folder):
    """USE_KT=1 llamafactory-cli train, export, chat: each works on what the one before left."""
    pytest.importorskip("peft", reason="fine-tuning needs the `finetune` extra")
    make_tiny_deepseek(folder / MODEL)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "tandem.integrations.llamafactory", *words]
        done = subprocess.run(
            command,
            env={"USE_KT": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)},
            input="hi\n/exit\n",
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "30 examples" in run("train", "examples/train_lora/deepseek3_lora_sft_kt.yaml")
    assert (folder / ADAPTER / "training_loss.png").stat().st_size > 0
    targets = json.loads((folder / ADAPTER / "adapter_config.json").read_text())["target_modules"]
    assert {"q_a_proj", "o_proj", "gate_proj"} <= {t.rpartition(".")[2] for t in targets}
    run("export", "examples/merge_lora/deepseek3.yaml")
    assert (folder / "output/merged/model.safetensors").is_file()
    assert run("chat", "examples/inference/deepseek3_lora_sft_kt.yaml", "max_new_tokens=3")
