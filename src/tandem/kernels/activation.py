"""What stands between gate, up and down of an MLP or an expert, as data. Shapes: F intermediate."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SILU", "Activation"]


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between gate, up and down: ``f(min(g, limit)) * (clamp(u, limit) + up_offset)``.

    The default is SwiGLU's. gpt-oss has ``Activation(alpha=1.702, limit=7.0, up_offset=1.0)``.
    """

    name: str = "silu"
    """``silu`` (``g * sigmoid(alpha * g)``), ``gelu`` (erf) or ``gelu_tanh``."""
    alpha: float = 1.0
    """Of ``silu`` alone; positive."""
    limit: float = math.inf
    """The gate is at most this, up at most this far from zero; positive."""
    up_offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is ``f(g) * u``, which dense MLPs run."""
        return self == Activation(self.name)

    def apply(self, gate_up: Tensor) -> Tensor:
        """Return the activation of [..., 2 F] whose first half is the gate; [..., F], new."""
        gate, up = gate_up.chunk(2, -1)
        if self == SILU:
            return functional.silu(gate).mul_(up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.name == "silu":
            gate = gate * torch.sigmoid(self.alpha * gate)
        else:
            gate = functional.gelu(gate, approximate="tanh" if "tanh" in self.name else "none")
        return gate.mul_(up + self.up_offset)


SILU = Activation()
