"""Tiny checkpoints in every stored format, and the weights that they stand for.

compressed-tensors is written by its own package. GPTQ, AWQ and DeepSeek's fp8 are written here,
word by word as their formats are documented, and share no code with what reads them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Coded = tuple[dict[str, Tensor], Tensor]
"""Tensors by the last word of their names, and the float32 weights that they stand for."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def round_to_grid(
    weights: Tensor, bits: int, size: int, *, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], fp16 scales [N, G] and zero points [N, G], all unsigned."""
    groups = weights.unflatten(1, (-1, size))
    levels = 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if is_symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / levels).clamp(min=1e-4).half()
    zeros = torch.full_like(low, 2 ** (bits - 1))
    if not is_symmetric:
        zeros = (-low / scales.float()).round().clamp(0, levels)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, levels).flatten(1).int(), scales, zeros.int()


def decode_grid(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor) -> Tensor:
    return scales.float()[:, order] * (codes - zeros[:, order]).float()


def pack_words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Put each 32 / bits rows of codes [R, C] into a row of words, in the order of ``places``."""
    per_word = 32 // bits
    order = range(per_word) if places is None else places
    words = np.zeros((len(codes) // per_word, codes.shape[1]), np.uint32)
    for shift, row in enumerate(order):
        words |= codes[row::per_word].astype(np.uint32) << np.uint32(bits * shift)
    return words.view(np.int32)


def code_gptq(
    weights: Tensor, bits: int, size: int, *, is_symmetric: bool, is_v2: bool, is_ordered: bool
) -> Coded:
    inputs = weights.shape[1]
    shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    perm = shuffled if is_ordered else torch.arange(inputs)
    codes, scales, zeros = round_to_grid(weights[:, perm], bits, size, is_symmetric=is_symmetric)
    order = torch.empty(inputs, dtype=torch.int32)
    order[perm] = (torch.arange(inputs) // size).int()
    back = torch.empty_like(codes)
    back[:, perm] = codes
    stored = (zeros - (0 if is_v2 else 1)) % 2**bits
    tensors = {
        "qweight": torch.from_numpy(pack_words(back.t().numpy(), bits)),
        "qzeros": torch.from_numpy(pack_words(stored.numpy(), bits).T.copy()),
        "scales": scales.t().contiguous(),
        "g_idx": order,
    }
    return tensors, decode_grid(back, scales, zeros, order.long())


def code_awq(weights: Tensor, size: int) -> Coded:
    codes, scales, zeros = round_to_grid(weights, 4, size, is_symmetric=False)
    tensors = {
        "qweight": torch.from_numpy(pack_words(codes.numpy(), 4, AWQ_ORDER).T.copy()),
        "qzeros": torch.from_numpy(pack_words(zeros.numpy(), 4, AWQ_ORDER).T.copy()),
        "scales": scales.t().contiguous(),
    }
    return tensors, decode_grid(codes, scales, zeros, torch.arange(weights.shape[1]) // size)


def code_fp8_blocks(weights: Tensor, rows: int = 128, columns: int = 128) -> Coded:
    outputs, inputs = weights.shape
    grid = (-(-outputs // rows), -(-inputs // columns))
    scales, codes = torch.empty(grid), torch.empty_like(weights, dtype=torch.float8_e4m3fn)
    values = torch.empty_like(weights)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            # Not the largest that fits: a reader that chooses scales again is found out.
            scales[i, j] = weights[at].abs().max() / 300
            codes[at] = (weights[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, values


def code_fp8_tensor(weights: Tensor) -> Coded:
    scale = weights.abs().max() / 300
    codes = (weights / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return tensors, codes.float() * scale


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_to_e2m1(values: Tensor) -> Tensor:
    """Return the codes of the nearest floats of 4 bits, of either sign."""
    grid = torch.tensor([*E2M1, *(-x for x in E2M1)])
    return (values[..., None] - grid).abs().argmin(-1).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    return torch.tensor([*E2M1, *(-x for x in E2M1)])[codes.int()]


def code_nvfp4(weights: Tensor, *, divides: bool) -> Coded:
    """Code as NVIDIA's modelopt does, or, where the number of the tensor divides, as
    compressed-tensors."""
    groups = weights.unflatten(1, (-1, 16))
    number = weights.abs().max() / (448 * 6)
    number = (1 / number if divides else number).float()
    steps = groups.abs().amax(-1) / 6
    scales = (steps * number if divides else steps / number).to(torch.float8_e4m3fn)
    factors = scales.float() / number if divides else scales.float() * number
    codes = round_to_e2m1(groups / factors.clamp(min=1e-30)[..., None]).flatten(1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = (decode_e2m1(codes).unflatten(1, (-1, 16)) * factors[..., None]).flatten(1)
    if divides:
        parts = {"weight_packed": packed, "weight_global_scale": number.view(1)}
        return parts | {"weight_scale": scales, "input_global_scale": torch.ones(1)}, values
    parts = {"weight": packed, "weight_scale_2": number, "input_scale": torch.tensor(0.02)}
    return parts | {"weight_scale": scales}, values


def code_mxfp4(weights: Tensor) -> Coded:
    """mxfp4-pack-quantized of compressed-tensors."""
    groups = weights.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=1e-30).log2().ceil()
    codes = round_to_e2m1(groups / 2 ** exponents[..., None]).flatten(1)
    values = (decode_e2m1(codes).unflatten(1, (-1, 32)) * 2 ** exponents[..., None]).flatten(1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def code_compressed(weights: Tensor, layout: str, args: dict[str, Any]) -> Coded:
    """Code with the package itself, scales by its own observer's formula."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    size, block = args.get("group_size"), args.get("block_structure")
    if block is not None:
        outputs, inputs = weights.shape
        tiles = weights.view(outputs // block[0], block[0], inputs // block[1], block[1])
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = weights.unflatten(1, (-1, size or weights.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    if args["strategy"] == "tensor":
        low, high = low.min().view(1), high.max().view(1)
    scales, zeros = calculate_qparams(low, high, scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": weights, "weight_scale": scales}
    if not args.get("symmetric", True):
        state["weight_zero_point"] = zeros.to(torch.int8)
    tensors = compressor.compress(state, scheme)
    decoded = compressor.decompress(tensors, scheme)["weight"].float()
    return {key: tensor.contiguous() for key, tensor in tensors.items()}, decoded


def _ct(layout: str, **weights: Any) -> tuple[Callable[[Tensor], Coded], dict[str, Any]]:
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return lambda w: code_compressed(w, layout, weights), config


def _fp4(layout: str, code: Callable[[Tensor], Coded], **weights: Any):
    """As ``_ct``, coded here."""
    _, config = _ct(layout, num_bits=4, type="float", symmetric=True, **weights)
    return code, config


def _modelopt(algorithm: str, code: Callable[[Tensor], Coded]):
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*gate"]}
    return code, config


def _gptq(bits: int, size: int, *, sym: bool = True, v2: bool = False, desc_act: bool = False):
    def code(weights: Tensor) -> Coded:
        whole = weights.shape[1] if size == -1 else size
        return code_gptq(weights, bits, whole, is_symmetric=sym, is_v2=v2, is_ordered=desc_act)

    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym}
    config |= {"desc_act": desc_act, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return code, config


def _awq(size: int):
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    config |= {"version": "gemm", "modules_to_not_convert": ["gate"]}
    return lambda w: code_awq(w, size), config


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

CODERS: dict[str, tuple[Callable[[Tensor], Coded], dict[str, Any]]] = {
    "fp8 blocks": (code_fp8_blocks, FP8 | {"weight_block_size": [128, 128]}),
    "fp8 small blocks": (
        lambda w: code_fp8_blocks(w, 64, 64),
        FP8 | {"weight_block_size": [64, 64]},
    ),
    "fp8 tensor": (code_fp8_tensor, FP8 | {"activation_scheme": "static"}),
    **{
        f"ct int4 g{size} {'sym' if sym else 'asym'}": _ct(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=size,
            symmetric=sym,
        )
        for size in (32, 64, 128)
        for sym in (True, False)
    },
    "ct int8 g32": _ct("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "ct int4 channel": _ct("pack-quantized", num_bits=4, strategy="channel"),
    "ct w8a8": _ct("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "ct w8a8 asym": _ct("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct fp8 channel": _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct fp8 tensor": _ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct fp8 block": _ct(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "ct nvfp4": _fp4(
        "nvfp4-pack-quantized",
        partial(code_nvfp4, divides=True),
        strategy="tensor_group",
        group_size=16,
    ),
    "ct mxfp4": _fp4("mxfp4-pack-quantized", code_mxfp4, strategy="group", group_size=32),
    "modelopt nvfp4": _modelopt("NVFP4", partial(code_nvfp4, divides=False)),
    "modelopt fp8": _modelopt("FP8", code_fp8_tensor),
    "gptq 4 g128": _gptq(4, 128),
    "gptq 4 g32 asym": _gptq(4, 32, sym=False),
    "gptq 4 g64 v2": _gptq(4, 64, v2=True),
    "gptq 4 rows": _gptq(4, -1),
    "gptq 4 g32 act-order": _gptq(4, 32, desc_act=True),
    "gptq 8 g128": _gptq(8, 128),
    "gptq 8 g32 asym": _gptq(8, 32, sym=False),
    "gptq 8 rows": _gptq(8, -1),
    "awq g128": _awq(128),
    "awq g32": _awq(32),
}
"""A coder of one matrix [N, K], and the ``quantization_config`` that says so, by name."""

SLOW = frozenset(
    {
        "ct int4 g32 sym",
        "ct int4 g64 asym",
        "ct int4 g128 sym",
        "ct int4 g128 asym",
        "ct w8a8 asym",
        "ct fp8 block",
        "ct mxfp4",
        "modelopt fp8",
        "gptq 4 g64 v2",
        "gptq 4 rows",
        "gptq 8 g128",
        "gptq 8 rows",
        "awq g128",
        "fp8 small blocks",
    }
)
"""Kinds whose whole models run in the long tests only, as they differ from others in sizes."""


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def write_quantized(
    folder: Path, kind: str, is_coded: Callable[[str], bool] = is_linear
) -> dict[str, Tensor]:
    """Code the linear weights of a plain checkpoint in place.

    Returns: float32 tensors by their plain names: what the checkpoint stands for now.
    """
    code, config = CODERS[kind]
    path = folder / "model.safetensors"
    plain = {name: tensor.float() for name, tensor in load_file(path).items()}
    tensors: dict[str, Tensor] = {}
    for name in list(plain):
        if not is_coded(name):
            tensors[name] = plain[name]
            continue
        coded, plain[name] = code(plain[name])
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{key}": tensor for key, tensor in coded.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw))
    return plain


def write_plain(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Store values where codes were."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "float32"}))
