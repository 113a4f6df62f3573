"""Decode steps in torch at fixed memory addresses, so that they can be captured in a graph.

A ``FixedDecode`` holds the tensors of a step for given numbers of tokens and blocks. ``fill_``
copies a batch into them before each launch; operators of the step compute everything else from
them, without the host reading a value or length. A batch with fewer tokens repeats its first token,
which computes and writes the same result again; attention sees all blocks of the step and masks
what a token does not see.

Shapes: B tokens of the step, T of the batch, W blocks of each.
"""

from typing import cast

import torch
from torch import Tensor

from tandem.kernels.interfaces import Angles
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import MoeLayers, StepRouting
from tandem.kernels.states import StateCache
from tandem.kernels.torch.attention import MAX_GATHER_BYTES, DecodeGroup
from tandem.kernels.torch.step import Group, TorchStep, compute_angles

__all__ = ["FixedDecode", "count_width"]


def count_width(batch: PagedBatch, cache: PagedKvCache, size: int) -> int:
    """Return the number of blocks per token of a fixed decode step: a power of two, or 0.

    0 means that no fixed step is possible: attention would gather too many bytes of a layer, or it
    gathers rows that an index chooses.

    Args:
        batch: decodes only.
        cache: cache of the batch's blocks.
        size: tokens of the step.
    """
    if cache.index_slots:
        # With an index (sparse attention) the rows to gather depend on the context lengths, so no
        # fixed width describes them.
        return 0
    blocks = -(-max(batch.context_lens) // batch.block_size)
    width = 1 << (blocks - 1).bit_length()
    return width if size * width * cache.layout.bytes_per_layer <= MAX_GATHER_BYTES else 0


class FixedDecode:
    """Memory of decode steps with a fixed number of tokens.

    Args:
        size: B.
        width: W.
        cache: the block pool.
        hidden_size: size of a token's hidden state.
        ropes: give the RoPE angles.
        dtype: the model's dtype.
        moe: layers with routed experts; None: there are none.
        states: slots of states; None: no layer has one.
    """

    def __init__(
        self,
        size: int,
        width: int,
        cache: PagedKvCache,
        *,
        hidden_size: int,
        ropes: tuple[Angles, ...],
        dtype: torch.dtype,
        moe: MoeLayers | None,
        states: StateCache | None = None,
    ) -> None:
        device = cache.tensor.device
        self.size, self.width = size, width
        self._cache = cache
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.states = states
        self.state_slots = torch.zeros_like(self.token_ids)
        self.hidden = torch.zeros(size, hidden_size, dtype=dtype, device=device)
        """Residual stream, [B, D]."""
        self.layer_inputs: Tensor | None = None
        """Inputs of layers that have one of their own, [B, layers, items]; allocated by the first
        ``fill_``.
        """
        caches = [cache] if cache.windows is None else [cache, cache.windows]
        self.groups = [_FixedGroup(held, size, width, device) for held in caches]
        self.routing: StepRouting | None = None
        if moe is not None:
            self.routing = StepRouting(moe, self._make_batch(cache), cache, dtype)
        self.step = FixedStep(self, cache, ropes, dtype)

    def _make_batch(self, cache: PagedKvCache) -> PagedBatch:
        """Return a batch that consists of the fixed tensors, in which every token is an output
        token.
        """
        group = self.groups[0]
        return PagedBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            slot_blocks=group.slot_blocks,
            slot_offsets=group.slot_offsets,
            block_table=group.table,
            logit_rows=self.token_ids,
            query_start=tuple(range(self.size + 1)),
            context_lens=(1,) * self.size,
            fresh_blocks=(),
            adapter_rows={},
            slot_runs=None,
            block_size=cache.layout.block_size,
            state_slots=(),
            fresh_slots=(),
            prompt_lens=(0,) * self.size,
        )

    def fill_(
        self, batch: PagedBatch, hidden_TD: Tensor, layer_inputs: Tensor | None = None
    ) -> None:
        """Copy a batch, its embedded tokens and its layers' inputs into the fixed memory.

        It runs outside of the graph.
        """
        _put(self.token_ids, batch.token_ids)
        _put(self.positions, batch.positions)
        _put(self.hidden, hidden_TD)
        if layer_inputs is not None:
            if self.layer_inputs is None:
                self.layer_inputs = layer_inputs.new_zeros(self.size, *layer_inputs.shape[1:])
            _put(self.layer_inputs, layer_inputs)
        if self.states is not None:
            slots = torch.tensor(batch.state_slots, dtype=torch.int64)
            _put(self.state_slots, slots.to(self.positions.device))
        self.groups[0].fill_(batch)
        if len(self.groups) > 1:
            own = self._cache.place_windows(batch)
            assert own is not None, "no blocks for the layers with a window"
            self.groups[1].fill_(own)
        if self.routing is not None and self.routing.defers:
            rows_T = torch.from_numpy(batch.find_output_rows())
            self.routing.set_outputs(rows_T.to(self.positions.device))


