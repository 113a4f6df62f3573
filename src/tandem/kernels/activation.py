"""The function between gate, up and down of an MLP or an expert. Shapes: F intermediate."""

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.model.layers import SILU, Activation

__all__ = ["activate"]


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return the activation of [..., 2 F] whose first half is the gate; [..., F], new."""
    gate, up = gate_up.chunk(2, -1)
    if activation == SILU:
        return functional.silu(gate).mul_(up)
    limit, name = activation.bound, activation.name
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "silu":
        gate = gate * torch.sigmoid(activation.alpha * gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if "tanh" in name else "none")
    return gate.mul_(up + activation.up_offset)
