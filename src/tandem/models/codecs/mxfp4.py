"""Codec of OCP microscaling 4-bit floats (mxfp4), as gpt-oss checkpoints store their experts.

``{name}_blocks``, uint8 [E, N, K / 32, 16], and ``{name}_scales``, uint8 [E, N, K / 32];
transformers' model has these experts with inputs first, [E, K, N].
"""

import torch
from torch import Tensor

from tandem.core.errors import ShapeError
from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat, find_format
from tandem.models.sources.source import StoredTensors

__all__ = ["E2M1", "Mxfp4Codec", "decode_mxfp4", "pack_mxfp4", "unpack_nibbles"]

BYTES = {"U8": torch.uint8}

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a weight."""

GROUP_SIZE = 32
"""Number of consecutive inputs that share a scale."""

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Values of the positive 4-bit float codes."""

HALVES = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5], dtype=torch.uint8)
"""4-bit codes of half of each positive float value, rounded to even where half is not a value; half
of 1.5 is 0.75, which becomes 1.
"""


class Mxfp4Codec:
    """Codec of routed experts that are stored in mxfp4 blocks, as in gpt-oss."""

    is_exact: bool = True

    def holds(self, stored: StoredTensors, name: str) -> bool:
        """Return True if the checkpoint has ``name`` as mxfp4: as blocks of codes, under its own
        suffix.
        """
        return f"{name}{BLOCKS}" in stored.entries

    def list_weights(self, stored: StoredTensors) -> dict[str, tuple[int, ...]]:
        """Return all weights in this format, with the shapes of their values."""
        shapes = {
            name.removesuffix(BLOCKS): entry.shape
            for name, entry in stored.entries.items()
            if name.endswith(BLOCKS) and len(entry.shape) == 4
        }
        return {n: (e, groups * GROUP_SIZE, rows) for n, (e, rows, groups, _) in shapes.items()}

    def tell(self, name: str) -> str:
        """Return a text for users that says how an expert's weight is coded."""
        del name
        return "mxfp4"

    def read_into(self, stored: StoredTensors, name: str, out: Tensor) -> None:
        """Decode experts [E, K, N] into ``out``, exactly in float32 and bfloat16."""
        count, inputs, outputs = out.shape
        blocks, scales = self._view(stored, name, (count, outputs, inputs // GROUP_SIZE))
        # Experts are decoded one at a time, because float32 values take eight times the memory of
        # the stored codes.
        for out_KN, codes, exponents in zip(out, blocks, scales, strict=True):
            out_KN.copy_(decode_mxfp4(codes, exponents).t())

    def find_format(self, stored: StoredTensors, name: str) -> WeightFormat | None:
        """Return the weight format ``mxfp4``, which holds the codes of all these experts
        unchanged.
        """
        del stored, name
        return find_format("mxfp4")

    def read_packed(
        self, stored: StoredTensors, name: str, expert_id: int | None
    ) -> QuantizedMatrix:
        """Return the codes [N, K] of one expert.

        Raises: ShapeError (``expert_id`` is None).
        """
        shape = stored.entries[f"{name}{BLOCKS}"].shape
        blocks, exponents = self._view(stored, name, shape[:3])
        if expert_id is None or len(shape) != 4:
            what = f"tensor {name!r} is experts of shape {list(shape)}: name one of them"
            raise ShapeError("models.read_weights", what)
        return pack_mxfp4(blocks[expert_id], exponents[expert_id])

    def _view(
        self, stored: StoredTensors, name: str, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return blocks [..., G, 16] and exponents [..., G] of a weight."""
        blocks = stored.view(f"{name}{BLOCKS}", BYTES, (*shape, GROUP_SIZE // 2))
        return blocks, stored.view(f"{name}{SCALES}", BYTES, shape)


def pack_mxfp4(blocks: Tensor, exponents: Tensor) -> QuantizedMatrix:
    """Return the codes of blocks [N, G, 16] with exponents [N, G] as mxfp4."""
    codes = unpack_nibbles(blocks)
    tiny = exponents == 0
    if tiny.any():
        # The kernels' scales cannot represent 2^-127, so the scale becomes 2^-126 and the codes are
        # halved.
        halves = codes[tiny]
        codes[tiny] = HALVES[(halves & 7).int()] | (halves & 8)
        exponents = exponents.clamp(min=1)
    scales = _make_scales(exponents)
    packed = codes.flatten(1).contiguous()
    return QuantizedMatrix(find_format("mxfp4"), packed.numpy(), scales.numpy(), None)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the codes of bytes with two codes each, the low half first; [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 weights [N, K] of OCP microscaling blocks.

    Args:
        blocks: uint8 [N, K / 32, 16]; byte i holds input 2 i in its low half, 2 i + 1 in its high
            half.
        exponents: uint8 [N, K / 32] in e8m0: 127 is a scale of 1, 255 is NaN.
    """
    codes = unpack_nibbles(blocks).int()
    values = torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])
    return (values * _make_scales(exponents)[..., None]).flatten(1)


def _make_scales(exponents: Tensor) -> Tensor:
    """Return powers of two as floats, built from bits since torch's powers need not be exact."""
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22
    bits[exponents == 255] = 0x7FC0_0000
    return bits.view(torch.float32)
