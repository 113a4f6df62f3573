"""The function between gate, up and down of an MLP or an expert. Shapes: F intermediate."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.model.layers import SILU, Activation

__all__ = ["activate", "apply_function"]


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return the activation of [..., 2 F] whose first half is the gate; [..., F], new."""
    gate, up = gate_up.chunk(2, -1)
    if activation == SILU:
        return functional.silu(gate).mul_(up)
    if activation.is_plain:
        return apply_function(activation.name, gate).mul_(up)
    limit, name = activation.bound, activation.name
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = apply_function(name, gate)
    return gate.mul_(up + activation.up_offset)


def apply_function(name: str, x: Tensor) -> Tensor:
    """Return a plain function of each item, new; ``name`` as in ``Activation``."""
    match name:
        case "silu":
            return functional.silu(x)
        case "relu2":
            return functional.relu(x).square()
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case _:
            raise AssertionError(name)
