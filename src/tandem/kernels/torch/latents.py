"""Queries and keys of multi-head latent attention in torch.

Shapes: T tokens, D hidden, H heads, R rank of the latent, P rotated items; see
``kernels.operators.mla``.
"""

import torch
from torch import Tensor

from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.rope import apply_rope_

__all__ = ["project_latents"]


def project_latents(
    attention: MlaAttention, h_TD: Tensor, cos_T1P: Tensor, signed_sin_T1P: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return queries over latents [T, H, R + P] and keys [T, 1, R + P], both new.

    The third result is an index's projected queries and keys; empty without an index.

    Args:
        attention: layer that holds the weights.
        h_TD: normed hidden states.
        cos_T1P: cosines.
        signed_sin_T1P: sines with the first half negated.
    """
    spec, eps, dtype = attention.spec, attention.spec.norm_eps, h_TD.dtype
    first = attention.first_matrix.forward(h_TD, dtype=dtype)
    index_dim = 0 if spec.index is None else spec.index.dim
    queries, latent, index_keys = first.split((spec.first_product, spec.key, index_dim), -1)
    if attention.q_matrix is not None and attention.held_q_norm is not None:
        weight = attention.held_q_norm.tensor
        normed = torch.rms_norm(queries, weight.shape, weight, eps)
        queries = attention.q_matrix.forward(normed, dtype=dtype)
    size = spec.num_heads * spec.head
    by_head = queries[:, :size].unflatten(1, (spec.num_heads, spec.head))
    rows = h_TD.new_empty(len(h_TD), spec.num_heads, spec.key)
    rows[..., : spec.rank] = attention.key_heads.forward(by_head[..., : spec.nope])
    apply_rope_(rows[..., spec.rank :], by_head[..., spec.nope :], cos_T1P, signed_sin_T1P)
    key = h_TD.new_empty(len(h_TD), 1, spec.key)
    weight = attention.held_kv_norm.tensor
    key[:, 0, : spec.rank] = torch.rms_norm(latent[:, : spec.rank], weight.shape, weight, eps)
    apply_rope_(key[..., spec.rank :], latent[:, None, spec.rank :], cos_T1P, signed_sin_T1P)
    return rows, key, (queries[:, size:], index_keys)
