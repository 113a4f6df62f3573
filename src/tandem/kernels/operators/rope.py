"""Rotary position embedding: frequencies of the known scalings, and the rotation itself.

Shapes: T tokens, N heads (queries and keys together), d head_dim, r rotated items of a head, which
come first and are all of them unless the rotation is partial. Heads are stored as two halves
(the "rotate half" convention of transformers), so rotating swaps halves.

Invariant: a token's angles depend on its position alone, never on the batch, on the chunk or on
how long the sequence is. Keys can therefore be cached and shared.
"""

import math

import torch
from torch import Tensor

from tandem.core.model.layers import PositionScale, RopeSpec
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.operator import Operator

__all__ = ["LayeredRope", "Rope", "Unrotated", "apply_rope_", "scale_positions"]


def _base_frequencies(p: RopeSpec) -> Tensor:
    exponents = torch.arange(0, p.head_dim, 2, dtype=torch.float32) / p.head_dim
    return 1.0 / (p.rope_theta**exponents)


def _yarn_frequencies(p: RopeSpec, inv_freq: Tensor, context: int) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between (arXiv:2309.00071, eq. 23)."""

    def dim_of(rotations: float) -> float:
        log_base = 2 * math.log(p.rope_theta)
        return p.head_dim * math.log(context / (rotations * 2 * math.pi)) / log_base

    low, high = dim_of(p.beta_fast), dim_of(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, p.head_dim - 1)
    if low == high:
        high += 0.001  # The ramp needs a slope; the value is the reference implementation's.
    steps = torch.arange(p.head_dim // 2, dtype=torch.float32)
    keep = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    return inv_freq / p.factor * (1 - keep) + inv_freq * keep


def _yarn_attention_factor(p: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if p.factor <= 1 else 0.1 * weight * math.log(p.factor) + 1.0

    if p.attention_factor is not None:
        return p.attention_factor
    if p.mscale and p.mscale_all_dim:
        return mscale(p.mscale) / mscale(p.mscale_all_dim)
    return mscale(1.0)


def _llama3_frequencies(p: RopeSpec, inv_freq: Tensor, context: int) -> Tensor:
    """Divide long wavelengths by ``factor``, keep short ones, blend between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    keep = blend.clamp(0, 1)
    return (1 - keep) * inv_freq / p.factor + keep * inv_freq


def compute_frequencies(p: RopeSpec) -> tuple[Tensor, float]:
    """Return (inverse frequencies float32 [d/2], the factor on cos and sin)."""
    inv_freq = _base_frequencies(p)
    context = p.original_max_position_embeddings
    context = p.max_position_embeddings if context is None else context
    match p.rope_type:
        case "linear":
            return inv_freq / p.factor, 1.0
        case "yarn":
            return _yarn_frequencies(p, inv_freq, context), _yarn_attention_factor(p)
        case "llama3":
            return _llama3_frequencies(p, inv_freq, context), 1.0
        case "proportional":
            # A pair whose frequency is 0 is not rotated.
            inv_freq[p.num_angles :] = 0.0
            return inv_freq / p.factor, 1.0
        case "none":
            # With angle 0 the cosine is 1 and the sine 0, so the rotation leaves every value
            # unchanged.
            return torch.zeros_like(inv_freq), 1.0
        case _:
            # "dynamic" RoPE scaling changes frequencies only beyond the trained context, which is
            # never exceeded here.
            return inv_freq, 1.0


class Rope(Operator):
    """cos and sin of each position's angles; holds no weights.

    ``dynamic`` NTK: a token at position p beyond the trained length uses the base that a sequence
    of length p + 1 would have. Decoding token by token gives exactly transformers' values; a
    prefill beyond the trained length differs from transformers, whose angles depend on the longest
    sequence of the batch, which no cached key could follow.

    Args:
        parameters: what determines the angles.
        is_half: ``forward`` returns the angles of half a head, as gpt-oss's attention takes them.
    """

    def __init__(self, parameters: RopeSpec, *, is_half: bool = False) -> None:
        super().__init__()
        self.is_half = is_half
        self.rope_parameters = parameters
        self.inv_freq, self.attention_factor = compute_frequencies(parameters)

    @property
    def ropes(self) -> "tuple[Rope, ...]":
        """Itself alone, as the RoPEs of a model whose layers share one."""
        return (self,)

    def load(self, reader: WeightReader, name: str) -> None:
        """Move the frequencies to the reader's device; nothing is read."""
        del name
        self.inv_freq = self.inv_freq.to(reader.device)

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, r] of ``dtype``; both halves of r carry the same angles.

        Args:
            positions: int64 [T] or [1, T].
            dtype: of the result; angles are computed in float32.
        """
        angles = positions[..., None].float() * self._inv_freq_of(positions)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def _inv_freq_of(self, positions: Tensor) -> Tensor:
        p = self.rope_parameters
        if p.rope_type != "dynamic":
            return self.inv_freq
        longest = p.max_position_embeddings
        lengths = (positions + 1).clamp(min=longest)[..., None].double()
        growth = (p.factor * lengths / longest) - (p.factor - 1)
        base = p.rope_theta * growth ** (p.head_dim / (p.head_dim - 2))
        exponents = torch.arange(0, p.head_dim, 2, device=positions.device) / p.head_dim
        return (1.0 / base**exponents).float()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run as transformers' rotary embedding does: ``x`` gives only the dtype."""
        cos, sin = self.compute(position_ids, x.dtype)
        if self.is_half:
            half = cos.shape[-1] // 2
            return cos[..., :half], sin[..., :half]
        return cos, sin


class LayeredRope(Operator):
    """Several RoPEs, by type of layer.

    Args:
        ropes: by ``layer_types`` of the configuration; under the empty name that of all layers
            that rotate, beside one that rotates nothing.
    """

    def __init__(self, ropes: dict[str, Rope]) -> None:
        super().__init__()
        for name, rope in ropes.items():
            self.add_module(name or "all", rope)
        self._ropes = ropes

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """One for each type of layer, in the order that they were given in."""
        return tuple(self._ropes.values())

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the RoPEs, being modules of their own, are loaded by name."""

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Run as transformers' rotary embedding does."""
        return self._ropes[layer_type](x, position_ids)


class Unrotated:
    """The ``Angles`` of a model without positions: they turn nothing, and change no bit.

    Args:
        size: items that they are for, all that latent attention rotates or some of a head.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See ``Angles``."""
        cos = torch.ones(len(positions), self._size, dtype=dtype, device=positions.device)
        return cos, torch.zeros_like(cos)


def scale_positions(scale: PositionScale, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor on the queries of each position [T], of ``dtype``."""
    count = torch.floor((positions + scale.offset) / scale.length)
    return (1 + scale.beta * torch.log(1 + count)).to(dtype)


def apply_rope_(out: Tensor, x_TNd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> None:
    """Write the rotated heads of ``x_TNd`` into ``out``, which may be ``x_TNd`` itself.

    Args:
        out: [T, N, r], any strides with a dense last dimension.
        x_TNd: [T, N, r], heads before rotation.
        cos_T1d: cosines.
        sin_T1d: sines with the first half negated, which turns "rotate half" into a plain swap.
    """
    swapped = torch.roll(x_TNd, x_TNd.shape[-1] // 2, -1)
    torch.mul(x_TNd, cos_T1d, out=out)
    out.addcmul_(swapped, sin_T1d)
