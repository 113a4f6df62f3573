"""Choice of a model's dtype and weight formats, with reasons: plain data out."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from tandem._native import cpu_features
from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.core.model.plan import NO_FORMAT, FormatChoice
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.kernels.devices import has_native_kernels
from tandem.kernels.weights.formats import explain_groups, fit_groups

__all__ = [
    "FormatChoices",
    "choose_dtype",
    "choose_expert_parts",
    "choose_formats",
    "set_auto_dtype",
]

PART_COLUMNS = 128
"""Columns of an expert's smallest part: the largest unsplittable block of any format."""


SMALL_MODEL_BYTES = 256 << 20
"""Largest model in float32 bytes that ``auto`` runs in float32: for small models call overhead and
float32's faster CPU kernels matter more than bytes; larger models are bound by memory bandwidth.
"""


BESIDE_CODES = "for activations and KV, as the checkpoint's matrices are codes"
"""Reason for the dtype of a model whose matrices keep the codes of the checkpoint."""

DTYPE_FORMATS = {"float32": "f32", "bfloat16": "bf16"}
"""Weight formats without loss, by the model's dtype."""


class FormatChoices(NamedTuple):
    """Weight formats, with reasons, of matrices for which no placement rule names a format."""

    experts: FormatChoice
    linear: FormatChoice
    router: FormatChoice


def choose_dtype(spec: ModelSpec, dtype: str, *, is_coded: bool = False) -> ModelSpec:
    """Return ``spec`` with the dtype in which it will run.

    Args:
        spec: the model, with the dtype of ``auto``.
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        is_coded: True if the checkpoint stores its matrices as codes.

    ``auto`` takes the spec's dtype. But if the CPU multiplies bfloat16 natively, weights stored in
    bfloat16 run in it even in a model small enough for float32: on native kernels, at three times
    the speed, and with results that do not depend on the batch.

    Raises: ConfigError for an unknown dtype.
    """
    if dtype == "auto":
        features = cpu_features()
        has_unit = features.avx512_bf16 or features.amx_bf16
        if spec.checkpoint_dtype == "bfloat16" != spec.dtype and has_unit:
            reason = "bfloat16, as the checkpoint is stored, and as this CPU multiplies it natively"
            if is_coded:
                reason = f"bfloat16 {BESIDE_CODES}, and as this CPU multiplies it natively"
            return msgspec.structs.replace(spec, dtype="bfloat16", dtype_reason=reason)
        return spec
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            "models.load", f"dtype {dtype!r}: use auto, float32 or bfloat16", field="dtype"
        )
    return msgspec.structs.replace(spec, dtype=dtype, dtype_reason=f"{dtype}, as asked for")


def set_auto_dtype(spec: ModelSpec, *, is_coded: bool) -> ModelSpec:
    """Return ``spec``, whose parameters are counted, with the machine-independent ``auto`` dtype.

    float32 can represent every float16 value, bfloat16 cannot. If the checkpoint is quantized
    (``is_coded``), only few weights are float16: too few to double the KV's size for.
    """
    size_bytes = spec.num_parameters * DTYPE_BYTES["float32"]
    if size_bytes <= SMALL_MODEL_BYTES:
        dtype = "float32"
        reason = (
            f"float32, as the whole model takes {size_bytes / 2**20:.0f} MiB in it, at most "
            f"{SMALL_MODEL_BYTES >> 20}: call overhead and float32 speed win on a CPU"
        )
    else:
        stored = spec.checkpoint_dtype
        dtype, reason = stored, f"{stored}, as the checkpoint is stored in {stored}"
        if is_coded:
            reason = f"{stored} {BESIDE_CODES}"
        if stored == "float16" and is_coded:
            dtype, reason = "bfloat16", "bfloat16, as the checkpoint is stored in codes and float16"
        elif stored == "float16":
            dtype, reason = "float32", "float32, which holds each float16 of the checkpoint's"
    return msgspec.structs.replace(spec, dtype=dtype, dtype_reason=reason)


def choose_formats(
    spec: ModelSpec,
    *,
    expert_format: str,
    linear_format: str,
    device: str,
    expert_device: str,
    linear_widths: Collection[int],
) -> FormatChoices:
    """Choose the weight formats of a model's matrices.

    Args:
        spec: the model, with the dtype in which it will run.
        expert_format: ``auto``, ``none`` (tensors of the model's dtype), or a format's name.
        linear_format: ``auto``, ``none``, or a format's name, for the other matrices.
        device: device of the model.
        expert_device: device of its routed experts.
        linear_widths: numbers of inputs of the matrices that take the format of linear modules.

    Raises:
        ConfigError: an unknown format.
        UnsupportedError: a format without kernels on the device, or one to which values are never
            quantized.
    """
    widths = (spec.hidden_size, spec.moe_intermediate_size)
    experts = _choose(spec, expert_format, expert_device, "expert_format", widths)
    if expert_format == "auto" and spec.expert_format and has_native_kernels(expert_device):
        experts = FormatChoice(
            weight_format=spec.expert_format, reason="as the checkpoint stores them"
        )
    if not spec.is_moe:
        experts = FormatChoice(weight_format=NO_FORMAT, reason="the model has no routed experts")
    linear = _choose(spec, linear_format, device, "linear_format", linear_widths)
    router = _choose(spec, NO_FORMAT if linear_format == NO_FORMAT else "auto", device, "", ())
    return FormatChoices(experts, linear, router)


def choose_expert_parts(wish: int, num_nodes: int, intermediate_size: int) -> int:
    """Return the number of parts into which routed experts are split.

    Args:
        wish: requested number; 0: one for each node.
        num_nodes: NUMA nodes that have threads.
        intermediate_size: size of an expert; a part has whole blocks of 64 or 128 of its columns.
    """
    return wish or max(1, min(num_nodes, intermediate_size // PART_COLUMNS))


def _choose(
    spec: ModelSpec, wish: str, device: str, field: str, widths: Collection[int]
) -> FormatChoice:
    name, reason = _choose_name(spec, wish, device, field, widths)
    return FormatChoice(weight_format=name, reason=reason)


def _choose_name(
    spec: ModelSpec, wish: str, device: str, field: str, widths: Collection[int]
) -> tuple[str, str]:
    if wish == NO_FORMAT:
        return NO_FORMAT, f"{spec.dtype} tensors, as asked for"
    if wish != "auto":
        try:
            weight_format = fit_groups(wish, widths)
        except NotFoundError as error:
            raise ConfigError(
                "models.choose_formats",
                f"{field}: {error.what}, auto or none",
                field=f"model.{field}",
            ) from error
        if weight_format.is_stored_only:
            raise UnsupportedError(
                "models.choose_formats",
                f"{field} {wish}: it holds blocks of GGUF files as they are, and values are not "
                "coded so: use auto, which keeps a file's codes, or another format",
                field=f"model.{field}",
            )
        if not has_native_kernels(device):
            raise UnsupportedError(
                "models.choose_formats",
                f"{field} {wish}: formats have kernels on the CPU only, not on {device}",
            )
        why = explain_groups(wish, weight_format, widths)
        return weight_format.name, f"as asked for, in {why}" if why else "as asked for"
    if not has_native_kernels(device):
        reason = f"{spec.dtype} tensors: native kernels run on the CPU, the model on {device}"
        return NO_FORMAT, reason
    return DTYPE_FORMATS[spec.dtype], "the model's own dtype, on native kernels"
