"""Inputs of one engine step: the tokens, the slots of their KV, and the pool of blocks.

``PagedBatch`` is plain data built from Python lists; ``PagedKvCache`` owns the pool of blocks and
the views that operators index. Neither deals with requests. A block is the KV of ``block_size``
tokens in all layers, contiguous: [layers, *chunks, block_size, row_size], or, if KV is quantized,
the bytes of each layer, codes and then scales (``KVLayout``; chunks are [2, kv_heads] for GQA).
If some layers also store index keys after their latents, layers differ in size, and a block is one
row of bytes.

Invariants: a token's KV lives at slot (block_table[position // block_size], position %
block_size); within a batch no two tokens share a slot; the tail of a block that is being filled
holds finite numbers (a block is zeroed when its first token arrives), so that masked positions
never bring another request's NaN into a sum. One thread at a time per cache.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import KvPool
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.core.spec import NO_OUTPUT, KVLayout, MlaLayout
from tandem.core.state_layout import NO_SLOT
from tandem.kernels.cpu.device import CPU
from tandem.kernels.device import Device
from tandem.kernels.latents.tier import LatentTier
from tandem.kernels.native import TORCH_DTYPES, is_native, view_tensor

__all__ = [
    "LayerPlace",
    "PagedBatch",
    "PagedKvCache",
    "SequenceChunk",
    "wrap_memory",
]

POOL_ALIGNMENT = 64
"""Alignment of the pool in bytes: a cache line, the widest vector load, and enough for direct I/O
and devices.
"""

MIN_RUN_TOKENS = 8
"""Mean run length in tokens from which copying runs beats scattering tokens: a copy costs as much
as 8.
"""


class SequenceChunk(msgspec.Struct, frozen=True):
    """The tokens of one sequence that a step computes, and where their KV goes."""

    token_ids: list[int]
    start: int
    """Position of the first of ``token_ids``; the KV of all earlier tokens is in the cache."""
    block_table: Sequence[int] | NDArray[np.int32]
    """Blocks of the sequence in order; must reach the last of ``token_ids``, may be longer."""
    wants: str = "last"
    """Rows whose logits are computed: ``none``, ``last`` or ``all``."""
    adapter: str = ""
    """Digest of the LoRA adapter that the tokens use; empty: none."""
    state_slot: int = NO_SLOT
    """Slot of the sequence's recurrent state before the first of ``token_ids``; with ``start`` 0
    its contents are ignored. Used by models whose layers have a state.
    """
    prompt_len: int = NO_OUTPUT
    """Position from which tokens are output, whether they are decoded or recomputed."""
    window_first: int = 0
    """Position, counted in blocks, of the first of ``window_blocks``."""
    window_blocks: Sequence[int] | NDArray[np.int32] = ()
    """Blocks of the layers with a sliding window, if these have blocks of their own: from the first
    block that the first token sees to the block of the last token.
    """


class LayerPlace(NamedTuple):
    """The place of a layer's KV in a cache: which group of blocks, and which layer within them."""

    group: int
    """Memory that has the layer's KV: 0 for the cache's own blocks, 1 for the blocks of
    ``PagedKvCache.windows`` (sliding-window layers).
    """
    layer_idx: int
    """Index of the layer within these blocks."""


class BatchPlaces(NamedTuple):
    """The places of a batch's tokens in the blocks of one group of layers; fields as in
    ``PagedBatch``.
    """

    slot_blocks: list[int]
    slot_offsets: list[int]
    block_table: NDArray[np.int64]
    fresh_blocks: tuple[int, ...]
    slot_runs: tuple[tuple[int, int, int, int], ...] | None


