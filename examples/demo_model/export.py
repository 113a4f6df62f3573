"""The export: training weights to a folder that `AutoModelForCausalLM` loads.

Owns the layout on disk, which is the hub's: bfloat16, one tensor for each expert's gate, up and
down. Checks that transformers finds nothing missing or left over and computes the same logits.
"""

import json
from pathlib import Path

import torch
from model import NORM_EPS, ROPE_THETA, DemoModel, Shape
from safetensors.torch import save_file
from tokenizer import END_OF_TEXT, save_tokenizer
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

MAX_FOLDER_BYTES = 20_000_000
# Both sides compute in float32 and differ in the order of their sums only.
LOGIT_TOLERANCE = 2e-3


def build_config(shape: Shape, tokenizer: Tokenizer) -> Qwen3MoeConfig:
    """The transformers configuration of a shape."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.expert_size * shape.top_k,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_len,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=shape.expert_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )


def write_config(config: Qwen3MoeConfig, folder: Path) -> None:
    """Write `config.json` with the names of the published Qwen3-MoE models.

    transformers 5 reads these and its own; older readers know only these.
    """
    config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["num_experts"] = values.pop("num_local_experts")
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    kept = {**AutoConfig.from_pretrained(folder).to_dict(), "_name_or_path": ""}
    lost = [name for name, value in config.to_dict().items() if kept.get(name) != value]
    if lost:
        raise ValueError(f"[export] config.json does not keep {lost}")


def to_hub_layout(model: DemoModel) -> dict[str, torch.Tensor]:
    """Name -> bfloat16 tensor, as checkpoints of this architecture are published."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.to(torch.bfloat16)
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, (gate, up) in enumerate(part.chunk(2) for part in value):
                tensors[f"{prefix}.{i}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.{i}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for i, down in enumerate(value):
                tensors[f"{prefix}.{i}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = value.contiguous()
    return tensors


def export_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the whole folder and check it."""
    save_tokenizer(tokenizer, folder, model.shape.context_len)
    write_config(build_config(model.shape, tokenizer), folder)
    save_file(to_hub_layout(model), folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes files private; these are to be shipped.
    (folder / "model.safetensors").chmod(0o644)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    if size_bytes > MAX_FOLDER_BYTES:
        raise ValueError(f"[export] {folder} holds {size_bytes} bytes, limit {MAX_FOLDER_BYTES}")
    check_logits(model, load_exported(folder, torch.float32))


def load_exported(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the folder with transformers; refuse missing, unexpected or mismatched tensors."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    problems = {name: value for name, value in report.items() if value}
    if problems:
        raise ValueError(f"[export] transformers loads {folder} with problems: {problems}")
    return model.eval()


@torch.no_grad()
def check_logits(model: DemoModel, exported: PreTrainedModel) -> None:
    """Compare the training module, its weights rounded as on disk, with the loaded folder."""
    rounded = DemoModel(model.shape, compute_dtype=torch.float32)
    state = {name: value.bfloat16().float() for name, value in model.state_dict().items()}
    rounded.load_state_dict(state)
    generator = torch.Generator().manual_seed(0)
    shape = (2, min(256, model.shape.context_len))
    ids = torch.randint(model.shape.vocab_size, shape, generator=generator)
    distance = (rounded(ids) - exported(ids).logits).abs().max().item()
    if not distance <= LOGIT_TOLERANCE:
        raise ValueError(f"[export] logits differ by {distance}, limit {LOGIT_TOLERANCE}")
