"""In which dtype and weight format a model runs, and why: plain data out."""

from dataclasses import dataclass

import msgspec

from tandem._native import cpu_features
from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.kernels.cpu.linear import count_bytes
from tandem.kernels.formats import WeightFormat, find_format

__all__ = [
    "NO_FORMAT",
    "FormatPlan",
    "WeightPlan",
    "choose_dtype",
    "choose_expert_parts",
    "plan_weights",
]

PART_COLUMNS = 128
"""Columns of an expert's smallest part: of all formats the largest block that cannot be split."""

NO_FORMAT = "none"
"""The wish for tensors of the model's dtype."""


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """How some matrices of a model are stored and run."""

    weight_format: WeightFormat | None
    """None: as tensors of the model's dtype, run by torch."""
    reason: str
    size_bytes: int
    """All of these matrices, as stored here."""
    plain_bytes: int
    """The same in the model's dtype."""

    @property
    def name(self) -> str:
        """The format's name, or ``none``."""
        return NO_FORMAT if self.weight_format is None else self.weight_format.name


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How the weights of a model are stored and run where no rule says otherwise."""

    experts: FormatPlan
    """The routed experts."""
    linear: FormatPlan
    """Attention's projections, dense MLPs and the head."""
    router: FormatPlan
    """The routers' scores, in a format that loses nothing."""
    size_bytes: int
    """All weights of the model, as stored here."""

    @property
    def is_native(self) -> bool:
        """Whether native kernels run every matrix."""
        plans = (self.experts, self.linear, self.router)
        return all(plan.weight_format is not None or not plan.plain_bytes for plan in plans)


def choose_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """Return ``spec`` with the dtype that it will run in.

    ``auto`` is what the spec says, but where the CPU multiplies bfloat16 natively, weights stored
    in it run in it even in a model small enough for float32: on native kernels, at three times the
    speed, and with results that do not depend on the batch.

    Raises: ConfigError for an unknown dtype.
    """
    if dtype == "auto":
        features = cpu_features()
        has_unit = features.avx512_bf16 or features.amx_bf16
        if spec.checkpoint_dtype == "bfloat16" != spec.dtype and has_unit:
            reason = "bfloat16, as the checkpoint is stored, and as this CPU multiplies it natively"
            return msgspec.structs.replace(spec, dtype="bfloat16", dtype_reason=reason)
        return spec
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            "models.load", f"dtype {dtype!r}: use auto, float32 or bfloat16", field="dtype"
        )
    return msgspec.structs.replace(spec, dtype=dtype, dtype_reason=f"{dtype}, as asked for")


def plan_weights(
    spec: ModelSpec, *, expert_format: str, linear_format: str, device: str
) -> WeightPlan:
    """Choose the formats of a model's matrices.

    Args:
        spec: with the dtype that the model will run in.
        expert_format: ``auto``, ``none`` (tensors of the model's dtype), or a format's name.
        linear_format: the same.
        device: where the model runs.

    Raises:
        ConfigError: an unknown format.
        UnsupportedError: a format that has no kernels on this device.
        ShapeError: the model's sizes are not whole groups of the format.
    """
    choice, why = _choose(spec, expert_format, device, "expert_format")
    if expert_format == "auto" and spec.expert_format and device == "cpu":
        choice, why = find_format(spec.expert_format), "as the checkpoint stores them"
    if not spec.is_moe:
        choice, why = None, "the model has no routed experts"
    experts = _make_plan(choice, why, _list_experts(spec), spec)
    choice, why = _choose(spec, linear_format, device, "linear_format")
    linear = _make_plan(choice, why, _list_linears(spec), spec)
    choice, why = _choose(spec, NO_FORMAT if linear_format == NO_FORMAT else "auto", device, "")
    routers = [(spec.num_experts, spec.hidden_size, spec.num_moe_layers)]
    router = _make_plan(choice, why, routers if spec.is_moe else [], spec)
    saved = sum(plan.plain_bytes - plan.size_bytes for plan in (experts, linear, router))
    size = spec.weight_bytes - saved
    if linear.weight_format is not None and spec.tie_word_embeddings:
        # The embedding's table stays beside the packed head.
        size += spec.vocab_size * spec.hidden_size * DTYPE_BYTES[spec.dtype]
    return WeightPlan(experts, linear, router, size)


def choose_expert_parts(wish: int, num_nodes: int, intermediate_size: int) -> int:
    """Return into how many parts routed experts are split.

    Args:
        wish: as many as asked for; 0 is one for each node.
        num_nodes: NUMA nodes that have threads.
        intermediate_size: of an expert; a part has whole blocks of 64 or 128 columns of it.
    """
    return wish or max(1, min(num_nodes, intermediate_size // PART_COLUMNS))


def _list_experts(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Return (outputs, inputs, how many) of the experts' matrices."""
    inner, hidden, count = spec.moe_intermediate_size, spec.hidden_size, spec.num_experts
    count *= spec.num_moe_layers
    return [(inner, hidden, 2 * count), (hidden, inner, count)] if count else []


def _list_linears(spec: ModelSpec) -> list[tuple[int, int, int]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    dense = spec.num_layers - spec.num_moe_layers
    return [
        (q + 2 * kv, hidden, spec.num_layers),
        (hidden, q, spec.num_layers),
        (2 * inner, hidden, dense),
        (hidden, inner, dense),
        (spec.vocab_size, hidden, 1),
    ]


def _make_plan(
    weight_format: WeightFormat | None,
    reason: str,
    matrices: list[tuple[int, int, int]],
    spec: ModelSpec,
) -> FormatPlan:
    plain = sum(n * k * count for n, k, count in matrices) * DTYPE_BYTES[spec.dtype]
    if weight_format is None:
        return FormatPlan(None, reason, plain, plain)
    packed = sum(count * count_bytes(weight_format, k, n) for n, k, count in matrices if count)
    return FormatPlan(weight_format, reason, packed, plain)


def _choose(spec: ModelSpec, wish: str, device: str, field: str) -> tuple[WeightFormat | None, str]:
    if wish == NO_FORMAT:
        return None, f"{spec.dtype} tensors, as asked for"
    if wish != "auto":
        try:
            weight_format = find_format(wish)
        except NotFoundError as error:
            raise ConfigError(
                "models.plan_weights",
                f"{field}: {error.what}, auto or none",
                field=f"model.{field}",
            ) from error
        if device != "cpu":
            raise UnsupportedError(
                "models.plan_weights",
                f"{field} {wish}: formats have kernels on the CPU only, not on {device}",
            )
        return weight_format, "as asked for"
    if device != "cpu":
        return None, f"{spec.dtype} tensors: native kernels run on the CPU, the model on {device}"
    if spec.dtype == "bfloat16":
        return find_format("bf16"), "the model's own dtype, on native kernels"
    return None, f"{spec.dtype} tensors: native kernels have no format of this dtype"
