"""In which dtype and weight format a model runs, and why: plain data out."""

from dataclasses import dataclass

import msgspec

from tandem._native import cpu_features
from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.kernels.formats import WeightFormat, find_format
from tandem.kernels.native_experts import count_bytes

__all__ = ["ExpertPlan", "choose_dtype", "plan_experts"]


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """How the routed experts of a model are stored and run."""

    weight_format: WeightFormat | None
    """None: as tensors of the model's dtype, run by torch; also for a model without experts."""
    reason: str
    size_bytes: int
    """All routed experts of the model, as stored here."""
    plain_bytes: int
    """The same in the model's dtype."""

    @property
    def name(self) -> str:
        """The format's name; empty where torch runs the experts."""
        return "" if self.weight_format is None else self.weight_format.name


def choose_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """Return ``spec`` with the dtype that it will run in.

    ``auto`` is what the spec says, but where the CPU multiplies bfloat16 natively, experts stored
    in it run in it even in a model small enough for float32: half the bytes, twice the speed.

    Raises: ConfigError for an unknown dtype.
    """
    if dtype == "auto":
        features = cpu_features()
        has_unit = features.avx512_bf16 or features.amx_bf16
        if spec.is_moe and spec.checkpoint_dtype == "bfloat16" != spec.dtype and has_unit:
            reason = "bfloat16, as the checkpoint is stored, and as this CPU multiplies it natively"
            return msgspec.structs.replace(spec, dtype="bfloat16", dtype_reason=reason)
        return spec
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            "models.load", f"dtype {dtype!r}: use auto, float32 or bfloat16", field="dtype"
        )
    return msgspec.structs.replace(spec, dtype=dtype, dtype_reason=f"{dtype}, as asked for")


def plan_experts(spec: ModelSpec, wish: str, device: str) -> ExpertPlan:
    """Choose the format of the routed experts.

    Args:
        spec: with the dtype that the model will run in.
        wish: ``auto``, ``none`` (tensors of the model's dtype), or a format's name.
        device: where the experts run.

    Raises:
        ConfigError: an unknown format.
        UnsupportedError: a format that has no kernels on this device.
        ShapeError: the model's sizes are not whole groups of the format.
    """
    sizes = (spec.num_experts, spec.hidden_size, spec.moe_intermediate_size)
    weights = 3 * spec.num_experts * spec.hidden_size * spec.moe_intermediate_size
    plain = spec.num_moe_layers * weights * DTYPE_BYTES[spec.dtype]
    weight_format, reason = _choose(spec, wish, device)
    if weight_format is None or not spec.is_moe:
        return ExpertPlan(None, reason, plain, plain)
    packed = spec.num_moe_layers * count_bytes(weight_format, *sizes)
    return ExpertPlan(weight_format, reason, packed, plain)


def _choose(spec: ModelSpec, wish: str, device: str) -> tuple[WeightFormat | None, str]:
    if wish == "none":
        return None, f"{spec.dtype} tensors, as asked for"
    if wish != "auto":
        try:
            weight_format = find_format(wish)
        except NotFoundError as error:
            raise ConfigError(
                "models.plan_experts",
                f"expert_format: {error.what}, auto or none",
                field="model.expert_format",
            ) from error
        if device != "cpu":
            raise UnsupportedError(
                "models.plan_experts",
                f"expert_format {wish}: formats have kernels on the CPU only, not on {device}",
            )
        return weight_format, "as asked for"
    if not spec.is_moe:
        return None, "the model has no routed experts"
    if device != "cpu":
        return None, f"{spec.dtype} tensors: native kernels run on the CPU, the model on {device}"
    if spec.dtype == "bfloat16":
        return find_format("bf16"), "the model's own dtype, on native kernels"
    return None, f"{spec.dtype} tensors: native kernels have no format of this dtype"
