"""A LoRA adapter of random numbers, for an engine's table of adapters."""

import json

import torch
from safetensors.torch import save_file

__all__ = ["write_adapter"]


def write_adapter(table, folder, seed):
    """Write an adapter of all modules that may be adapted."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in table._model.modules.items():
        for which, shape in (("A", (4, part.in_features)), ("B", (part.out_features, 4))):
            noise = 0.3 * torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = noise
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
