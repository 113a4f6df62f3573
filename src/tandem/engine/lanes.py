"""The plan for routed experts in host memory beside a GPU: how many are uploaded to it per step,
kept in its memory, or streamed through it.

A GPU's speed is not measured yet, so the plan uses that of a known machine. Decodes measure their
own speeds from the first step on.
"""

from math import prod

import msgspec

from tandem.core.errors import ConfigError
from tandem.core.model.layers import ExpertsSpec
from tandem.core.model.plan import ModelPlan
from tandem.kernels.calibration import find_kept
from tandem.kernels.device import Device
from tandem.kernels.lanes.loads import count_loaded
from tandem.models.config import ModelConfig
from tandem.models.loading.expert_disk import list_expert_sizes
from tandem.placement.catalog import find_hardware
from tandem.placement.experts.lanes import LaneSplit
from tandem.placement.experts.streaming import find_stream_tokens
from tandem.placement.fitting import read_efficiencies
from tandem.placement.served import place_served
from tandem.placement.shape import ModelShape

__all__ = ["LanePlan", "count_slot_bytes", "plan_lanes"]

MIB = 1 << 20
KNOWN_MACHINE = "xeon6430-4090"
"""Machine of the catalog whose GPU and link stand for those of a machine that was not measured."""


class LanePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The division of the routed experts' work between the CPU (host) and the GPU (device)."""

    max_uploads: int
    """Largest number of experts per layer that a decode step uploads."""
    upload_reason: str
    num_slots: int
    """Number of experts per layer that stay in the device's memory."""
    slot_bytes: int
    """Bytes of device memory for the ``num_slots`` experts of all layers, and for uploads that do
    not stay."""
    policy: str
    """Name in ``EXPERT_POLICIES`` of the policy that decides which experts stay."""
    stream_tokens: int
    """Number of tokens in a step from which all its experts are streamed to the device; 0:
    never."""
    stream_reason: str
    host_s: float
    """Assumed seconds to compute an expert on the host, until it is measured."""
    upload_s: float
    """Assumed seconds to upload an expert, until it is measured."""

    def make_split(self) -> LaneSplit | None:
        """Return an object that divides a step's experts between device and host; None if all are
        computed on the host.
        """
        return LaneSplit(self.host_s, self.upload_s) if self.max_uploads else None

    def tell(self) -> list[tuple[str, str, str]]:
        """Return rows (item, value, reason) about this division, for the printed plan."""
        uploads = f"up to {self.max_uploads} a layer" if self.max_uploads else "none"
        streamed = f"from {self.stream_tokens} tokens on" if self.stream_tokens else "never"
        kept = "none"
        if self.num_slots:
            kept = f"{self.num_slots} a layer, {self.slot_bytes / MIB:,.0f} MiB, by {self.policy}"
        return [
            ("uploaded experts", uploads, self.upload_reason),
            ("experts on the device", kept, "model.device_experts"),
            ("streamed experts", streamed, self.stream_reason),
        ]


def count_slot_bytes(config: ModelConfig, model: ModelPlan, device: Device) -> int:
    """Return the bytes of device memory for the routed experts that stay there, and for uploads of
    others that are used once.

    Args:
        config: settings, with the number of experts.
        model: plan of the model.
        device: device that computes everything but routed experts.

    Raises: ConfigError (experts cannot be kept on this device, with this model or these settings).
    """
    if not config.device_experts:
        return 0
    is_shared = not device.is_host and model.expert_device == "cpu"
    is_in_one_piece = model.tier is None and model.expert_parts == 1
    if _scales_inputs(model):
        what = "experts whose inputs the router scales do not go to a device: leave it out"
        raise ConfigError("engine.plan", what, field="model.device_experts")
    if not is_shared or not config.max_uploads or list_expert_sizes(model) is None:
        what = "experts stay on a device that they are uploaded to: give model.device cuda, with "
        what += "routed experts on the cpu, in a weight format, and model.max_uploads of 1 at least"
        raise ConfigError("engine.plan", what, field="model.device_experts")
    if not is_in_one_piece:
        what = "experts on a disk, or in parts on NUMA nodes, do not go to a device: leave it out, "
        what += "give more memory, or model.expert_parts 1"
        raise ConfigError("engine.plan", what, field="model.device_experts")
    total = 0
    for matrix in model.matrices:
        if matrix.role != "experts":
            continue
        num_experts = matrix.shape[0]
        each = count_loaded(
            device,
            prod(matrix.shape[1:]),
            matrix.size_bytes // num_experts,
            is_float=matrix.weight_format == "f32",
        )
        total += (min(config.device_experts, num_experts) + config.max_uploads) * each
    return total


def _scales_inputs(model: ModelPlan) -> bool:
    """Return True if the router's weights scale the experts' inputs and not their outputs."""
    return any(isinstance(m.spec, ExpertsSpec) and m.spec.scales_input for m in model.modules)


def plan_lanes(
    config: ModelConfig, model: ModelPlan, shape: ModelShape, *, slot_bytes: int = 0
) -> LanePlan | None:
    """Return the division of the routed experts' work; None if host and device do not share it.

    Args:
        config: settings.
        model: plan of the model.
        shape: sizes of the model.
        slot_bytes: result of ``count_slot_bytes``.
    """
    sizes = list_expert_sizes(model)
    is_shared = model.device != "cpu" and model.expert_device == "cpu"
    if not is_shared or sizes is None or model.tier is not None:
        return None
    known, kept = find_hardware(KNOWN_MACHINE), find_kept()
    eff = read_efficiencies() if kept is None else kept.efficiencies
    assert known.accelerator is not None, KNOWN_MACHINE
    spec = known
    if kept is not None:
        spec = msgspec.structs.replace(
            kept.hardware, accelerator=known.accelerator, num_accelerators=1
        )
    place = msgspec.structs.replace(
        place_served(model, chunk_tokens=1),
        is_dense_on_gpu=True,
        is_attention_on_gpu=True,
        accelerators=1,
    )
    tokens, reason = config.stream_tokens, "model.stream_tokens"
    if tokens == "auto":
        tokens = find_stream_tokens(spec, shape, place, eff)
        reason = f"where it is predicted to be faster, with the GPU of {known.title}"
    max_uploads, upload_reason = config.max_uploads, "model.max_uploads"
    if _scales_inputs(model):
        max_uploads, upload_reason = 0, "the router scales the experts' inputs"
    elif max_uploads:
        upload_reason += "; how many is learnt while both run"
    return LanePlan(
        max_uploads=max_uploads,
        upload_reason=upload_reason,
        num_slots=min(config.device_experts, sizes.num_experts),
        slot_bytes=slot_bytes,
        policy=config.expert_policy,
        stream_tokens=tokens,
        stream_reason=reason,
        host_s=sizes.expert_bytes / (spec.cpu_bandwidth_gbps * 1e9 * eff.cpu_bandwidth),
        upload_s=sizes.expert_bytes / (known.accelerator.host_link_gbps * 1e9 * eff.link),
    )
