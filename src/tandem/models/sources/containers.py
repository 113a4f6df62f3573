"""The container of a checkpoint."""

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
        path: its folder, or a GGUF file.
        dtype: what operators get where they ask for values.
        device: where they get it.
        execution: runs the operators that read; None: chosen for the device and dtype.
        progress: called after each tensor.
        quantization: how its weights are coded, as its configuration says; None = they are not.

    Raises: as ``SafetensorsSource`` and ``GgufSource``.
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
