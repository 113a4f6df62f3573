"""Routed experts that lie on disk, computed from slots in host memory.

In a step of few tokens the layer's policy decides which experts are kept in slots; a step of many,
such as a prefill, bypasses the slots and leaves them unchanged. Results are bitwise those of
``PackedExperts``: kernels and order of sums are the same.

Shapes: T tokens, D hidden, E experts, K experts per token.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.errors import CapacityError, UnsupportedError
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.cpu.expert_slots import ExpertTier, LayerSlots, TierCounters
from tandem.kernels.cpu.experts import NativeExperts, PackedExperts, WeightCache, start_submitter
from tandem.kernels.guesses import ExpertGuess
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.weights.formats import WeightFormat
from tandem.placement.experts.cache import CachePolicy

__all__ = ["DiskExperts", "TierShare", "TieredExperts"]

MAX_CACHED_TOKENS = 16
"""Most tokens of a step that uses the slots: decodes of some requests, with draft tokens. A prefill
uses nearly all experts of a layer once, and would evict those that decodes use.
"""


class TieredExperts(PackedExperts):
    """Experts of one layer that lie in a file; results are bitwise those of ``PackedExperts``.

    Args:
        settings: positional arguments of ``PackedExperts``.
        tier: memory that the layers share.
        path: file that holds the packed experts one after the other.
        num_slots: slots of this layer.
        policy: decides which experts are kept in the slots.
        is_unchanged: returns True if the file has the content that it had; as of ``LayerSlots``.
        more: keyword arguments of ``PackedExperts``, without those about memory.
    """

    def __init__(
        self,
        *settings: Any,
        tier: ExpertTier,
        path: Path,
        num_slots: int,
        policy: CachePolicy,
        is_unchanged: Callable[[], bool] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*settings, **more, is_apart=True)
        self._tier = tier
        self._layer = LayerSlots(
            tier,
            path,
            expert_bytes=self.expert_bytes,
            num_experts=self.num_experts,
            num_slots=num_slots,
            policy=policy,
            is_unchanged=is_unchanged,
        )
        self._guess: ExpertGuess | None = None
        """Guess of which experts this layer will choose, by which they are read ahead; None: the
        layer before has no experts on disk, so nothing is guessed.
        """
        self._follower: TieredExperts | None = None
        """Experts of the next layer, if they are guessed and read ahead while this layer computes.
        """

    def follow(self, before: "TieredExperts", guess: ExpertGuess) -> None:
        """Guess these experts while the previous layer computes, and read them ahead if that pays.

        Args:
            before: the experts of the previous layer.
            guess: made of this layer's router, which runs in the thread of the previous layer.
        """
        self._guess = guess
        before._follower = self

    def run(self, x_TD: Buffer, ids_TK: Buffer, weights_TK: Buffer, out_TD: Buffer) -> None:
        """Read missing experts and write the weighted sum to ``out_TD``.

        While these reads are under way, the next layer's are guessed. Raises the errors of this
        layer's reads.
        """
        follower, on_begun = self._follower, None
        if len(ids_TK.tensor) <= MAX_CACHED_TOKENS:
            if self._guess is not None:
                self._guess.compare(ids_TK.tensor.flatten().tolist())
            if follower is not None:
                on_begun = partial(follower._read_ahead, x_TD.tensor)
        self._read_and_compute(x_TD, ids_TK, weights_TK, out_TD, on_begun)

    def _read_and_compute(
        self,
        x_TD: Buffer,
        ids_TK: Buffer,
        weights_TK: Buffer,
        out_TD: Buffer,
        on_begun: Callable[[], None] | None = None,
    ) -> None:
        """Read missing experts and compute as ``run`` does, without guessing the next layer's; call
        ``on_begun`` before the first read is waited for.
        """
        given = (x_TD, ids_TK, weights_TK, out_TD)
        layer, memory = self._layer, self._tier.memory
        ids = ids_TK.tensor.numpy()

        def compute(first: int, end: int, is_added: bool) -> None:
            self.run_apart(*given, memory, layer.places, first, end, is_added=is_added)

        is_cached = len(ids) <= MAX_CACHED_TOKENS
        layer.run(ids, compute, is_cached=is_cached, on_begun=on_begun)

    def _read_ahead(self, before_TD: Tensor) -> None:
        assert self._guess is not None, "nothing to guess by"
        expert_ids = self._guess.propose(before_TD, self._layer.list_missing)
        if expert_ids:
            self._layer.guess(expert_ids)

    @property
    def layer(self) -> LayerSlots:
        """This layer's places in memory for experts (slots), and its pending reads from disk."""
        return self._layer

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        delta_PC: Tensor | None = None,
        kept_PC: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum; raises the errors of disk reads, and UnsupportedError for
        gradients.
        """
        if delta_PC is not None or kept_PC is not None:
            what = "experts on disk have no gradients: train with all of them in memory"
            raise UnsupportedError("kernels.run_experts", what)
        buffers = _make_buffers(x_TD, ids_TK, weights_TK)
        self.run(*buffers)
        return buffers[-1].tensor

    def submit(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Future[None], Tensor]:
        """Begin ``forward`` in the background; return a future of its end and the output tensor.

        Nothing is guessed: the next layer's router belongs to the caller's thread.
        """
        buffers = _make_buffers(x_TD, ids_TK, weights_TK)
        job = start_submitter(os.getpid()).submit(self._read_and_compute, *buffers)
        return job, buffers[-1].tensor


def _make_buffers(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Return buffers of hidden states, ids and weights, and a new one for the sum."""
    out_TD = torch.empty(x_TD.shape, dtype=torch.float32)
    ids = Buffer(ids_TK.long().contiguous())
    return Buffer(x_TD.detach()), ids, Buffer(weights_TK.detach()), Buffer(out_TD)


