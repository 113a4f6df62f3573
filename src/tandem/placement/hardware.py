"""Description of a machine's hardware for planning: sizes, rates and prices, in plain numbers.

Rates are peaks, as makers state them; the cost model knows what share of them is reached. GB/s and
TFLOPS are decimal, memory is in GiB, prices are in US dollars.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["OPS_PER_CYCLE", "Accelerator", "HardwareSpec", "Isa", "Processor"]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Isa = Literal["avx2", "avx512", "amx", "neon"]

OPS_PER_CYCLE: dict[Isa, tuple[int, int]] = {
    "avx2": (32, 64),
    "avx512": (128, 256),
    "amx": (1024, 2048),
    "neon": (32, 128),
}
"""Operations of one core per cycle, for bf16 (AVX2, NEON: float32) and int8; a multiply-add counts
as two. NEON's are those of four units of 128 bits with products of bytes.

AVX-512 and AMX are as in the KTransformers talk: 256 and 2048 with int8, half as many with bf16.
"""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU's sizes, rates and price."""

    title: Text
    memory_gib: Positive
    bandwidth_gbps: Positive
    """Bandwidth of its memory in GB/s."""
    bf16_tflops: Positive
    """Dense bf16 TFLOPS, with float32 sums."""
    fp8_tflops: NonNegative = 0
    """Dense fp8 TFLOPS; 0: the GPU has no fp8."""
    host_link_gbps: Positive
    """GB/s from the host's memory, one direction."""
    peer_link_gbps: Positive
    """GB/s to the machine's other GPUs, one direction."""
    price_usd: NonNegative
    price_source: Text
    source: Text


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A processor in one socket: sizes, rates and price."""

    title: Text
    cores: Annotated[int, Meta(ge=1)]
    """Physical cores, not hardware threads."""
    ghz: Positive
    """Clock under load of all cores; the base clock if nothing better is known."""
    isa: Isa
    """Widest instruction set for matrix products."""
    bandwidth_gbps: Positive
    """Bandwidth of the socket's memory in GB/s."""
    bf16_tflops: NonNegative = 0
    """Measured bf16 TFLOPS; 0: computed from cores, clock and instruction set."""
    int8_tops: NonNegative = 0
    """Measured int8 TOPS; 0: computed from cores, clock and instruction set."""
    sustained_tflops: NonNegative = 0
    """Sustained bf16 TFLOPS that a source states for kernels; used for price comparisons if
    given.
    """
    price_usd: NonNegative
    price_source: Text
    source: Text


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine as planning needs it: processors, memory, GPUs, and what of them may be used."""

    name: Text
    title: Text
    processor: Processor | None = None
    """The machine's processor; None: only the accelerator is compared, as in the talk."""
    sockets: Annotated[int, Meta(ge=1)] = 1
    cores_used: Annotated[int, Meta(ge=0)] = 0
    """Cores that may be used, such as a rented share of the machine; 0: all."""
    memory_gib: NonNegative = 0
    """DRAM of the whole machine, in GiB."""
    accelerator: Accelerator | None = None
    num_accelerators: Annotated[int, Meta(ge=0)] = 0
    is_unified: bool = False
    """True if the GPU uses the processor's memory: ``memory_gib`` is all there is, and the GPU's
    own ``memory_gib`` is the part of it that the GPU may use."""
    dram_usd_per_gib: NonNegative = 5
    """Price of server DRAM per GiB; `price_source` tells its origin."""
    price_source: str = "DRAM at $5 a GiB, the middle of 2024 and 2025's retail prices"
    source: Text

    @property
    def cores(self) -> int:
        """Cores that the model may use, of all sockets."""
        if self.processor is None:
            return 0
        whole = self.processor.cores * self.sockets
        return min(whole, self.cores_used) if self.cores_used else whole

    @property
    def share(self) -> float:
        """Share of the cores of all sockets that the model may use."""
        return self.cores / (self.processor.cores * self.sockets) if self.processor else 0.0

    @property
    def cpu_bandwidth_gbps(self) -> float:
        """Peak bandwidth of all sockets' memory together, in GB/s.

        A share of the cores reaches more than its share of the bandwidth: half of a socket's cores
        are assumed to saturate it.
        """
        if self.processor is None:
            return 0.0
        return self.processor.bandwidth_gbps * self.sockets * min(1.0, 2 * self.share)

    @property
    def accelerator_memory_bytes(self) -> int:
        """Memory of all GPUs together, in bytes."""
        if self.accelerator is None:
            return 0
        return round(self.accelerator.memory_gib * self.num_accelerators * (1 << 30))

    @property
    def memory_bytes(self) -> int:
        """DRAM of the machine, in bytes."""
        return round(self.memory_gib * (1 << 30))

    @property
    def price_usd(self) -> float:
        """Price of processors, DRAM and GPUs; board, case and power are not included."""
        price = self.memory_gib * self.dram_usd_per_gib
        if self.processor is not None:
            price += self.processor.price_usd * self.sockets
        if self.accelerator is not None:
            price += self.accelerator.price_usd * self.num_accelerators
        return price

    def cpu_tflops(self, *, is_int8: bool, isa: Isa | None = None) -> float:
        """Return the peak TFLOPS of the cores that may be used.

        Args:
            is_int8: True for products of int8, False for bf16.
            isa: a narrower instruction set than the widest; None: the widest.
        """
        if self.processor is None:
            return 0.0
        measured = self.processor.int8_tops if is_int8 else self.processor.bf16_tflops
        if measured and isa in (None, self.processor.isa):
            return measured * self.sockets * self.share
        ops = OPS_PER_CYCLE[isa or self.processor.isa][is_int8]
        return self.cores * self.processor.ghz * ops / 1e3
