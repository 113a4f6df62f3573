"""Routed experts on the host, of a model whose other tensors are on a device.

A step hands over its hidden states and choices in staging memory, waits for the experts' sum, and
adds it on the device. ``kernels.hybrid`` does the same for decode steps without waiting.

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

__all__ = ["ExpertStaging", "HostedExperts"]

ALIGNMENT = 64
"""Alignment of each part of the staging memory, in bytes."""


_LIVE: "WeakValueDictionary[int, HostedExperts]" = WeakValueDictionary()
"""By number, as an operator of torch takes no objects."""
_numbers = count()


class StagedTokens(NamedTuple):
    """Host memory that the device copies to and from."""

    hidden: Tensor
    """[T, D], of a dtype that native kernels take."""
    ids: Tensor
    """[T, K], int64."""
    weights: Tensor
    """[T, K], float32."""
    out: Tensor
    """[T, D], float32."""


class ExpertStaging:
    """Staging memory for one layer at a time, shared by all layers of a model.

    Args:
        device: copies to and from it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory = device.allocate_staging(ALIGNMENT)

    def take(self, x_TD: Tensor, top_k: int) -> StagedTokens:
        """Return room for as many tokens; the next call gives the same memory."""
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


class Stream(Protocol):
    """Computes prompts on the device; ``kernels.lanes.streams.ExpertStream`` is one."""

    def run(self, layer: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum of a layer's experts, float32 [T, D] on the device, new."""
        ...


class HostedExperts(RoutedExperts):
    """Native experts behind the interface of the device's.

    Args:
        native: has the weights; owned, and no module of its own: it is loaded here.
        staging: of the model; shared.
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
        """The experts on the host."""
        return self._held[0]

    def load(self, reader: WeightReader, name: str) -> None:
        """Read and pack the weights on the host."""
        self.native.load(reader, name)
        self.packed_bytes = self.native.packed_bytes
        self.is_misplaced = self.native.is_misplaced

    def enable_stream(self, stream: Stream, layer: int, min_tokens: int) -> None:
        """Stream the weights to the device in steps of many tokens.

        Args:
            stream: of the model; shared.
            layer: number among the layers that have experts.
            min_tokens: of a step, from which it streams.
        """
        self._stream, self._stream_layer, self._stream_tokens = stream, layer, min_tokens

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the weighted sum; see ``RoutedExperts``. Host and device wait for each other."""
        if len(x_TD):
            residual_TD += run_hosted(x_TD, ids_TK, w_TK, self._number)

    def run_staged(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum, float32 [T, D] on the device, new."""
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
    """Run experts of the host on a device's tensors, as one operator of torch.

    Args:
        x_TD: hidden states.
        ids_TK: int64.
        w_TK: router weights.
        number: of a live ``HostedExperts``.

    Returns: the weighted sum, float32 [T, D] on the device of ``x_TD``, new.
    """
    return _LIVE[number].run_staged(x_TD, ids_TK, w_TK)


@run_hosted.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor, number: int) -> Tensor:
    assert ids_TK.shape == w_TK.shape, "a weight for each expert"
    assert x_TD.device == ids_TK.device == w_TK.device, "tensors of one device"
    assert number in _LIVE, "experts that are gone"
    return torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
