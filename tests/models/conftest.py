"""Tiny checkpoints of every family, written by transformers itself, and ways to run a model."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Sibling modules of the tests.
sys.path.insert(0, str(Path(__file__).parent))

torch = pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk  # noqa: E402
from tandem.models.loading.loader import CausalModel  # noqa: E402

transformers_logging.disable_progress_bar()

CONFIGS = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "kimi_linear": KimiLinearConfig,
    "qwen3_next": Qwen3NextConfig,
    "lfm2": Lfm2Config,
    "granitemoehybrid": GraniteMoeHybridConfig,
}

COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
"""Multi-head latent attention; keys and values have different sizes, neither the hidden's."""
INDEX = {"index_topk": 20, "index_n_heads": 8, "index_head_dim": 24}
"""An index that chooses fewer tokens than most prompts of the tests have."""
MOE = {
    "qwen3_moe": {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2},
    # A window shorter than most prompts of the tests; layers with and without one take turns.
    "gpt_oss": {
        "intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
    "qwen3_next": {
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 40,
    },
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "residual_multiplier": 0.6,
    },
    "kimi_linear": {
        **{name: LATENT[name] for name in LATENT if name.endswith(("_dim", "_rank", "_heads"))},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 40,
        "pad_token_id": 0,
        "bos_token_id": 1,
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**LATENT, "q_lora_rank": 32, "n_group": 4, "topk_group": 2, **INDEX},
    "glm_moe_dsa": {**LATENT, "q_lora_rank": 32, **INDEX},
}


@pytest.fixture(scope="session")
def make_config() -> Callable[..., PreTrainedConfig]:
    """Return ``make(model_type, **changes)``: a tiny configuration of a family."""

    def make(model_type: str, **changes: Any) -> PreTrainedConfig:
        kind = CONFIGS.get(model_type) or CONFIG_MAPPING[model_type]
        return kind(**{**COMMON, **MOE.get(model_type, {}), **changes})

    return make


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Any]:
    """Return ``save(config, folder)``: write a random checkpoint, give transformers' model."""

    def save(config: PreTrainedConfig, folder: Path, *, shard_size: str = "1GB", seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms near 1, matrices that keep the size of what passes through, biases small.
            if name.endswith("norm.weight"):
                parameter.data = 1 + 0.1 * noise
            elif parameter.dim() == 1:
                parameter.data = 0.1 * noise
            else:
                parameter.data = noise * parameter.shape[-1] ** -0.5
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        model.save_pretrained(folder, max_shard_size=shard_size)
        return model

    return save


@pytest.fixture(scope="session")
def saved(tmp_path_factory, make_config, save_model) -> Callable[..., Path]:
    """Return ``saved(model_type, shard_size, changes)``: a folder made once; not to be changed."""
    folders: dict[str, Path] = {}

    def find(model_type: str, shard_size: str, changes: dict[str, Any]) -> Path:
        key = repr((model_type, shard_size, sorted(changes.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp("saved") / model_type
            save_model(make_config(model_type, **changes), folder, shard_size=shard_size)
            folders[key] = folder
        return folders[key]

    return find


@pytest.fixture
def checkpoint(tmp_path, saved) -> Callable[..., Path]:
    """Return ``checkpoint(model_type, **changes)``: a folder with a random model in it."""

    def make(model_type: str, *, shard_size: str = "1GB", **changes: Any) -> Path:
        folder = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        return shutil.copytree(saved(model_type, shard_size, changes), folder)

    return make


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Return ``edit(folder, **changes)``: change ``config.json``; None removes a key."""

    def edit(folder: Path, **changes: Any) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return edit


@pytest.fixture
def edit_weights() -> Callable[..., None]:
    """Return ``edit(folder, change)``: let ``change`` modify the dict of tensors in place."""

    def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
        path = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return edit


class Session:
    """One sequence of a model in a cache of its own, or beside others in a shared one."""

    def __init__(
        self, model: CausalModel, cache: PagedKvCache, table: list[int], adapter: str = ""
    ) -> None:
        self.model, self.cache, self.table, self.adapter = model, cache, table, adapter
        self.length = 0
        self.states = model.allocate_states(1)

    def chunk(
        self, token_ids: list[int], wants: str = "all", *, state_slot: int = 0
    ) -> SequenceChunk:
        chunk = SequenceChunk(token_ids, self.length, self.table, wants, self.adapter, state_slot)
        self.length += len(token_ids)
        return chunk

    def run(self, token_ids: list[int], wants: str = "all") -> Any:
        chunks = [self.chunk(token_ids, wants)]
        batch = PagedBatch.build(chunks, self.cache.layout.block_size)
        return self.model.forward(batch, self.cache, states=self.states)


@pytest.fixture
def open_session() -> Callable[..., Session]:
    """Return ``open(model, ...)``: a ``Session`` over scrambled blocks."""

    def open_one(
        model: CausalModel,
        *,
        block_size: int = 16,
        cache: PagedKvCache | None = None,
        table: list[int] | None = None,
        adapter: str = "",
    ) -> Session:
        if cache is None:
            cache = model.allocate_kv(24, block_size=block_size)
        if table is None:
            generator = torch.Generator().manual_seed(block_size)
            table = torch.randperm(cache.num_blocks, generator=generator).tolist()
        return Session(model, cache, table, adapter)

    return open_one
