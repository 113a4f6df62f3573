"""Goal: the bytes of a GGUF block mean here what they mean to llama.cpp, as values and as codes.

Method: blocks of random bytes, which are valid in every type, decoded by the ``gguf`` package and
here: bitwise equal. Codes in our formats must stand for the same values: exactly, but for scales
that are products in the file and fp16 with us, whose rounding is the bound.
"""

import base64
import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from tandem.core.errors import UnsupportedError
from tandem.kernels.weights.formats import dequantize as dequantize_codes
from tandem.kernels.weights.recode import can_represent, join_formats, recode
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES, dequantize, unpack
from tandem.models.sources.gguf_header import BLOCK_SIZES, TYPE_IDS

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")
FP16_ROUNDING = 2.0**-11
FP16_STEP = 2.0**-24
"""Of subnormal numbers."""


def draw_blocks(kind: str, count: int, *, seed: int = 0) -> np.ndarray:
    """Random bytes, uint8 [count, bytes]."""
    size = BLOCK_SIZES[kind][1]
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
} | dict.fromkeys(
    ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    (0,),
)
"""Where a block has its fp16 numbers."""


def draw_sane(kind: str, count: int) -> np.ndarray:
    """Blocks whose fp16 numbers are finite, and far enough from the ends for products of them."""
    raw = draw_blocks(kind, count)
    for at in HALVES[kind]:
        raw[:, at + 1] = 0x20 | (raw[:, at + 1] & 0x87)  # exponents from 2^-7 to 2^-6
    if kind == "MXFP4":
        raw[:, 0] = raw[:, 0] % 200 + 10
    if kind == "NVFP4":
        raw[:, :4] %= 0x7F
    return raw


def test_types_and_sizes_are_those_of_the_package():
    """Numbers of types and sizes of blocks are as llama.cpp writes them."""
    theirs = {
        kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
    }
    ours = {name: (TYPE_IDS[name], *BLOCK_SIZES[name]) for name in BLOCK_SIZES}
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_bitwise_those_of_the_package(kind):
    """Any bytes, NaN and infinities among the scales included."""
    raw = draw_blocks(kind, 3000)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    ours = dequantize(kind, raw)
    is_nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), is_nan)
    assert np.array_equal(ours.view(np.uint32)[~is_nan], theirs.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_codes_stand_for_the_values(kind):
    """In its plain format a weight is what it was, or off by the rounding of its numbers."""
    raw = draw_sane(kind, 600)
    codes = unpack(kind, raw.reshape(100, 6, -1))
    ours, theirs = dequantize_codes(codes), dequantize(kind, raw).reshape(codes.codes.shape)
    if kind in EXACT:
        assert np.array_equal(ours, theirs.astype(np.float64))
        return
    groups = ours.reshape(len(ours), codes.scales.shape[1], -1)
    scales = np.abs(codes.scales.astype(np.float64))[..., None]
    books = {"IQ2_XXS": 43, "IQ2_XS": 43, "IQ2_S": 43, "IQ3_XXS": 62, "IQ3_S": 15}
    others = {"Q2_K": 3, "Q3_K": 4, "Q4_K": 15, "Q5_K": 31, "Q6_K": 32, "IQ4_XS": 127}
    largest = (books | others)[kind]
    minima = 0.0 if codes.minima is None else np.abs(codes.minima.astype(np.float64))[..., None]
    error = np.abs(groups - theirs.reshape(groups.shape))
    bound = (largest * scales + minima) * FP16_ROUNDING * 1.01 + (largest + 1) * FP16_STEP
    assert (error <= bound).all()
    assert error.max() > 0, "not a rounding of products"


def test_smallest_and_zero_blocks_of_mxfp4_keep_their_codes():
    """An exponent of 0, as of a block of zeros, is none of our kernels': codes are halved."""
    raw = draw_blocks("MXFP4", 8)
    raw[:, 0] = 0
    raw[0, 1:] = 0
    codes = unpack("MXFP4", raw.reshape(2, 4, -1))
    values = dequantize("MXFP4", raw).reshape(2, -1)
    assert (codes.scales == 2.0**-126).all()
    assert np.abs(dequantize_codes(codes) - values).max() <= 2.0**-128
    assert (dequantize_codes(codes)[0, :32] == 0).all()


def test_other_types_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"IQ1_S.*Q4_K"):
        unpack("IQ1_S", draw_blocks("IQ1_S", 4).reshape(2, 2, -1))


@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q5_1", "Q6_K"), ("Q5_0", "Q6_K")]
)
def test_parts_of_one_product_share_a_format(kinds):
    """The joined format has the weights of both, bit by bit."""
    matrices = [unpack(kind, draw_sane(kind, 64).reshape(8, 8, -1)) for kind in kinds]
    wide = join_formats([matrix.weight_format for matrix in matrices])
    assert wide is not None
    for matrix in matrices:
        assert can_represent(wide, matrix.weight_format)
        assert np.array_equal(dequantize_codes(recode(matrix, wide)), dequantize_codes(matrix))


def test_formats_that_nothing_holds_have_no_join():
    """Small floats beside integers are decoded."""
    kinds = [
        unpack(kind, draw_sane(kind, 8).reshape(8, 1, -1)).weight_format
        for kind in ("MXFP4", "Q8_0")
    ]
    assert join_formats(kinds) is None
    assert join_formats([kinds[0], None]) is None
    assert join_formats([]) is None


FIXTURES = json.loads((Path(__file__).parents[1] / "fixtures" / "gguf_blocks.json").read_text())
"""Made by llama.cpp; see the script beside them."""

LARGEST_ERROR = {
    "Q4_0": 0.10,
    "Q4_1": 0.08,
    "Q4_K": 0.075,
    "IQ4_NL": 0.08,
    "MXFP4": 0.13,
    "Q5_0": 0.05,
    "Q5_1": 0.04,
    "Q5_K": 0.04,
    "Q6_K": 0.02,
    "Q8_0": 0.006,
}
"""Of Gaussian weights, as a norm relative to theirs: half a step or less of each type."""


@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_what_llama_cpp_quantizes_is_decoded_as_it_decodes(kind):
    """Its own quantizer, K types and IQ4_NL included; decoded floats are equal bit by bit."""
    fixture = FIXTURES[kind]
    raw = np.frombuffer(base64.b64decode(fixture["blocks"]), np.uint8)
    blocks = raw.reshape(-1, BLOCK_SIZES[kind][1])
    values = dequantize(kind, blocks)
    assert hashlib.sha256(values.tobytes()).hexdigest() == fixture["decoded_sha256"]
    weights = np.random.default_rng(0).normal(size=FIXTURES["shape"]).astype(np.float32)
    rows = blocks.reshape(len(weights), -1, blocks.shape[1])
    for decoded in (values.reshape(weights.shape), dequantize_codes(unpack(kind, rows))):
        error = np.linalg.norm(decoded - weights) / np.linalg.norm(weights)
        assert error < LARGEST_ERROR[kind]
        assert error > LARGEST_ERROR[kind] / 3, "too good: not this type's codes"
