"""A fake device that serves a model from its configuration, as a GPU does."""

from tandem.kernels.cpu.device import CPU
from tandem.kernels.fake.device import FakeDevice

__all__ = ["FarDevice"]


class FarDevice(FakeDevice):
    """A fake device whose memory operators outside of streams may use, as CUDA's may."""

    def __init__(self, *args, free_bytes=1 << 30):
        super().__init__(*args)
        self.free_bytes = free_bytes
        self.num_copies = 0

    def allocate(self, size_bytes):
        return CPU.allocate(size_bytes)

    def count_free_bytes(self):
        return self.free_bytes

    def copy(self, source, target, stream=None):
        self.num_copies += 1
        super().copy(source, target, stream)
