"""The devices that this build supports, and the objects made once for each device.

This is the top module of ``kernels``: the others get the choices made here and open no device.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from tandem._native import ThreadPool
from tandem.core.errors import UnsupportedError
from tandem.core.kv_layout import KVLayout
from tandem.core.state_layout import StateLayout
from tandem.kernels.cpu.device import CPU
from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.cuda.device import CudaDevice
from tandem.kernels.device import Device
from tandem.kernels.interfaces import Execution
from tandem.kernels.latents.tier import LatentTier
from tandem.kernels.native import NATIVE_DTYPES
from tandem.kernels.paged import PagedKvCache
from tandem.kernels.states import StateCache
from tandem.kernels.torch.execution import TorchExecution

__all__ = [
    "DeviceContext",
    "choose_execution",
    "has_native_kernels",
    "name_arithmetic",
    "open_device",
]

_OPENERS: dict[str, Callable[[str], Device]] = {"cpu": lambda _name: CPU, "cuda": CudaDevice}
"""Function that opens a device, by torch's device type."""


def has_native_kernels(name: str) -> bool:
    """Return True if native kernels run on devices of this type, present or not.

    Args:
        name: device name as torch writes it, such as ``cuda:0``; planning uses devices of other
            machines.
    """
    return torch.device(name).type == CPU.torch_device.type


def name_arithmetic(name: str) -> str:
    """Return ``Device.name_arithmetic``; the name itself for a device type that this build
    lacks.
    """
    is_known = torch.device(name).type in _OPENERS
    return open_device(name).name_arithmetic() if is_known else name


@cache
def open_device(name: str) -> Device:
    """Return the device of this name; the same object each time.

    Raises: UnsupportedError (this build does not support the device type, or there is no such
        device).
    """
    opener = _OPENERS.get(torch.device(name).type)
    if opener is None:
        raise UnsupportedError(
            "kernels.open_device",
            f"this build does not run on {name!r}: use one of {', '.join(_OPENERS)}",
        )
    return opener(name)


def choose_execution(
    device: Device, dtype: torch.dtype, pool: ThreadPool | None = None
) -> Execution:
    """Return the implementation of a model's operators.

    Args:
        device: the model's device.
        dtype: the model's dtype.
        pool: threads for native kernels, kept; None: the caller's thread.
    """
    if device.has_native_kernels and dtype in NATIVE_DTYPES:
        return CpuExecution(pool)
    return TorchExecution(is_host=device.is_host)


class DeviceContext:
    """A device with the objects that are made once for it.

    Args:
        device: device on which models run.
        pool: threads of the native kernels and of the sampler; kept.
    """

    def __init__(self, device: Device, pool: ThreadPool) -> None:
        self.device = device
        self.pool = pool
        self.choose_execution = cache(self._choose_execution)
        """Cached function that returns the execution for a model's dtype."""
        self._staging: torch.Tensor | None = None

    def _choose_execution(self, dtype: torch.dtype) -> Execution:
        return choose_execution(self.device, dtype, self.pool)

    def make_kv_cache(
        self,
        layout: KVLayout,
        num_blocks: int,
        memory: torch.Tensor | memoryview | NDArray[np.uint8] | None = None,
        windows: PagedKvCache | None = None,
        window_layers: tuple[int, ...] = (),
        latents: LatentTier | None = None,
    ) -> PagedKvCache:
        """Return a pool of KV blocks in the device's memory; arguments as for ``PagedKvCache``."""
        return PagedKvCache(
            layout,
            num_blocks,
            device=self.device,
            memory=memory,
            windows=windows,
            window_layers=window_layers,
            latents=latents,
        )

    def make_state_cache(
        self,
        layout: StateLayout,
        num_slots: int,
        memory: torch.Tensor | memoryview | NDArray[np.uint8] | None = None,
    ) -> StateCache:
        """Return slots of recurrent states on the device; arguments as for ``StateCache``."""
        return StateCache(layout, num_slots, device=self.device, memory=memory)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values in host memory: the tensor itself if the host can access it.

        Otherwise the values are copied to staging memory, which the next ``fetch`` overwrites.
        """
        if self.device.is_host:
            return tensor
        staging = self._staging
        if staging is None or staging.nbytes < tensor.nbytes:
            self._staging = staging = self.device.allocate_staging(tensor.nbytes)
        fetched = staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.device.copy(tensor, fetched)
        return fetched
