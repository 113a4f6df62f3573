"""The loss over a large vocabulary without all logits: head and cross-entropy, piece by piece.

The logits of all tokens, their softmax and its gradient would be the largest tensors of a step.
Here the logits of a piece of the rows are computed, then the piece's loss and the gradient of its
hidden states, and the logits are freed. Rows without a label are left out. The head is frozen.

Shapes: T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.finetune.data.examples import IGNORED_LABEL
from tandem.kernels.cpu.autograd import as_floats
from tandem.kernels.operators.frozen_linear import FrozenLinear

__all__ = ["LOGIT_KEYS", "Head", "compute_loss", "count_piece_rows", "find_head"]

PIECE_BYTES = 64 << 20
"""Bytes of float32 logits that are computed at a time, if that is ``LEAST_ROWS`` rows or more."""
LEAST_ROWS = 32
PROBED_TOKENS = 8
PROBE_TOLERANCE = 2e-2
"""Relative difference up to which a model's own loss counts as equal to ``compute_loss``: it covers
logits that transformers rounds to bf16, and is below the effect of a factor on logits.
"""
LOGIT_KEYS = ("final_logit_softcapping", "output_router_logits")
"""Fields of configurations that change the loss: a cap on logits, which the probe's small logits
would not reveal, and a loss of the routers.
"""


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen language-model head, as products with its matrix [V, D]: forward for logits, and
    backward for gradients.
    """

    vocabulary: int
    forward: Callable[[Tensor], Tensor]
    """Function that returns the logits, float32 [T, V], of hidden states [T, D]."""
    backward: Callable[[Tensor], Tensor]
    """Function that returns the gradient of hidden states [T, D], given that of logits, float32 [T,
    V].
    """


def find_head(model: Any) -> Head | None:
    """Return the head of a causal model, for ``compute_loss``; None if that would not be the
    model's own loss.

    That is so if the head is trained, has a bias or is no linear layer, or if the two losses of a
    few tokens differ.
    """
    text = model.config.get_text_config()
    if any(getattr(text, key, None) for key in LOGIT_KEYS):
        return None
    head = _wrap_head(model.get_output_embeddings())
    return head if head is not None and _is_plain(model, head) else None


def _wrap_head(module: Any) -> Head | None:
    if isinstance(module, FrozenLinear):
        packed = module.packed
        return Head(
            module.out_features,
            lambda x: packed.forward(as_floats(x)),
            lambda d_logits: packed.backward(as_floats(d_logits)),
        )
    if type(module) is not nn.Linear or module.bias is not None or module.weight.requires_grad:
        return None
    weight = module.weight.detach()
    return Head(
        len(weight),
        lambda x: (x.to(weight.dtype) @ weight.t()).float(),
        lambda d_logits: d_logits.to(weight.dtype) @ weight,
    )


def count_piece_rows(vocabulary: int) -> int:
    """Return the number of rows (tokens) whose logits the loss computes at a time, for a vocabulary
    of this size.
    """
    return max(PIECE_BYTES // (4 * vocabulary), LEAST_ROWS)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
        learned = (targets != IGNORED_LABEL).nonzero().flatten()
        num_rows = count_piece_rows(head.vocabulary)
        d_hidden = torch.zeros_like(hidden)
        total = torch.zeros((), dtype=torch.float64)
        for rows in learned.split(num_rows):
            logits, labels = head.forward(hidden[rows]), targets[rows][:, None]
            top = logits.amax(1, keepdim=True)
            wanted = logits.gather(1, labels) - top
            logits.sub_(top).exp_()
            sums = logits.sum(1, keepdim=True)
            total += (sums.log() - wanted).sum(dtype=torch.float64)
            logits.div_(sums).scatter_add_(1, labels, logits.new_full(labels.shape, -1.0))
            d_hidden[rows] = head.backward(logits).to(d_hidden.dtype)
            del logits
        ctx.save_for_backward(d_hidden)
        return total.float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[None, Tensor, None]:
        (d_hidden,) = ctx.saved_tensors
        return None, d_hidden * grads[0].to(d_hidden.dtype), None


def compute_loss(
    model: Any, head: Head, inputs: dict[str, Any], num_items: Tensor | int | None = None
) -> Tensor:
    """Return the sum of the learned tokens' cross-entropies, divided by their number, float32.

    Args:
        model: transformers' causal model, with adapters in its modules but without PEFT's model
            around it; its decoder is ``base_model``.
        head: the model's head; see ``find_head``.
        inputs: the model's arguments, with ``labels`` [B, T], which are shifted by one token here.
        num_items: number of learned tokens in all batches of a step; None: those of this batch.
    """
    values = {key: value for key, value in inputs.items() if key != "labels"}
    labels = inputs["labels"][:, 1:].flatten()
    hidden = model.base_model(**values)[0][:, :-1].flatten(0, 1)
    total = _Loss.apply(head, hidden, labels)
    assert isinstance(total, Tensor), type(total)
    count: Tensor | int = (labels != IGNORED_LABEL).sum() if num_items is None else num_items
    return total / count


def _is_plain(model: Any, head: Head) -> bool:
    ids = torch.arange(1, PROBED_TOKENS + 1).remainder(head.vocabulary)[None]
    inputs = {"input_ids": ids, "labels": ids}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        own, plain = model(**inputs).loss, compute_loss(model, head, inputs)
    model.train(was_training)
    return bool((own - plain).abs() <= PROBE_TOLERANCE * own.abs())
