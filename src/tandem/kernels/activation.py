"""Activation functions of an MLP or expert, which combine the outputs of its gate and up
projections. Shapes: F intermediate.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.model.layers import SILU, Activation

__all__ = ["activate", "apply_function"]


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Apply a gated activation to [..., 2 F], whose first half is the gate; return [...,
    F], new.
    """
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
    """Apply a parameterless function to each item; ``name`` as in ``Activation``. The result is
    new.
    """
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
