"""Random LoRA adapters, written by PEFT itself, and its model as the oracle; what they hold."""

import copy
import warnings

import peft
import torch
from peft.utils import transformers_weight_conversion

from tandem.kernels.operators import lora

ROUTED = (".experts", ".gate", ".router", "lm_head", "shared_expert_gate")


def list_targets(model):
    """The linear modules that may be adapted."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and not any(name.endswith(part) or f"{part}." in name for part in ROUTED)
    ]


def _keep(*_, **__):
    pass


def make_adapter(model, folder, monkeypatch, *, seed=1, rank=4, targets=None, **settings):
    """Write an adapter of ``model`` with random weights; return PEFT's model with it, unmerged."""
    targets = list_targets(model) if targets is None else targets
    settings = {"lora_alpha": 2 * rank, **settings}
    config = peft.LoraConfig(r=rank, target_modules=targets, **settings)
    with warnings.catch_warnings():
        # PEFT calls old names, and warns of patterns that it adds itself.
        warnings.simplefilter("ignore")
        # Names of dense blocks would be taken for those of experts, which older models had apart.
        monkeypatch.setattr(
            transformers_weight_conversion, "convert_peft_config_for_transformers", _keep
        )
        tuned = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = 0.7 * noise * parameter.shape[-1] ** -0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned.save_pretrained(folder)
    return tuned


def count_bytes(tensors):
    """Bytes of the memory of tensors, memory that several share counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def record_views(monkeypatch):
    """Return a list of all tensors that native kernels are given from now on as LoRA factors."""
    given, view_tensor = [], lora.view_tensor

    def view(tensor):
        given.append(tensor)
        return view_tensor(tensor)

    monkeypatch.setattr(lora, "view_tensor", view)
    return given
