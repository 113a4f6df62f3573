"""Choice of the codec for a checkpoint, and the list of tensors that no codec needs."""

from tandem.models.codecs.awq import AwqCodec
from tandem.models.codecs.codec import Codec
from tandem.models.codecs.compressed_tensors import CompressedTensorsCodec
from tandem.models.codecs.fp4 import ModeloptCodec
from tandem.models.codecs.fp8 import Fp8Codec
from tandem.models.codecs.gptq import GptqCodec
from tandem.models.codecs.mxfp4 import Mxfp4Codec
from tandem.models.planning.quantization import Quantization

__all__ = ["UNUSED_TENSORS", "make_codec"]

UNUSED_TENSORS = {
    r"\.(input_scale|input_zero_point|input_global_scale|act_scale|input_amax)$": (
        "scales of activations: products choose a step of their own"
    ),
    r"\.([kvq]_scale|[kv]_zero_point|kv_scale|output_scale|[kv]_proj\.output_scale)$": (
        "scales of the KV cache: blocks keep scales of their own"
    ),
    r"\.g_idx$|\.weight_g_idx$": "the order of inputs, which is their own",
    r"\.qzeros$|\.weight_zero_point$": "zero points of symmetric codes: the middle",
}
"""Tensors of quantized checkpoints that no operator needs: patterns of names, with the reason."""


def make_codec(quantization: Quantization) -> Codec:
    """Return the codec that decodes the checkpoint's quantized weights, by its quantization
    method.
    """
    if quantization.method == "mxfp4":
        return Mxfp4Codec()
    kinds: dict[
        str, type[Fp8Codec | GptqCodec | AwqCodec | CompressedTensorsCodec | ModeloptCodec]
    ] = {
        "fp8": Fp8Codec,
        "gptq": GptqCodec,
        "awq": AwqCodec,
        "compressed-tensors": CompressedTensorsCodec,
        "modelopt": ModeloptCodec,
    }
    return kinds[quantization.method](quantization)