class PagedBatch(msgspec.Struct, frozen=True):
    """A step's tokens, flattened: sequence s owns rows query_start[s] to query_start[s + 1].

    Shapes: T tokens, S sequences, B longest block table, R rows whose logits are computed.
    """

    token_ids: Tensor
    """Token ids, int64 [T]."""
    positions: Tensor
    """Positions in their sequences, int64 [T]."""
    slot_blocks: Tensor
    """Block that takes each token's KV, int64 [T]."""
    slot_offsets: Tensor
    """Place of each token's KV within its block, int64 [T]."""
    block_table: Tensor
    """Blocks of each sequence, int64 [S, B]; short rows repeat their own first block, so every
    entry may be read.
    """
    logit_rows: Tensor
    """Rows whose logits are computed, int64 [R], ascending."""
    query_start: tuple[int, ...]
    """First row of each sequence, followed by T: S + 1 numbers."""
    context_lens: tuple[int, ...]
    """Tokens of each sequence, including this step's."""
    fresh_blocks: tuple[int, ...]
    """Blocks that this step begins to fill without completing them."""
    adapter_rows: dict[str, list[int]]
    """Rows of each adapter, by its digest; other rows use no adapter."""
    slot_runs: tuple[tuple[int, int, int, int], ...] | None
    """The slots as runs of rows within a block, (block, offset, first row, end row); None if runs
    are short, as in a decode, and writing by slot is cheaper.
    """
    block_size: int
    state_slots: tuple[int, ...]
    """Slot of each sequence's recurrent state; ``NO_SLOT`` if it has none."""
    fresh_slots: tuple[int, ...]
    """Slots of sequences that begin with this step; they still hold old contents."""
    prompt_lens: tuple[int, ...] = ()
    """Position of each sequence from which tokens are output; empty if no token is output."""
    windows: "PagedBatch | None" = None
    """The same tokens in the blocks of the layers with a window; None if these have no blocks of
    their own. A block that no token sees is replaced by one that some token sees.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.query_start[-1]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.context_lens)

    def find_output_rows(self) -> NDArray[np.bool_]:
        """Return a mask [T] of tokens that are output, not of a prompt."""
        is_output = np.zeros(self.num_tokens, np.bool_)
        for s, prompt_len in enumerate(self.prompt_lens):
            first, end = self.query_start[s], self.query_start[s + 1]
            num_output = min(max(self.context_lens[s] - prompt_len, 0), end - first)
            is_output[end - num_output : end] = True
        return is_output

    @classmethod
    def build(
        cls,
        sequences: list[SequenceChunk],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "PagedBatch":
        """Flatten ``sequences``, in order, into one batch; an empty list gives an empty batch.

        Raises:
            ShapeError: a chunk without tokens, a negative start, or a block table too short.
        """
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        query_start, context_lens = [0], []
        adapter_rows: dict[str, list[int]] = {}
        for chunk in sequences:
            length = len(chunk.token_ids)
            end = chunk.start + length
            _check_chunk(chunk, len(sequences), block_size)
            if chunk.wants == "last":
                rows.append(len(ids) + length - 1)
            elif chunk.wants == "all":
                rows.extend(range(len(ids), len(ids) + length))
            if chunk.adapter:
                own = adapter_rows.setdefault(chunk.adapter, [])
                own += range(len(ids), len(ids) + length)
            ids += chunk.token_ids
            positions += range(chunk.start, end)
            query_start.append(len(ids))
            context_lens.append(end)
        tables = [(0, chunk.block_table) for chunk in sequences]
        places = _find_places(sequences, tables, block_size)
        vectors = (ids, positions, places.slot_blocks, places.slot_offsets, rows)
        tensors = _make_tensors(vectors, places.block_table, device)
        token_ids, positions_T, slot_blocks, slot_offsets, logit_rows, block_table = tensors
        batch = cls(
            token_ids=token_ids,
            positions=positions_T,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            block_table=block_table,
            logit_rows=logit_rows,
            query_start=tuple(query_start),
            context_lens=tuple(context_lens),
            fresh_blocks=places.fresh_blocks,
            adapter_rows=adapter_rows,
            slot_runs=places.slot_runs,
            block_size=block_size,
            state_slots=tuple([chunk.state_slot for chunk in sequences]),
            fresh_slots=tuple(
                [c.state_slot for c in sequences if c.start == 0 and c.state_slot != NO_SLOT]
            ),
            prompt_lens=tuple([chunk.prompt_len for chunk in sequences]),
        )
        if not any(len(chunk.window_blocks) for chunk in sequences):
            return batch
        windows = [(chunk.window_first, chunk.window_blocks) for chunk in sequences]
        own = _find_places(sequences, windows, block_size)
        slot_blocks, block_table = _make_tensors((own.slot_blocks,), own.block_table, device)
        return msgspec.structs.replace(
            batch,
            windows=msgspec.structs.replace(
                batch,
                slot_blocks=slot_blocks,
                block_table=block_table,
                fresh_blocks=own.fresh_blocks,
                slot_runs=own.slot_runs,
            ),
        )


def _find_places(
    sequences: Sequence[SequenceChunk],
    tables: Sequence[tuple[int, Sequence[int] | NDArray[np.int32]]],
    block_size: int,
) -> BatchPlaces:
    """Return the places of tokens in the blocks of one group (layers that keep KV of the same
    tokens).

    Args:
        sequences: the tokens.
        tables: for each sequence, the position of its first block and its blocks from there on.
        block_size: tokens of a block.
    """
    blocks: list[int] = []
    offsets: list[int] = []
    fresh: list[int] = []
    runs: list[tuple[int, int, int, int]] = []
    for chunk, (first, table) in zip(sequences, tables, strict=True):
        position, end = chunk.start, chunk.start + len(chunk.token_ids)
        while position < end:
            block_id, offset = int(table[position // block_size - first]), position % block_size
            count = min(block_size - offset, end - position)
            row = len(blocks)
            runs.append((block_id, offset, row, row + count))
            blocks += [block_id] * count
            offsets += range(offset, offset + count)
            position += count
        if end % block_size and end - end % block_size >= chunk.start:
            fresh.append(int(table[end // block_size - first]))
    width = max([first + len(table) for first, table in tables], default=0)
    rows = np.empty((len(sequences), width), np.int64)
    for row, (first, table) in zip(rows, tables, strict=True):
        row[:first] = table[0]
        row[first : first + len(table)] = table
        row[first + len(table) :] = table[0]
    return BatchPlaces(
        slot_blocks=blocks,
        slot_offsets=offsets,
        block_table=rows,
        fresh_blocks=tuple(fresh),
        slot_runs=tuple(runs) if len(runs) * MIN_RUN_TOKENS <= len(blocks) else None,
    )


def _make_tensors(
    vectors: Sequence[list[int]], table: NDArray[np.int64], device: torch.device | str
) -> tuple[Tensor, ...]:
    """Return vectors and a table as int64 tensors that share one allocation.

    A step has several of them, of a few numbers each: one conversion, and one copy to the device,
    cost a quarter of one for each.
    """
    sizes = [len(vector) for vector in vectors]
    flat = np.empty(sum(sizes) + table.size, np.int64)
    end = 0
    for vector, size in zip(vectors, sizes, strict=True):
        flat[end : end + size] = vector
        end += size
    flat[end:] = table.reshape(-1)
    parts = torch.split_with_sizes(torch.from_numpy(flat).to(device), [*sizes, table.size])
    return (*parts[:-1], parts[-1].view(table.shape))


def _check_chunk(chunk: SequenceChunk, num_sequences: int, block_size: int) -> None:
    where = "kernels.build_batch"
    if not chunk.token_ids or chunk.start < 0:
        raise ShapeError(
            where,
            f"a chunk of {len(chunk.token_ids)} tokens from position {chunk.start} among "
            f"{num_sequences} sequences: give at least one token and a start >= 0",
        )
    end = chunk.start + len(chunk.token_ids)
    if end > len(chunk.block_table) * block_size:
        raise ShapeError(
            where,
            f"{end} tokens in {len(chunk.block_table)} blocks of {block_size}: "
            "allocate blocks up to the last token of the chunk first",
        )
    num_window = len(chunk.window_blocks)
    if num_window and not (
        chunk.window_first * block_size <= chunk.start
        and end <= (chunk.window_first + num_window) * block_size
    ):
        raise ShapeError(
            where,
            f"tokens {chunk.start} to {end} in {num_window} blocks of {block_size} from block "
            f"{chunk.window_first} on: allocate those that the layers with a window write first",
        )
    if chunk.wants not in ("none", "last", "all"):
        raise ShapeError(where, f"wants={chunk.wants!r}: use 'none', 'last' or 'all'")


class PagedKvCache:
    """The pool of KV blocks of one model on one device, and the views that operators index.

    Args:
        layout: shape and dtype of a block.
        num_blocks: blocks in the pool; ids are 0 to num_blocks - 1.
        device: device of the pool.
        memory: memory to use instead of allocating: any writable, contiguous CPU buffer of at least
            ``num_blocks * layout.bytes_per_block`` bytes at an address that is a multiple of 64,
            such as an array of the transfer engine or a mapping of a peer's memory. Kept, not
            copied. Blocks in use must contain finite values. A tensor must be ``DeviceMemory`` of
            ``device``.
        windows: pool of the layers with a sliding window; None: this pool holds all layers.
        window_layers: indices of those layers among all layers with KV.
        latents: latents of the blocks in a file; blocks in memory are then index keys alone, by
            layer, and ``slots``, ``chunks`` and ``view_bytes`` do not have the latents. None: all
            is in memory.

    Raises:
        ShapeError: ``memory`` is too small, not contiguous or not aligned.
        UnsupportedError: read-only ``memory``, or ``memory`` for another device; quantized KV on a
            device other than the CPU, where no operator reads it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        device: Device = CPU,
        memory: Tensor | memoryview | NDArray[np.uint8] | None = None,
        windows: "PagedKvCache | None" = None,
        window_layers: Sequence[int] = (),
        latents: LatentTier | None = None,
    ) -> None:
        shape = (num_blocks, *layout.shape)
        dtype = torch.uint8 if layout.is_coded else TORCH_DTYPES[layout.dtype]
        block_bytes = layout.bytes_per_block
        if latents is not None:
            assert isinstance(layout, MlaLayout), "latents of a layout without"
            block_bytes = layout.index_block_bytes
            shape = (num_blocks, block_bytes // (1 if layout.is_coded else layout.item_bytes))
        size_bytes = num_blocks * block_bytes
        if layout.is_coded and not device.has_native_kernels:
            raise UnsupportedError(
                "kernels.wrap_kv_cache",
                f"{layout.dtype} KV on {device.torch_device}: only native attention reads it, "
                "use auto",
                field="kv_dtype",
            )
        # Fresh blocks are zeroed: attention may multiply unused slots by 0, and garbage could hold
        # NaN.
        if memory is None:
            tensor = device.allocate(size_bytes)
        elif isinstance(memory, Tensor):
            tensor = memory[:size_bytes]
        else:
            tensor = wrap_memory(memory, size_bytes, device)
        tensor = tensor.view(dtype).view(shape)
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.tensor = tensor
        self.windows = windows
        self.is_paired = False
        """True if a block of ``windows`` has the same number as the block of the same tokens here,
        so that one table serves both.
        """
        self.window_layers = tuple(window_layers)
        self.places = _place_layers(layout, windows, self.window_layers)
        """For each layer with KV, by its index among them: which group of blocks holds it, and its
        index there.
        """
        self.latents = latents
        self.native = _view_natively(tensor, layout) if latents is None else latents.pool
        """The blocks as native attention reads them; None if torch attends, or there are no
        layers.
        """
        self.native_index: KvPool | None = None
        """The index keys of the layers in ``index_slots``, in their order, for native attention."""
        self.index_slots: dict[int, Tensor] = {}
        """Index keys by layer, [num_blocks, block_size, index_dim]; codes if KV is quantized."""
        self._step_buffers: tuple[object, dict[tuple[object, ...], Any]] = (None, {})
        if isinstance(layout, MlaLayout) and layout.index_layers:
            rows, self.index_slots, scales = _view_indexed(
                tensor, layout, has_latents=latents is None
            )
            self._by_token = (*rows, *self.index_slots.values(), *scales)
            self.slots = rows
            # With sparse attention single tokens' rows are gathered as the index chooses them, so
            # there is no view of whole chunks.
            self.chunks, self.rows_per_block = list[Tensor](), 0
            if self.native is not None:
                offsets = _list_index_offsets(layout, has_latents=latents is None)
                self.native_index = _view_index_natively(tensor, layout, offsets)
            return
        if layout.is_coded:
            size, rows_shape = layout.scale_offset, layout.layer_shape[:-1]
            codes = tensor[:, :, :size].unflatten(2, layout.layer_shape)
            scales = tensor[:, :, size:].unflatten(2, (*rows_shape, -1))
            self._by_token = (codes, scales)
            return
        self._by_token = (tensor,)
        layers = range(layout.num_layers)
        self.slots = [tensor[:, layer].movedim(-2, 1) for layer in layers]
        """Slots of each layer, [num_blocks, block_size, *chunk_shape, row_size], to which a step's
        KV is written.
        """
        rows = tensor.view(-1, layout.block_size * layout.row_size)
        self.chunks = [rows[layer * layout.chunks_per_layer :] for layer in layers]
        """Chunks of each layer, [chunks, block_size * row_size], each a chunk of one block. In
        every layer row ``block * rows_per_block + chunk`` is that block's chunk; for GQA chunk is
        ``kind * kv_heads + head``.
        """
        self._scratch = tensor.new_empty(0, layout.block_size * layout.row_size)
        self.rows_per_block = layout.num_layers * layout.chunks_per_layer

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored keys and values."""
        return self.tensor.dtype

    @property
    def is_native(self) -> bool:
        """True if native attention can read the blocks of all layers."""
        caches = [self] if self.windows is None else [self, self.windows]
        return all(c.native is not None for c in caches if c.layout.num_layers)

    def view_items(self) -> Tensor:
        """Return the blocks as bytes, uint8 [num_blocks, bytes of a block]; shares the memory."""
        return self.tensor.view(self.num_blocks, -1).view(torch.uint8)

    def view_bytes(self) -> NDArray[np.uint8]:
        """Return all blocks as bytes, one block after the other; shares the memory.

        Raises: UnsupportedError (the cache is not in host memory).
        """
        if not self.device.is_host:
            raise UnsupportedError(
                "kernels.view_kv_bytes",
                f"the blocks are on {self.device.torch_device}: only the host's are seen",
            )
        return self.tensor.view(-1).view(torch.uint8).numpy()

    def place_windows(self, batch: PagedBatch) -> PagedBatch | None:
        """Return the batch with its tokens' places in the blocks of ``windows``; None without
        ``windows``.
        """
        return batch if self.is_paired else batch.windows

    def scratch_for(self, num_rows: int) -> Tensor:
        """Return memory to gather ``num_rows`` rows of ``chunks`` (a head's keys or values of one
        block) into; the next call may return the same memory.

        It is kept and grown, since touching memory fresh from the system costs more than filling
        it.
        """
        if len(self._scratch) < num_rows:
            width = self.layout.block_size * self.layout.row_size
            self._scratch = self.tensor.new_empty(num_rows, width)
        return self._scratch[:num_rows]

    def step_buffers(self, num_tokens: int, dtype: torch.dtype) -> dict[tuple[object, ...], Any]:
        """Return the buffers of the last native step with as many rows, or an empty dict.

        Decodes have the same number of rows again and again; the memory of a long prefill is freed
        by the next step.
        """
        if self._step_buffers[0] != (num_tokens, dtype):
            self._step_buffers = ((num_tokens, dtype), {})
        return self._step_buffers[1]

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` tokens of a block to another block and zero the rest of
        that.

        Raises:
            ShapeError: ``num_tokens`` is negative or more than a block holds.
            TandemError: latents in a file could not be read or written.
        """
        size = self.layout.block_size
        if not 0 <= num_tokens <= size:
            raise ShapeError(
                "kernels.copy_block", f"{num_tokens} tokens of a block of {size}: pass 0 to {size}"
            )
        for part in self._by_token:
            part[target, ..., :num_tokens, :] = part[source, ..., :num_tokens, :]
            part[target, ..., num_tokens:, :] = 0
        if self.latents is not None:
            self.latents.copy_block(source, target, num_tokens)
        if self.is_paired and self.windows is not None:
            self.windows.copy_block(source, target, num_tokens)

    def gather_index(self, block_ids: Tensor) -> Tensor:
        """Return the rows of ``chunks[layer]`` that hold the given blocks of several sequences.

        Args:
            block_ids: int64 [S, n].

        Returns: int64 [chunks * S * n], ordered so that the gathered rows can be viewed as [2, S *
            kv_heads, n * block_size, head_dim] (keys, then values), or for latents as [S, n *
            block_size, row_size].
        """
        kinds, heads = self.layout.chunk_shape or (1, 1)
        kind_ids = torch.arange(kinds, device=block_ids.device).view(kinds, 1, 1, 1) * heads
        head_ids = torch.arange(heads, device=block_ids.device).view(1, 1, heads, 1)
        return (block_ids[None, :, None] * self.rows_per_block + kind_ids + head_ids).flatten()


def _place_layers(
    layout: KVLayout, windows: PagedKvCache | None, window_layers: Sequence[int]
) -> tuple[LayerPlace, ...]:
    counts, places = [0, 0], list[LayerPlace]()
    num_layers = layout.num_layers + (0 if windows is None else windows.layout.num_layers)
    for layer in range(num_layers):
        group = int(layer in window_layers)
        places.append(LayerPlace(group, counts[group]))
        counts[group] += 1
    assert counts[0] == layout.num_layers, f"{counts} layers of a cache of {layout.num_layers}"
    return tuple(places)


def wrap_memory(memory: memoryview | NDArray[np.uint8], size_bytes: int, device: Device) -> Tensor:
    """View the first ``size_bytes`` of a given buffer as uint8; the tensor keeps the buffer alive.

    Raises: UnsupportedError (a device that cannot use host memory, or read-only memory); ShapeError
        (too few bytes, not contiguous, or not aligned).
    """
    where, field = "kernels.wrap_kv_cache", "memory"
    exporter: Any = memory  # numpy's stubs do not say that arrays have the buffer protocol.
    view = memoryview(exporter)
    if not device.is_host:
        raise UnsupportedError(
            where, f"host memory for a cache on {device.torch_device}: leave it out", field=field
        )
    if view.readonly:
        raise UnsupportedError(where, "the memory is read-only: map it writable", field=field)
    if not view.c_contiguous or view.nbytes < size_bytes:
        raise ShapeError(
            where,
            f"{view.nbytes} bytes, strides {view.strides}, need {size_bytes} contiguous bytes: "
            "allocate num_blocks * layout.bytes_per_block",
            field=field,
        )
    tensor = torch.frombuffer(view, dtype=torch.uint8)[:size_bytes]
    if tensor.data_ptr() % POOL_ALIGNMENT:
        raise ShapeError(
            where,
            f"the memory begins at {tensor.data_ptr():#x}, need a multiple of {POOL_ALIGNMENT}",
            field=field,
        )
    return tensor


def _view_indexed(
    tensor: Tensor, layout: MlaLayout, *, has_latents: bool
) -> tuple[list[Tensor], dict[int, Tensor], list[Tensor]]:
    """Return latents by layer, index keys by layer, and the scales of both.

    The first two are [num_blocks, block_size, size]; scales are [num_blocks, block_size, 2] bytes.
    Without latents in the blocks, the first list is empty.
    """
    size, item = layout.block_size, 1 if layout.is_coded else layout.item_bytes
    scale_bytes = 2 if layout.is_coded else 0
    latents: list[Tensor] = []
    keys: dict[int, Tensor] = {}
    scales: list[Tensor] = []

    def take(offset: int, width: int) -> Tensor:
        first = offset // item
        end = first + size * width
        if scale_bytes:
            own = tensor[:, end : end + size * scale_bytes]
            scales.append(own.unflatten(1, (size, scale_bytes)))
        return tensor[:, first:end].unflatten(1, (size, width))

    if has_latents:
        offsets = [layout.layer_slice(0, layer).offset for layer in range(layout.num_layers)]
        latents = [take(offset, layout.row_size) for offset in offsets]
    offsets = _list_index_offsets(layout, has_latents=has_latents)
    for layer, offset in zip(layout.index_layers, offsets, strict=True):
        keys[layer] = take(offset, layout.index_dim)
    return latents, keys, scales


def _list_index_offsets(layout: MlaLayout, *, has_latents: bool) -> list[int]:
    """Return at which byte of a block each layer's index keys begin, by which sparse attention
    chooses tokens.
    """
    if not has_latents:
        return [i * layout.index_bytes for i in range(len(layout.index_layers))]
    before = layout.bytes_per_layer
    return [layout.layer_slice(0, layer).offset + before for layer in layout.index_layers]


def _view_index_natively(tensor: Tensor, layout: MlaLayout, offsets: list[int]) -> KvPool:
    held = layout.dtype if layout.is_coded else ""
    view, dim = view_tensor(tensor), layout.index_dim
    return KvPool.placed(view, held, layout.block_size, dim, dim, offsets)


def _view_natively(tensor: Tensor, layout: KVLayout) -> KvPool | None:
    if not layout.num_layers or (not layout.is_coded and not is_native(tensor)):
        return None
    view, dtype, size = view_tensor(tensor), layout.dtype, layout.block_size
    if isinstance(layout, MlaLayout):
        rank = layout.kv_lora_rank
        if layout.index_layers:
            offsets = [layout.layer_slice(0, layer).offset for layer in range(layout.num_layers)]
            return KvPool.placed(
                view, dtype if layout.is_coded else "", size, layout.row_size, rank, offsets
            )
        if layout.is_coded:
            return KvPool.coded_latent(view, dtype, size, layout.row_size, rank)
        return KvPool.latent(view, rank)
    if layout.is_coded:
        return KvPool.coded(view, dtype, layout.num_kv_heads, size, layout.head_dim)
    return KvPool.grouped(view)