def _put(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into the first rows of ``target``, and its first row into the others, which
    pad the step.
    """
    target[: len(source)] = source
    target[len(source) :] = source[:1]


class _FixedGroup(Group):
    """The blocks of one group of layers in a decode step at fixed memory addresses, for a graph."""

    def __init__(self, cache: PagedKvCache, size: int, width: int, device: torch.device) -> None:
        self.slot_blocks = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot_offsets = torch.zeros_like(self.slot_blocks)
        self.table = torch.zeros(size, width, dtype=torch.int64, device=device)
        super().__init__(cache, (self.slot_blocks, self.slot_offsets), None, [], [])
        self._num_keys = width * cache.layout.block_size
        num_rows = len(cache.gather_index(self.table)) if cache.layout.num_layers else 0
        # The gathered rows get memory of their own: the cache's scratch memory moves when it grows,
        # and a captured graph needs fixed addresses.
        self._gathered = cache.tensor.new_empty(
            num_rows, cache.layout.block_size * cache.layout.row_size
        )

    def fill_(self, batch: PagedBatch) -> None:
        """Copy the slots and block tables of a batch's tokens into the fixed memory, outside of the
        graph.
        """
        _put(self.slot_blocks, batch.slot_blocks)
        _put(self.slot_offsets, batch.slot_offsets)
        width = min(batch.block_table.shape[1], self.table.shape[1])
        known = batch.block_table[:, :width]
        _put(self.table[:, :width], known)
        _put(self.table[:, width:], known[:, :1].expand(-1, self.table.shape[1] - width))

    def begin_(self, positions: Tensor) -> None:
        """Plan the attention of the step on the device, by operators that a captured graph can
        hold.
        """
        cache = self.cache
        if not cache.layout.num_layers:
            return
        lens = (positions + 1).repeat_interleave(cache.layout.num_kv_heads)
        index = cache.gather_index(self.table)
        self.decodes = [
            DecodeGroup(None, index, self._gathered, self._num_keys, lens, is_even=False, masks={})
        ]


class FixedStep(TorchStep):
    """A torch step over the fixed memory of a ``FixedDecode``; call ``begin_`` first."""

    def __init__(
        self,
        memory: FixedDecode,
        cache: PagedKvCache,
        ropes: tuple[Angles, ...],
        dtype: torch.dtype,
    ) -> None:
        self._memory, self._ropes, self._dtype = memory, ropes, dtype
        self._init_parts(
            cache,
            cast("list[Group]", memory.groups),
            memory.positions,
            states=memory.states,
            routing=memory.routing,
        )
        self._state_rows = ((), [], memory.state_slots)

    def begin_(self) -> None:
        """Compute angles and the plan of attention on the device, from the fixed memory; the graph
        holds this, too.
        """
        self._written, self._beside = {}, None
        self.layer_inputs = self._memory.layer_inputs
        if self._memory.routing is not None:
            self._memory.routing.restart()
        self._angles = [compute_angles(rope, self._positions, self._dtype) for rope in self._ropes]
        for group in self._memory.groups:
            group.begin_(self._positions)
