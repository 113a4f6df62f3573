"""Routed experts on the host, for a model whose other tensors are on a device such as a GPU.

A step copies hidden states and router choices to staging memory, waits for the experts' sum and
adds it on the device. ``kernels.hybrid`` does this for decode steps without making the device wait.

Shapes: T tokens, D hidden, K experts per token.
"""

from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.device import Device
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.experts import RoutedExperts

__all__ = ["ExpertStaging", "HostedExperts", "ScaledExperts"]

ALIGNMENT = 64
"""Alignment of each part of the staging memory, in bytes."""


_LIVE: "WeakValueDictionary[int, HostedExperts]" = WeakValueDictionary()
"""Live instances by number: a custom torch operator can take a number but no object."""
_numbers = count()


class StagedTokens(NamedTuple):
    """Memory on the host for the tokens of one layer, with which the device exchanges the experts'
    inputs and outputs.
    """

    hidden: Tensor
    """Hidden states [T, D], in a dtype of the native kernels."""
    ids: Tensor
    """Chosen expert ids [T, K], int64."""
    weights: Tensor
    """Router weights [T, K], float32."""
    out: Tensor
    """The experts' weighted sum [T, D], float32."""


class ExpertStaging:
    """Staging memory that all layers of a model share; one layer uses it at a time.

    Args:
        device: copies to and from the memory.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory = device.allocate_staging(ALIGNMENT)

    def take(self, x_TD: Tensor, top_k: int) -> StagedTokens:
        """Return staging memory for the tokens of ``x_TD``; the next call returns the same
        memory.
        """
        tokens, hidden = x_TD.shape
        kinds = (
            (hidden, x_TD.dtype),
            (top_k, torch.int64),
            (top_k, torch.float32),
            (hidden, torch.float32),
        )
        sizes = [tokens * columns * kind.itemsize for columns, kind in kinds]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(padded) > self._memory.nbytes:
            self._memory = self.device.allocate_staging(sum(padded))
        parts: list[Tensor] = []
        start = 0
        for (columns, kind), size, room in zip(kinds, sizes, padded, strict=True):
            part = self._memory[start : start + size].view(kind)
            parts.append(part.view(tokens, columns))
            start += room
        return StagedTokens(*parts)


class ScaledExperts:
    """Experts whose inputs the router scales, with the interface ``hybrid.HostExperts``.

    Args:
        native: the experts; borrowed.
    """

    def __init__(self, native: NativeExperts) -> None:
        self._native = native

    # Staging memory is allocated under inference mode and may only be changed under that mode.
    @torch.inference_mode()
    def run(self, x_TD: Buffer, ids_TK: Buffer, w_TK: Buffer, out_TD: Buffer) -> None:
        """Write the sum of the experts' outputs to a float32 buffer."""
        out_TD.tensor.copy_(self._native(x_TD.tensor, ids_TK.tensor, w_TK.tensor))


class Stream(Protocol):
    """Computation of a prompt's experts on the device, with weights that are copied there;
    ``kernels.lanes.streams.ExpertStream`` implements it.
    """

    def run(self, layer: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum of a layer's experts, float32 [T, D] on the device, new."""
        ...


class HostedExperts(RoutedExperts):
    """Native experts on the host behind the operator interface of the device.

    Args:
        native: the experts that hold the weights; owned, but no submodule: this class loads them.
        staging: staging memory that the model's layers share.
    """

    def __init__(self, native: NativeExperts, staging: ExpertStaging) -> None:
        super().__init__(native.spec)
        self._held = (native,)
        self._staging = staging
        self._stream: Stream | None = None
        self._stream_layer = self._stream_tokens = 0
        self._number = next(_numbers)
        _LIVE[self._number] = self

    @property
    def native(self) -> NativeExperts:
        """The native experts on the host that compute for this operator of another device."""
        return self._held[0]

    def load(self, reader: WeightReader, name: str) -> None:
        """Load the weights into host memory, in the number format and layout of the CPU kernels:
        mapped from the cache of packed experts, or read from the checkpoint and quantized.
        """
        self.native.load(reader, name)
        self.packed_bytes = self.native.packed_bytes
        self.is_misplaced = self.native.is_misplaced

    def enable_stream(self, stream: Stream, layer: int, min_tokens: int) -> None:
        """Copy this layer's weights to the device for steps of many tokens, and compute there.

        Args:
            stream: copies the weights; shared by the model's layers.
            layer: index among the layers with experts.
            min_tokens: fewest tokens of a step for which the weights are copied.
        """
        self._stream, self._stream_layer, self._stream_tokens = stream, layer, min_tokens

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the experts' weighted sum to the residual; host and device wait for each other."""
        if len(x_TD):
            residual_TD += run_hosted(x_TD, ids_TK, w_TK, self._number)

    def run_staged(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Compute the experts from staged copies; return the weighted sum, float32 [T, D] on the
        device.
        """
        if self._stream is not None and len(x_TD) >= self._stream_tokens:
            return self._stream.run(self._stream_layer, x_TD.contiguous(), ids_TK, w_TK)
        device, there = self._staging.device, self._staging.take(x_TD, ids_TK.shape[1])
        device.copy(x_TD.contiguous(), there.hidden)
        device.copy(ids_TK.contiguous(), there.ids)
        device.copy(w_TK.float().contiguous(), there.weights)
        self.native.run(*map(Buffer, there))
        sum_TD = torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        device.copy(there.out, sum_TD)
        return sum_TD


@torch.library.custom_op("tandem::run_hosted", mutates_args=())
def run_hosted(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, number: int) -> Tensor:
    """Run host experts on a device's tensors, as one custom operator of torch.

    Args:
        x_TD: hidden states.
        ids_TK: expert ids, int64.
        w_TK: router weights.
        number: number of a live ``HostedExperts``.

    Returns: the weighted sum, float32 [T, D] on the device of ``x_TD``, new.
    """
    return _LIVE[number].run_staged(x_TD, ids_TK, w_TK)


@run_hosted.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, number: int) -> Tensor:
    assert ids_TK.shape == w_TK.shape, "a weight for each expert"
    assert x_TD.device == ids_TK.device == w_TK.device, "tensors of one device"
    assert number in _LIVE, "experts that are gone"
    return torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
