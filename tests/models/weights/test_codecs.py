"""Goal: codes that a source gives packed stand for the values that it gives decoded."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tandem.core.errors import ShapeError, UnsupportedError
from tandem.kernels.weights.formats import dequantize
from tandem.models.planning.quantization import read_quantization
from tandem.models.sources.containers import open_source

MXFP4 = read_quantization({"quantization_config": {"quant_method": "mxfp4"}})


def test_the_smallest_scale_of_mxfp4_is_doubled(tmp_path):
    """Our kernels' smallest scale is 2^-126; codes of half the value are at most a tie off."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    blocks = (codes[0::2] | codes[1::2] << 4).view(1, 1, 1, 16)
    tensors = {"w_blocks": blocks, "w_scales": torch.zeros(1, 1, 1, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_source(tmp_path, quantization=MXFP4) as source:
        decoded = torch.empty(1, 32, 1)
        source.read_into("w", decoded)
        ours = dequantize(source.read_packed("w", 0))
    assert np.abs(ours - decoded[0].t().numpy()).max() <= 0.25 * 2.0**-126
    assert np.signbit(ours[0, 8:16]).all()


def test_packed_mxfp4_is_what_is_decoded(tmp_path):
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 5, 2), dtype=torch.uint8, generator=generator)
    tensors = {"w_blocks": blocks, "w_scales": scales, "plain": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_source(tmp_path, quantization=MXFP4) as source:
        found = source.find_format("w")
        assert found is not None
        assert found.name == "mxfp4"
        decoded = torch.empty(3, 64, 5)
        source.read_into("w", decoded)
        for expert_id in range(3):
            packed = source.read_packed("w", expert_id)
            assert np.array_equal(dequantize(packed), decoded[expert_id].t().numpy())
        with pytest.raises(ShapeError, match="name one"):
            source.read_packed("w")
        assert source.find_format("plain") is None
        with pytest.raises(UnsupportedError, match="plain"):
            source.read_packed("plain")
