"""Choice of the weight source for a checkpoint's container."""

from pathlib import Path

import torch

from tandem.kernels.cpu.device import CPU
from tandem.kernels.device import Device
from tandem.kernels.interfaces import Execution
from tandem.models.planning.quantization import Quantization
from tandem.models.sources.gguf import GgufSource
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.sources.safetensors import SafetensorsSource
from tandem.models.sources.source import Progress, WeightSource

__all__ = ["open_source"]


def open_source(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: Device = CPU,
    execution: Execution | None = None,
    progress: Progress | None = None,
    quantization: Quantization | None = None,
) -> WeightSource:
    """Open the weights of a checkpoint.

    Args:
        path: the checkpoint's folder, or a GGUF file.
        dtype: dtype in which operators read values.
        device: device on which operators get their weights.
        execution: implementation of the operators that read; None: chosen for device and dtype.
        progress: called after each tensor.
        quantization: quantization from the configuration; None: the weights are not quantized.

    Raises: the errors of ``SafetensorsSource`` and ``GgufSource``.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        return GgufSource(gguf, dtype=dtype, device=device, execution=execution, progress=progress)
    return SafetensorsSource(
        path,
        dtype=dtype,
        device=device,
        execution=execution,
        progress=progress,
        quantization=quantization,
    )
