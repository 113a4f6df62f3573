"""Tiny random models of classes that transformers' own modules run here."""

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

GPT2 = {"vocab_size": 131, "n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 1024}
MAMBA = {"vocab_size": 131, "num_hidden_layers": 2, "hidden_size": 32, "state_size": 8}
SIZES = {"gpt2": GPT2, "mamba": MAMBA}


def save_own(folder, model_type="gpt2", **fields):
    """Write a checkpoint of a class, and return its folder."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**(SIZES[model_type] | ids | fields))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Else all logits are near 0, and any answer as likely as another.
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return folder
