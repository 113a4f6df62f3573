"""Buffers of a native step for multi-head latent attention, allocated once for all layers.

Shapes: T tokens, H heads, R rank of the latent, P rotated items, n items without RoPE and v value
items of a head, I items of an index key.
"""

from dataclasses import dataclass

import torch

from tandem.core.model.layers import MlaSpec
from tandem.kernels.native import Buffer

__all__ = ["LatentBuffers"]


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """Memory for the intermediate results of latent attention on T rows, with views in the shapes
    that each native call takes.
    """

    first: Buffer
    """First product [T, ...]: queries (compressed or not), the latent with its rotated items, index
    keys.
    """
    compressed: Buffer
    """Compressed queries [T, q_rank], a view of ``first``; empty if queries are not compressed."""
    normed: Buffer
    """Normed compressed queries [T, q_rank], in memory of their own."""
    queries: Buffer
    """Queries [T, H * (n + P)], followed by the index's queries: the second product's result, or a
    view of ``first`` if queries are not compressed.
    """
    by_head: Buffer
    """View of ``queries`` by head, [T, H, n + P]."""
    plain: Buffer
    """Query items without RoPE, [T, H, n]: inputs of the absorbed key matrices."""
    latent: Buffer
    """Latent and rotated key, [T, R + P], a view of ``first``."""
    index_queries: Buffer | None
    """The index's queries [T, index heads, I], stored after ``queries``; None without an index."""
    index_keys: Buffer | None
    """The index's keys [T, I] before their norm, at the end of ``first``; None without an index."""
    rows: Buffer
    """Queries over latents, followed by the key: [T, H + 1, R + P]."""
    absorbed: Buffer
    """View of ``rows`` that takes the absorbed queries, [T, H, R]."""
    mixed: Buffer
    """Attention's results, still latents, [T, H, R]."""
    values: Buffer
    """Attention's results as values of all heads, [T, H * v]."""
    value_heads: Buffer
    """View of ``values`` by head, [T, H, v]."""

    @classmethod
    def allocate(cls, spec: MlaSpec, num_tokens: int, dtype: torch.dtype) -> "LatentBuffers":
        """Allocate the buffers of latent attention for a number of tokens, with unspecified
        contents.
        """
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