@dataclass(frozen=True, slots=True)
class TierShare:
    """A layer's share of the memory for experts on disk: its number of slots, and who decides what
    they hold.
    """

    tier: ExpertTier
    num_slots: int
    make_policy: Callable[[int], CachePolicy]
    """Function that makes the layer's cache policy for a number of slots."""


class DiskExperts(NativeExperts):
    """Routed experts in a weight format that stay on disk, with slots in memory.

    Args:
        spec: sizes and activation of the experts.
        weight_format: how the weights are stored.
        pool: runs the kernels; borrowed for the life of the operator.
        cache: keeps the file that experts are read from.
        share: slots in memory for experts in use.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        weight_format: WeightFormat,
        pool: ThreadPool,
        cache: WeightCache,
        share: TierShare,
    ) -> None:
        super().__init__(spec, weight_format=weight_format, pool=pool, cache=cache)
        self._disk_cache = cache
        self._share = share

    @property
    def counters(self) -> TierCounters:
        """Counts of hits and reads in the memory for experts on disk, which all layers share."""
        return self._share.tier.counters

    def load(self, reader: WeightReader, name: str) -> None:
        """Open the file of packed weights; pack the weights and write it first if it is missing.

        Raises: CapacityError (the file cannot be written).
        """
        cache, size_bytes = self._disk_cache, self.size_bytes
        path = cache.locate(name, size_bytes)
        if path is None:
            self._experts = self._make(None, 1)
            self._pack(reader, name)
            cache.keep(name, self._experts.packed.reshape(-1))
            path = cache.locate(name, size_bytes)
        else:
            reader.skip(f"{name}.")
        if path is None:
            raise CapacityError(
                "kernels.load_experts",
                f"{name}: packed experts have to be on disk and could not be written, the log says "
                "why: name a folder with room by model.packed_cache",
                field="model.packed_cache",
            )
        share = self._share
        self._experts = TieredExperts(
            self.weight_format,
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            pool=self._pool,
            activation=self.activation,
            has_bias=self.has_bias,
            tier=share.tier,
            path=path,
            num_slots=share.num_slots,
            policy=share.make_policy(share.num_slots),
            is_unchanged=partial(cache.is_unchanged, name, size_bytes),
        )
        self._load_biases(reader, name)
        self.packed_bytes = share.num_slots * share.tier.slot_bytes

    @property
    def is_in_one_piece(self) -> bool:
        """False: the weights are on disk, so they cannot be viewed as one piece of memory."""
        return False

    @property
    def tiered(self) -> TieredExperts:
        """The layer's experts with their file and their memory, after ``load``."""
        assert isinstance(self._experts, TieredExperts), "not loaded"
        return self._experts
