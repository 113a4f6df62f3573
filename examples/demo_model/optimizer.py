"""The optimiser: Muon for matrices, AdamW for the embedding, the routers and the norms.

Owns the update rules and their state; the schedule is the caller's. Muon replaces a matrix's
momentum by the nearest orthogonal matrix, which at this scale reaches a given loss in clearly fewer
tokens than AdamW. Source: K. Jordan et al., "Muon: An optimizer for hidden layers", 2024.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
# The quintic of the Muon paper: its slope at zero is as steep as convergence allows.
QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_STEPS = 5


def orthogonalize(x: Tensor) -> Tensor:
    """Replace every matrix of a wide batch [N, rows <= columns] by about its orthogonal factor."""
    a, b, c = QUINTIC
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(QUINTIC_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class MuonAdamW:
    """Both rules over one model. `state_dict` holds everything a resumed run needs."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float):
        self.muon_lr, self.adam_lr, self.weight_decay = muon_lr, adam_lr, weight_decay
        self.num_steps = 0
        self.matrices: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            is_matrix = name.endswith(("_proj", "_proj.weight"))
            (self.matrices if is_matrix else self.others)[name] = parameter
        self.momenta = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.means = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in self.others.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update every parameter from its gradient; `scale` in [0, 1] is the schedule's value."""
        self.num_steps += 1
        self._step_muon(self.muon_lr * scale)
        self._step_adam(self.adam_lr * scale)

    def _step_muon(self, rate: float) -> None:
        # Matrices of one shape go through the iteration together: many small products become one.
        batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parameter in self.matrices.items():
            momentum = self.momenta[name].lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            for target, direction in _split_matrices(name, parameter, update):
                wide = direction.shape[-2] <= direction.shape[-1]
                direction = direction if wide else direction.mT
                batches[direction.shape[-2:]].append((target, direction))
        for parts in batches.values():
            whole = _orthogonalize_shared(torch.cat([direction for _, direction in parts]))
            pieces = whole.split([direction.shape[0] for _, direction in parts])
            for (target, _), piece in zip(parts, pieces, strict=True):
                wide = target.shape[-2] <= target.shape[-1]
                stretch = max(1.0, target.shape[-2] / target.shape[-1]) ** 0.5
                target.mul_(1 - rate * self.weight_decay)
                target.sub_(piece if wide else piece.mT, alpha=rate * stretch)

    def _step_adam(self, rate: float) -> None:
        first, second = ADAM_BETAS
        for name, parameter in self.others.items():
            mean = self.means[name].lerp_(parameter.grad, 1 - first)
            square = self.squares[name].lerp_(parameter.grad.square(), 1 - second)
            mean = mean / (1 - first**self.num_steps)
            square = square / (1 - second**self.num_steps)
            parameter.sub_(mean / (square.sqrt() + ADAM_EPS), alpha=rate)

    def state_dict(self) -> dict:
        """Everything but the parameters."""
        kept = ("num_steps", "momenta", "means", "squares")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict`'s value."""
        for name, value in state.items():
            setattr(self, name, value)


def _orthogonalize_shared(whole: Tensor) -> Tensor:
    """`orthogonalize`, each worker doing its part of the batch."""
    if not dist.is_initialized():
        return orthogonalize(whole)
    parts = whole.chunk(dist.get_world_size())
    results = [torch.empty_like(part) for part in parts]
    dist.all_gather(results, orthogonalize(parts[dist.get_rank()]).contiguous())
    return torch.cat(results)


def _split_matrices(name: str, parameter: Tensor, update: Tensor) -> list[tuple[Tensor, Tensor]]:
    """View a parameter as batches [N, rows, columns]; gate and up are matrices of their own."""
    if parameter.dim() == 2:
        return [(parameter[None], update[None])]
    if name.endswith("gate_up_proj"):
        return list(zip(parameter.chunk(2, dim=1), update.chunk(2, dim=1), strict=True))
    return [(parameter, update)]
