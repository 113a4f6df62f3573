"""The buffers of a native step for multi-head latent attention, made once for all its layers.

Shapes: T tokens, H heads, R rank of the latent, P rotated items; see ``kernels.operators.mla``.
"""

from dataclasses import dataclass

import torch

from tandem.core.model.layers import MlaSpec
from tandem.kernels.native import Buffer

__all__ = ["LatentBuffers"]


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """Memory of T rows, viewed in the shapes that each call takes."""

    first: Buffer
    """[T, queries, compressed or not, then the latent with its rotated end, then index keys]."""
    compressed: Buffer
    """[T, q_rank], within ``first``; not there without a compression."""
    normed: Buffer
    """[T, q_rank], of its own."""
    queries: Buffer
    """[T, H * (n + P)]: the second product's result, or within ``first``. Those of an index
    follow."""
    by_head: Buffer
    """The same as [T, H, n + P]."""
    plain: Buffer
    """[T, H, n] of these: what the absorbed matrices are multiplied with."""
    latent: Buffer
    """[T, R + P], within ``first``."""
    index_queries: Buffer | None
    """[T, index heads, I], behind ``queries``; None without an index."""
    index_keys: Buffer | None
    """[T, I], at the end of ``first``: as they are projected."""
    rows: Buffer
    """[T, H + 1, R + P]: queries over latents, and behind them the key."""
    absorbed: Buffer
    """[T, H, R] of these."""
    mixed: Buffer
    """[T, H, R]: attended latents."""
    values: Buffer
    """[T, H * v]."""
    value_heads: Buffer
    """The same as [T, H, v]."""

    @classmethod
    def allocate(cls, spec: MlaSpec, num_tokens: int, dtype: torch.dtype) -> "LatentBuffers":
        """Return buffers with unspecified contents."""
        heads, queries = spec.num_heads, spec.num_heads * spec.head
        index, latent_end = spec.index, spec.first_product + spec.key
        index_dim = 0 if index is None else index.dim
        first = torch.empty(num_tokens, latent_end + index_dim, dtype=dtype)
        flat = first[:, :queries]
        if spec.q_rank:
            size = queries + (0 if index is None else index.num_heads * index.dim)
            flat = torch.empty(num_tokens, size, dtype=dtype)
        by_head = flat[:, :queries].unflatten(1, (heads, spec.head))
        index_queries = index_keys = None
        if index is not None:
            rest = flat[:, queries:].unflatten(1, (index.num_heads, index.dim))
            index_queries, index_keys = Buffer(rest), Buffer(first[:, latent_end:])
        rows = torch.empty(num_tokens, heads + 1, spec.key, dtype=dtype)
        values = torch.empty(num_tokens, heads * spec.value, dtype=dtype)
        return cls(
            Buffer(first),
            Buffer(first[:, : spec.q_rank]),
            Buffer(torch.empty(num_tokens, spec.q_rank, dtype=dtype)),
            Buffer(flat),
            Buffer(by_head),
            Buffer(by_head[..., : spec.nope]),
            Buffer(first[:, spec.first_product : latent_end]),
            index_queries,
            index_keys,
            Buffer(rows),
            Buffer(rows[:, :heads, : spec.rank]),
            Buffer(torch.empty(num_tokens, heads, spec.rank, dtype=dtype)),
            Buffer(values),
            Buffer(values.view(num_tokens, heads, spec.value)),
        )
