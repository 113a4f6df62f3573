"""Goal: a rank's part of a weight is the same numbers as that part of the whole weight.

Method: every stored kind is read whole and in parts along both axes, as values and as codes; the
parts must be bitwise what narrowing the whole gives, and parts that would cut codes apart that
share a scale must be refused. It protects the ranks of tensor parallelism, which read their own
rows and columns alone.
"""

import numpy as np
import pytest
import torch
from gguf_writing import write_model
from quantized import CODERS, SLOW, is_linear, write_quantized
from transformers import AutoModelForCausalLM, LlamaConfig

from quick import rest_slow
from tandem._native import decode_blocks
from tandem.core.errors import ShapeError
from tandem.kernels.interfaces import Shard
from tandem.kernels.weights.formats import QuantizedMatrix, dequantize
from tandem.models.families import open_checkpoint
from tandem.models.sources.containers import open_source

NAMES = [f"model.layers.0.{n}_proj.weight" for n in ("self_attn.k", "self_attn.o", "mlp.down")]
SHAPES = {NAMES[0]: (128, 256), NAMES[1]: (256, 256), NAMES[2]: (256, 512)}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GGUF_KINDS = ["F16", "Q8_0", "Q4_0", "Q5_1"]


def values_of(matrix):
    if isinstance(matrix, QuantizedMatrix):
        return dequantize(matrix)
    out = torch.empty(matrix.shape, dtype=torch.float32)
    decode_blocks(None, matrix.blocks, out)
    return out.double().numpy()


def check_parts(source, name):
    """Compare both halves along both axes; then what cannot be cut."""
    rows, columns = SHAPES[name]
    whole = torch.empty(rows, columns)
    source.read_into(name, whole)
    has_codes = source.find_format(name) is not None
    codes = values_of(source.read_packed(name)) if has_codes else None
    for axis, size in enumerate((rows, columns)):
        for start, stop in ((0, size // 2), (size // 2, size)):
            shard = Shard(axis, start, stop, size)
            part = torch.empty(whole.narrow(axis, start, stop - start).shape)
            source.read_into(name, part, shard)
            assert torch.equal(part, whole.narrow(axis, start, stop - start)), (name, shard)
            if codes is None:
                continue
            cut = slice(start, stop)
            wanted = codes[cut] if axis == 0 else codes[:, cut]
            try:
                packed = source.read_packed(name, None, shard)
            except ShapeError as error:
                # Blocks of fp8 that half of a small matrix is not.
                assert "share a scale" in str(error)
                assert size // 2 % 128
                continue
            np.testing.assert_array_equal(values_of(packed), wanted, err_msg=f"{name} {shard}")
    with pytest.raises(ShapeError):
        source.read_into(name, torch.empty(rows // 2, columns), Shard(0, 0, rows // 2, rows + 1))
    with pytest.raises(ShapeError):
        source.read_into(name, torch.empty(rows // 2, columns), Shard(0, 0, rows, rows))


@pytest.mark.parametrize(
    "kind", rest_slow(["values", *(k for k in CODERS if k not in SLOW)], ["values", *CODERS])
)
def test_parts_of_safetensors(kind, checkpoint):
    folder = checkpoint("llama", **SIZES)
    if kind != "values":
        write_quantized(folder, kind, is_linear)
    with open_source(folder, quantization=open_checkpoint(folder).quantization) as source:
        for name in NAMES:
            check_parts(source, name)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_parts_of_gguf(kind, tmp_path):
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=96, eos_token_id=2, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    write_model(model, tmp_path / "m.gguf", kind)
    with open_source(tmp_path / "m.gguf") as source:
        for name in NAMES:
            check_parts(source, name)


def test_a_cut_through_a_group_is_refused(checkpoint):
    folder = checkpoint("llama", **SIZES)
    write_quantized(folder, "gptq 4 g128", is_linear)
    with open_source(folder, quantization=open_checkpoint(folder).quantization) as source:
        with pytest.raises(ShapeError, match="cut groups of 128"):
            source.read_packed(NAMES[2], None, Shard(1, 0, 64, 512))
        with pytest.raises(ShapeError, match="not 640 along axis 1"):
            source.read_packed(NAMES[2], None, Shard(1, 0, 128, 640))


@pytest.mark.parametrize(
    "bounds", [(0, 0, 0, 4), (0, 2, 1, 4), (0, -1, 2, 4), (0, 0, 5, 4), (-1, 0, 1, 4)]
)
def test_parts_that_are_none_are_refused(bounds):
    with pytest.raises(ShapeError):
        Shard(*bounds)
