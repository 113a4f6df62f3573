"""The hardware of one machine as planning sees it: sizes, rates and prices, in plain numbers.

Rates are peaks, as makers state them; what share of them is reached is the cost model's business.
GB/s and TFLOPS are decimal, memory is in GiB, prices are in US dollars.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

__all__ = ["OPS_PER_CYCLE", "Accelerator", "HardwareSpec", "Isa", "Processor"]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Isa = Literal["avx2", "avx512", "amx"]

OPS_PER_CYCLE: dict[Isa, tuple[int, int]] = {
    "avx2": (32, 64),
    "avx512": (128, 256),
    "amx": (1024, 2048),
}
"""Operations of one core in one cycle, of bf16 (AVX2: float32) and of int8; a multiply-add is two.

AVX-512 and AMX as in the KTransformers talk: 256 and 2048 with int8, and half of it with bf16.
"""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU."""

    title: Text
    memory_gib: Positive
    bandwidth_gbps: Positive
    """GB/s of its memory."""
    bf16_tflops: Positive
    """Dense, sums in float32."""
    fp8_tflops: NonNegative = 0
    """The same with fp8; 0 where it has none."""
    host_link_gbps: Positive
    """From the host's memory, one direction."""
    peer_link_gbps: Positive
    """To the other GPUs of the machine, one direction."""
    price_usd: NonNegative
    price_source: Text
    source: Text


class Processor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One socket."""

    title: Text
    cores: Annotated[int, Meta(ge=1)]
    """Whole ones, not hardware threads."""
    ghz: Positive
    """Under load of all cores: the base clock, where nothing better is known."""
    isa: Isa
    """The widest instruction set that multiplies matrices."""
    bandwidth_gbps: Positive
    """GB/s of the socket's memory."""
    bf16_tflops: NonNegative = 0
    """Measured; 0 is by cores, clock and instruction set."""
    int8_tops: NonNegative = 0
    """The same of int8."""
    sustained_tflops: NonNegative = 0
    """Sustained TFLOPS of bf16, as a source says that kernels reach it; what a price is compared
    by, if given."""
    price_usd: NonNegative
    price_source: Text
    source: Text


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine."""

    name: Text
    title: Text
    processor: Processor | None = None
    """None: only the accelerator is compared, as in the talk."""
    sockets: Annotated[int, Meta(ge=1)] = 1
    cores_used: Annotated[int, Meta(ge=0)] = 0
    """Cores of the machine that may be used, as of a rented share; 0 is all."""
    memory_gib: NonNegative = 0
    """DRAM of the whole machine."""
    accelerator: Accelerator | None = None
    num_accelerators: Annotated[int, Meta(ge=0)] = 0
    dram_usd_per_gib: NonNegative = 5
    """A price of server DRAM; `price_source` says where it comes from."""
    price_source: str = "DRAM at $5 a GiB, the middle of 2024 and 2025's retail prices"
    source: Text

    @property
    def cores(self) -> int:
        """Cores that may be used."""
        if self.processor is None:
            return 0
        whole = self.processor.cores * self.sockets
        return min(whole, self.cores_used) if self.cores_used else whole

    @property
    def share(self) -> float:
        """Part of the machine's cores that may be used."""
        return self.cores / (self.processor.cores * self.sockets) if self.processor else 0.0

    @property
    def cpu_bandwidth_gbps(self) -> float:
        """Peak of all sockets' memory together.

        A share of the cores reaches more than its share of the bandwidth: half the cores of a
        socket are taken to saturate it.
        """
        if self.processor is None:
            return 0.0
        return self.processor.bandwidth_gbps * self.sockets * min(1.0, 2 * self.share)

    @property
    def accelerator_memory_bytes(self) -> int:
        """Memory of all GPUs together."""
        if self.accelerator is None:
            return 0
        return round(self.accelerator.memory_gib * self.num_accelerators * (1 << 30))

    @property
    def memory_bytes(self) -> int:
        """DRAM."""
        return round(self.memory_gib * (1 << 30))

    @property
    def price_usd(self) -> float:
        """Price of processors, DRAM and GPUs; board, case and power are left out."""
        price = self.memory_gib * self.dram_usd_per_gib
        if self.processor is not None:
            price += self.processor.price_usd * self.sockets
        if self.accelerator is not None:
            price += self.accelerator.price_usd * self.num_accelerators
        return price

    def cpu_tflops(self, *, is_int8: bool, isa: Isa | None = None) -> float:
        """Return the peak of the cores that may be used.

        Args:
            is_int8: whether products are of int8 or of bf16.
            isa: a narrower instruction set than the widest; None is the widest.
        """
        if self.processor is None:
            return 0.0
        measured = self.processor.int8_tops if is_int8 else self.processor.bf16_tflops
        if measured and isa in (None, self.processor.isa):
            return measured * self.sockets * self.share
        ops = OPS_PER_CYCLE[isa or self.processor.isa][is_int8]
        return self.cores * self.processor.ghz * ops / 1e3
