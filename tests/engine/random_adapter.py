"""A LoRA adapter of random numbers, for an engine's table of adapters."""

import json

import torch
from safetensors.torch import save_file

__all__ = ["write_adapter"]


def write_adapter(table, folder, seed, *, rank=4):
    """Write an adapter of all modules that may be adapted."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in table._model.modules.items():
        for which, shape in (("A", (rank, part.in_features)), ("B", (part.out_features, rank))):
            noise = 0.3 * torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = noise
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
