"""Rotary position embedding (RoPE): frequencies of the known scalings, and the rotation.

Shapes: T tokens, N heads (queries and keys together), d head_dim, r rotated items of a head, which
come first and are all items unless the rotation is partial. Heads are stored as two halves (the
"rotate half" convention of transformers), so rotating swaps halves.

Invariant: a token's angles depend on its position alone, never on the batch, the chunk or the
sequence's length. Keys can therefore be cached and shared.
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
    """Interpolate slow frequencies, keep fast ones, blend in between (arXiv:2309.00071, eq. 23)."""

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


def _longrope_frequencies(p: RopeSpec) -> Tensor:
    """Divide each frequency by its own factor (LongRoPE, arXiv:2402.13753)."""
    factors = torch.tensor(p.long_factor if p.is_long else p.short_factor, dtype=torch.float32)
    exponents = torch.arange(0, p.head_dim, 2, dtype=torch.float32) / p.head_dim
    return 1.0 / (factors * p.rope_theta**exponents)


def _longrope_attention_factor(p: RopeSpec) -> float:
    """Return LongRoPE's factor on cos and sin: ``sqrt(1 + log(factor) / log(original length))``."""
    if p.attention_factor is not None:
        return p.attention_factor
    original = p.original_max_position_embeddings
    assert original is not None, "described without it"
    return 1.0 if p.factor <= 1 else math.sqrt(1 + math.log(p.factor) / math.log(original))


def _llama3_frequencies(p: RopeSpec, inv_freq: Tensor, context: int) -> Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend in between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    keep = blend.clamp(0, 1)
    return (1 - keep) * inv_freq / p.factor + keep * inv_freq


def compute_frequencies(p: RopeSpec) -> tuple[Tensor, float]:
    """Return (inverse frequencies, float32 [d/2]; factor on cos and sin)."""
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
        case "longrope":
            return _longrope_frequencies(p), _longrope_attention_factor(p)
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
    """RoPE: cosines and sines of each position's angles; holds no weights.

    ``dynamic`` NTK: a token at position p beyond the trained length uses the base of a sequence of
    length p + 1. Decoding token by token gives exactly transformers' values; a prefill beyond the
    trained length differs from transformers, whose angles depend on the longest sequence of the
    batch, so that cached keys would be invalid.

    Args:
        parameters: type, base and scaling of the RoPE.
        is_half: True if ``forward`` returns the angles of half a head, as gpt-oss's attention
            needs.
    """

    def __init__(self, parameters: RopeSpec, *, is_half: bool = False) -> None:
        super().__init__()
        self.is_half = is_half
        self.rope_parameters = parameters
        self.inv_freq, self.attention_factor = compute_frequencies(parameters)

    @property
    def ropes(self) -> "tuple[Rope, ...]":
        """A tuple of this RoPE alone, as all layers of the model share it."""
        return (self,)

    def load(self, reader: WeightReader, name: str) -> None:
        """Move the frequencies to the reader's device; nothing is read."""
        del name
        self.inv_freq = self.inv_freq.to(reader.device)

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, r] of ``dtype``; both halves of r have the same angles.

        Args:
            positions: int64 [T] or [1, T].
            dtype: dtype of the result; angles are computed in float32.
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
        """Run with the interface of transformers' rotary embedding; ``x`` gives only the dtype."""
        cos, sin = self.compute(position_ids, x.dtype)
        if self.is_half:
            half = cos.shape[-1] // 2
            return cos[..., :half], sin[..., :half]
        return cos, sin


class LayeredRope(Operator):
    """Several RoPEs, one for each type of layer.

    Args:
        ropes: RoPE by its name in the configuration's ``layer_types``; the empty name is for all
            layers that rotate, in a model where others do not.
    """

    def __init__(self, ropes: dict[str, Rope]) -> None:
        super().__init__()
        for name, rope in ropes.items():
            self.add_module(name or "all", rope)
        self._ropes = ropes

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The RoPEs, in the order of the layer types that were given at construction."""
        return tuple(self._ropes.values())

    def load(self, reader: WeightReader, name: str) -> None:
        """Do nothing: the RoPEs load themselves as modules."""

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Run with the interface of transformers' rotary embedding, for one type of layer."""
        return self._ropes[layer_type](x, position_ids)


class Unrotated:
    """Angles of 0 for layers without RoPE: the rotation leaves every value unchanged.

    Args:
        size: number of items to rotate: all rotated items of latent attention, or some items of a
            head.
    """

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines of 1 and sines of 0, [T, size]."""
        cos = torch.ones(len(positions), self._size, dtype=dtype, device=positions.device)
        return cos, torch.zeros_like(cos)


def scale_positions(scale: PositionScale, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor on the queries at each position, [T], in ``dtype``."""
    count = torch.floor((positions + scale.offset) / scale.length)
    return (1 + scale.beta * torch.log(1 + count)).to(dtype)


def apply_rope_(out: Tensor, x_TNd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> None:
    """Write the rotated heads of ``x_TNd`` into ``out``, which may be ``x_TNd`` itself.

    Args:
        out: [T, N, r], any strides with a dense last dimension.
        x_TNd: [T, N, r], heads before rotation.
        cos_T1d: cosines.
        sin_T1d: sines with the first half negated, so that "rotate half" becomes a swap of halves.
    """
    swapped = torch.roll(x_TNd, x_TNd.shape[-1] // 2, -1)
    torch.mul(x_TNd, cos_T1d, out=out)
    out.addcmul_(swapped, sin_T1d)
