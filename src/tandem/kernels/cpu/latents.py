"""The buffers of a native step for multi-head latent attention, made once for all its layers.

Shapes: T tokens, H heads, R rank of the latent, P rotated items; see ``kernels.operators.mla``.
"""

from dataclasses import dataclass

import torch

from tandem.kernels.native import Buffer
from tandem.kernels.operators.mla import MlaSizes

__all__ = ["LatentBuffers"]


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """Memory of T rows, viewed in the shapes that each call takes."""

    first: Buffer
    """[T, queries, compressed or not, and then the latent with its rotated end]."""
    compressed: Buffer
    """[T, q_rank], within ``first``; not there without a compression."""
    normed: Buffer
    """[T, q_rank], of its own."""
    queries: Buffer
    """[T, H * (n + P)]: the second product's result, or within ``first``."""
    by_head: Buffer
    """The same as [T, H, n + P]."""
    plain: Buffer
    """[T, H, n] of these: what the absorbed matrices are multiplied with."""
    latent: Buffer
    """[T, R + P], within ``first``."""
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
    def allocate(cls, sizes: MlaSizes, num_tokens: int, dtype: torch.dtype) -> "LatentBuffers":
        """Return buffers with unspecified contents."""
        heads, queries = sizes.num_heads, sizes.num_heads * sizes.head
        first = torch.empty(num_tokens, sizes.first_product + sizes.key, dtype=dtype)
        flat = first[:, :queries]
        if sizes.q_rank:
            flat = torch.empty(num_tokens, queries, dtype=dtype)
        by_head = flat.unflatten(1, (heads, sizes.head))
        rows = torch.empty(num_tokens, heads + 1, sizes.key, dtype=dtype)
        values = torch.empty(num_tokens, heads * sizes.value, dtype=dtype)
        return cls(
            Buffer(first),
            Buffer(first[:, : sizes.q_rank]),
            Buffer(torch.empty(num_tokens, sizes.q_rank, dtype=dtype)),
            Buffer(flat),
            Buffer(by_head),
            Buffer(by_head[..., : sizes.nope]),
            Buffer(first[:, sizes.first_product :]),
            Buffer(rows),
            Buffer(rows[:, :heads, : sizes.rank]),
            Buffer(torch.empty(num_tokens, heads, sizes.rank, dtype=dtype)),
            Buffer(values),
            Buffer(values.view(num_tokens, heads, sizes.value)),
        )
