"""The routed experts of a layer with packed weights, run by the native CPU kernels.

``PackedExperts`` owns the packed weights, or views those of a ``WeightCache``, and borrows a thread
pool; ``NativeExperts`` is the operator that loads and runs it in a model. Activations and router
weights are borrowed for a call. Results are bitwise independent of the batch, of the thread count
and, for integer formats, of the instruction set; see docs/design/kernels/kernels.md.

Shapes: T tokens, D hidden, F intermediate of one expert, E experts, K experts per token.
"""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem._native import ExpertBank, ThreadPool, count_expert_bytes
from tandem.core.errors import ShapeError
from tandem.core.model.layers import SILU, Activation, ExpertsSpec
from tandem.kernels.cpu.adapted_experts import ExpertFactors, run_adapted_experts
from tandem.kernels.cpu.autograd import run_experts
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.experts import (
    PendingExperts,
    RoutedExperts,
    is_down,
    list_expert_weights,
    read_biases,
    read_experts,
)
from tandem.kernels.operators.operator import allocate_scratch
from tandem.kernels.weights.blocks import BlockMatrix, CodedMatrix, convert_codes, select_outputs
from tandem.kernels.weights.formats import QuantizedMatrix, WeightFormat, split_pair
from tandem.kernels.weights.recode import can_represent

__all__ = ["NativeExperts", "PackedExperts", "WeightCache", "count_bytes", "start_submitter"]


def count_bytes(
    weight_format: WeightFormat,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
) -> int:
    """Return the packed bytes of a layer's experts, scales and padding included.

    Raises: as ``PackedExperts``.
    """
    return count_expert_bytes(
        **weight_format.fields,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        down_format=_list_fields(weight_format.down),
    )


def _list_fields(
    weight_format: WeightFormat | None,
) -> tuple[int, int, bool, bool, int, int, bool] | None:
    return None if weight_format is None else weight_format.field_tuple


class PackedExperts:
    """Gated experts in one or two weight formats: ``down(activation(gate(x)) * up(x))``.

    Args:
        weight_format: how the weights are stored; of two formats, gate and up in the first, down in
            ``weight_format.down``.
        num_experts: E.
        hidden_size: D; whole groups of the format.
        intermediate_size: F; whole groups of the format.
        pool: runs the kernels; borrowed for the life of the object.
        isa: a name of ``tandem._native.kernel_isas()``; None = the widest that this CPU has.
        storage: uint8, ``count_bytes`` of them, 64-byte aligned, kept; read-only ones hold weights
            that are packed already. None = memory of its own.
        activation: function applied to the gate; SiLU (SwiGLU) by default.
        has_bias: True if experts have biases, which are zero until ``set_bias``.
        num_parts: shares of F, each packed and computed by the threads of its NUMA node; use the
            pool's number of nodes. Results depend bitwise on the number of parts, not on the nodes.
            With several parts ``storage`` is copied, not kept.
        is_bound: True to reserve each part's memory on the NUMA node of the threads that compute
            it, and to copy ``storage`` there even if there is one part. If the operating system
            refuses, memory lies where it is first touched, and the property ``is_bound`` is false.
        is_apart: True to allocate no weights: ``run_apart`` is told at each call where the experts
            lie.

    Weights are zero until packed. ``forward`` is thread-safe once they are.

    Raises: ShapeError (sizes that are not whole groups); UnsupportedError (format, ISA);
        ConfigError (unknown ISA or activation, a size below 1, more parts than blocks of columns);
        CapacityError (memory).
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        pool: ThreadPool,
        isa: str | None = None,
        storage: NDArray[np.uint8] | None = None,
        activation: Activation = SILU,
        has_bias: bool = False,
        num_parts: int = 1,
        is_bound: bool = False,
        is_apart: bool = False,
    ) -> None:
        self.weight_format = weight_format
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self._pool = pool
        is_copied = is_bound or num_parts > 1
        self._bank = ExpertBank(
            **weight_format.fields,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            isa="" if isa is None else isa,
            storage=None if is_copied else storage,
            activation=activation.name,
            alpha=activation.alpha,
            limit=activation.bound,
            up_offset=activation.up_offset,
            has_bias=has_bias,
            num_parts=num_parts,
            part_nodes=_list_part_nodes(pool, num_parts) if is_bound else [],
            down_format=_list_fields(weight_format.down),
            is_apart=is_apart,
        )
        if storage is not None and is_copied:
            self._bank.load(pool, storage)

    @classmethod
    def pack(
        cls,
        weight_format: WeightFormat,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        *,
        pool: ThreadPool,
        isa: str | None = None,
        activation: Activation = SILU,
        num_parts: int = 1,
        is_bound: bool = False,
    ) -> "PackedExperts":
        """Quantize and pack all experts of a layer.

        Args:
            weight_format: format to store the weights in.
            gate_up_E2FD: float32 or bfloat16 [E, 2 F, D], gate's rows first, as transformers stores
                them; contiguous, on the CPU; not kept.
            down_EDF: down projections, of the same dtypes, [E, D, F].
            pool: as for the class.
            isa: as for the class.
            activation: as for the class.
            num_parts: as for the class.
            is_bound: as for the class.

        Raises: the errors of the class and of ``pack_expert``.
        """
        if gate_up_E2FD.ndim != 3 or down_EDF.ndim != 3 or gate_up_E2FD.shape[1] % 2:
            raise ShapeError(
                "kernels.pack",
                f"gate_up {tuple(gate_up_E2FD.shape)}, down {tuple(down_EDF.shape)}: give "
                "[E, 2 F, D] and [E, D, F]",
                field="gate_up",
            )
        num_experts, rows, hidden_size = gate_up_E2FD.shape
        if len(down_EDF) != num_experts:
            what = f"{num_experts} experts in gate_up, {len(down_EDF)} in down"
            raise ShapeError("kernels.pack", what, field="down")
        experts = cls(
            weight_format,
            num_experts,
            hidden_size,
            rows // 2,
            pool=pool,
            isa=isa,
            activation=activation,
            num_parts=num_parts,
            is_bound=is_bound,
        )
        pairs: Iterable[tuple[Tensor, Tensor]] = zip(gate_up_E2FD, down_EDF, strict=True)
        for expert_id, (gate_up, down) in enumerate(pairs):
            experts.pack_expert(expert_id, gate_up[: rows // 2], gate_up[rows // 2 :], down)
        return experts

    def pack_expert(self, expert_id: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        """Quantize and pack one expert, replacing its weights.

        The tensors are float32 or bfloat16, contiguous, on the CPU; they are not kept.

        Raises: ShapeError (names the tensor and both shapes); NotFoundError (expert);
            ConflictError (read-only storage); UnsupportedError (a weight is not finite, or too
            large for an fp16 scale).
        """
        views = [tensor.detach() for tensor in (gate_FD, up_FD, down_DF)]
        self._bank.pack(self._pool, expert_id, *views)

    def pack_codes(
        self, expert_id: int, gate: CodedMatrix, up: CodedMatrix, down: CodedMatrix
    ) -> None:
        """Pack one expert whose weights are quantized codes already, replacing its weights.

        The codes are not kept.

        Raises: the errors of ``pack_expert``; UnsupportedError (a code outside of the format, or a
            scale that is not finite).
        """
        if (
            isinstance(gate, BlockMatrix)
            and isinstance(up, BlockMatrix)
            and isinstance(down, BlockMatrix)
        ):
            self._bank.pack_blocks(self._pool, expert_id, gate.blocks, up.blocks, down.blocks)
            return
        assert (
            isinstance(gate, QuantizedMatrix)
            and isinstance(up, QuantizedMatrix)
            and isinstance(down, QuantizedMatrix)
        ), "one expert in blocks and in codes"
        self._bank.pack_codes(self._pool, expert_id, gate.arrays, up.arrays, down.arrays)

    def set_bias(self, expert_id: int, gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> None:
        """Set the biases of one expert, copied from any floating dtype; call it before any
        ``forward``.

        Raises: ShapeError (a bias of another size); NotFoundError (no such expert); ConflictError
            (the experts were made without biases).
        """
        views = [tensor.detach().float().contiguous() for tensor in (gate_F, up_F, down_D)]
        self._bank.set_bias(expert_id, *views)

    @property
    def isa(self) -> str:
        """Name of the instruction set whose kernels run."""
        return self._bank.isa

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert, scales included."""
        return self._bank.expert_bytes

    @property
    def num_parts(self) -> int:
        """Number of parts into which each expert's intermediate dimension is divided; threads of
        one NUMA node compute a part.
        """
        return self._bank.num_parts

    @property
    def is_bound(self) -> bool:
        """True if each part's memory is bound to its NUMA node."""
        return self._bank.is_bound

    def find_part_nodes(self) -> list[int]:
        """Return the NUMA node that each part's first page lies on, once weights are packed.

        Raises: UnsupportedError (the kernel does not say, as in many containers).
        """
        return self._bank.find_part_nodes()

    @property
    def packed(self) -> NDArray[np.uint8]:
        """Packed bytes [E, expert_bytes], not copied; laid out as
        docs/design/models/weight_formats.md says.

        Raises: UnsupportedError (several parts).
        """
        return self._bank.array()

    @property
    def inner_columns(self) -> int:
        """Columns that gate and up each take, padded to whole blocks: F or a little more."""
        return self._bank.inner_columns

    @property
    def inner_dtype(self) -> torch.dtype:
        """Dtype of gate, up and their gradients in the backward pass: float32 for f32 weights, else
        bfloat16.
        """
        return torch.float32 if self.weight_format.bits == 32 else torch.bfloat16

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        delta_PC: Tensor | None = None,
        kept_PC: Tensor | None = None,
    ) -> Tensor:
        """Sum the chosen experts' outputs, each scaled by its router weight.

        The last two arguments serve training. Their rows are the P pairs of a token and an expert
        that is not -1, sorted by expert, then token, then slot; a row is gate, then up,
        ``inner_columns`` each.

        Args:
            x_TD: float32 or bfloat16, CPU, contiguous; not modified. Coded once per token: to
                bf16, to float32 beside f32, or for integer formats to int8 with a step per group.
            ids_TK: int32 or int64 in [-1, E); -1 = computed elsewhere, adds 0.
            weights_TK: float32, used as they are.
            delta_PC: float32, added to gate and up before the activation; zero beyond F.
            kept_PC: of ``inner_dtype``; gate and up are written to it as the activation gets them.

        Returns: float32 [T, D], new. A NaN or infinity in a token makes that token NaN, no other.
        Raises: ShapeError (names the argument and what is wanted).
        Cost: reads each chosen expert's packed weights once for up to some tens of its tokens.
            Blocks; releases the GIL; thread-safe.
        """
        out_TD = torch.empty(x_TD.shape, dtype=torch.float32)
        tensors = (x_TD.detach(), ids_TK, weights_TK.detach(), out_TD)
        if delta_PC is None and kept_PC is None:
            self._bank.forward(self._pool, *tensors)
        else:
            self._bank.forward(self._pool, *tensors, delta_PC, kept_PC)
        return out_TD

    def backward(
        self,
        x_TD: Tensor | None,
        ids_TK: Tensor,
        weights_TK: Tensor,
        d_out_TD: Tensor,
        *,
        kept_PC: Tensor | None = None,
        delta_PC: Tensor | None = None,
        extra_PF: Tensor | None = None,
        d_gate_up_PC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``x_TD`` and ``weights_TK``, float32, new.

        The gradients are those of ``forward`` with dequantized weights; the quantization of
        activations counts as rounding, whose gradient is 1. Weights, ``d_out_TD``, gate and up and
        their gradients are rounded to ``inner_dtype``; sums are in fp32.

        Args:
            x_TD: the same as in ``forward``; not needed if ``kept_PC`` is given.
            ids_TK: the same as in ``forward``.
            weights_TK: float32.
            d_out_TD: float32 or bfloat16, the gradient with respect to what ``forward`` returned.
            kept_PC: as written by ``forward``; None = computed again, with the same result.
            delta_PC: the same as in ``forward``.
            extra_PF: float32 [P, ``inner_columns``], added to the gradient of each pair's
                intermediate, to which its router weight has been applied.
            d_gate_up_PC: of ``inner_dtype``; the gradients of gate and up are written to it.

        Raises: ShapeError (a tensor of another shape or dtype, or an expert id out of range;
            ``d_gate_up_PC`` is then untouched); CapacityError (no memory for scratch).
        Cost: three products with weights that are transposed piece by piece, and, if gate and up
            are computed again, their product as in ``forward``; scratch memory for 2 F items of
            ``inner_dtype`` for each pair, 4 F without ``kept_PC``. A row's result does not depend
            on the other rows. Blocks; releases the GIL; thread-safe.
        """
        d_x_TD = torch.empty(d_out_TD.shape, dtype=torch.float32)
        d_weights_TK = torch.empty_like(weights_TK)
        self._bank.backward(
            self._pool,
            None if x_TD is None else x_TD.detach(),
            ids_TK.detach(),
            weights_TK.detach(),
            d_out_TD.detach(),
            d_x_TD,
            d_weights_TK,
            kept_PC,
            delta_PC,
            extra_PF,
            d_gate_up_PC,
        )
        return d_x_TD, d_weights_TK

    def submit(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Future[None], Tensor]:
        """Begin ``forward`` in the background; return a future of its end and the output tensor.

        The tensor is complete once the future is. Submissions of a process run one after the other
        on the pool's threads. The inputs must not change until then. The future raises what
        ``forward`` raises.
        """
        out_TD = torch.empty(x_TD.shape, dtype=torch.float32)
        tensors = (x_TD.detach(), ids_TK, weights_TK.detach(), out_TD)
        submitter = start_submitter(os.getpid())
        return submitter.submit(self._bank.forward, self._pool, *tensors), out_TD

    def run(self, x_TD: Buffer, ids_TK: Buffer, weights_TK: Buffer, out_TD: Buffer) -> None:
        """Write the result of ``forward`` to a float32 buffer; ids are int64, nothing is
        converted.
        """
        views = (x_TD.view, ids_TK.view, weights_TK.view, out_TD.view)
        self._bank.forward(self._pool, *views)

    def run_apart(
        self,
        x_TD: Buffer,
        ids_TK: Buffer,
        weights_TK: Buffer,
        out_TD: Buffer,
        memory: NDArray[np.uint8],
        places: NDArray[np.int64],
        first: int = 0,
        end: int | None = None,
        *,
        is_added: bool = False,
    ) -> None:
        """Run experts whose packed weights lie anywhere in ``memory``; otherwise as ``run``.

        Args:
            x_TD: hidden states, as for ``run``.
            ids_TK: expert ids, as for ``run``.
            weights_TK: router weights, as for ``run``.
            out_TD: result, as for ``run``.
            memory: bytes that hold the packed experts.
            places: offset of each expert in ``memory``; -1 if the expert is not there.
            first: lowest expert id that is computed; lower ids add nothing.
            end: one past the highest expert id that is computed; None: all from ``first``.
            is_added: True to add to ``out_TD``; over ascending ranges the sum is bitwise that of
                one call.

        Raises: ConflictError (a chosen expert has no place); ``out_TD`` is then untouched.
        """
        views = (x_TD.view, ids_TK.view, weights_TK.view, out_TD.view)
        last = self.num_experts if end is None else end
        self._bank.forward_apart(self._pool, *views, memory, places, first, last, is_added)

    def read_weights(self, num_experts: int) -> None:
        """Read the packed bytes of the first experts without computing: the bandwidth limit in
        benchmarks.

        Raises: NotFoundError (there are fewer experts).
        """
        self._bank.read_weights(self._pool, num_experts)

    def multiply_registers(self, num_macs: int) -> None:
        """Perform ``num_macs`` multiply-adds on registers: the compute limit in benchmarks."""
        self._bank.multiply_registers(self._pool, num_macs)


@cache
def start_submitter(pid: int) -> ThreadPoolExecutor:
    """Return the process's thread that waits for the pool in place of the caller.

    The thread holds the GIL only to begin and end a task. It is cached by process id, because a
    forked child does not inherit its parent's threads.
    """
    del pid
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-experts")


def _list_part_nodes(pool: ThreadPool, num_parts: int) -> list[int]:
    """Return the NUMA node of each part; the kernels assign parts to sub-pools by the same rule."""
    nodes = pool.node_ids
    return [nodes[part * len(nodes) // num_parts] for part in range(num_parts)]


class WeightCache(Protocol):
    """Cache of packed weights on disk, by the dotted path of the module that they belong to."""

    def find(self, name: str, size_bytes: int) -> NDArray[np.uint8] | None:
        """Return the module's packed weights, mapped read-only; None if the cache has none."""
        ...

    def keep(self, name: str, packed: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Write packed weights to the cache; return them mapped from disk, to use instead.

        None: the given memory stays in use, and may be read until it has been written.
        """
        ...

    def locate(self, name: str, size_bytes: int) -> Path | None:
        """Return the file of the module's packed weights; None if there is none."""
        ...

    def is_unchanged(self, name: str, size_bytes: int) -> bool:
        """Read the module's file and return True if it has the content that was written."""
        ...


class NativeExperts(RoutedExperts):
    """Routed experts of a layer in a weight format, run by the native CPU kernels.

    Args:
        spec: sizes and activation of the experts.
        weight_format: how the weights are stored.
        pool: runs the kernels; borrowed for the life of the operator.
        cache: keeps packed weights between runs; None: pack at each load.
        num_parts: shares of F, one for each NUMA node that has threads. A single share is used
            directly from the cache's mapping; several are copied to memory of their nodes.

    Raises: the errors of ``PackedExperts``, at load.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        *,
        weight_format: WeightFormat,
        pool: ThreadPool,
        cache: WeightCache | None = None,
        num_parts: int = 1,
    ) -> None:
        super().__init__(spec)
        self.weight_format = weight_format
        self._pool = pool
        self._cache = cache
        self.num_parts = num_parts
        self.biases: tuple[Tensor, Tensor, Tensor] | None = None
        """Biases of gate [E, F], up [E, F] and down [E, D] after loading; None if the experts have
        none.
        """

    @property
    def size_bytes(self) -> int:
        """Packed bytes of the layer's weights in one part, the size of their file in the cache."""
        sizes = (self.num_experts, self.hidden_size, self.intermediate_size)
        return count_bytes(self.weight_format, *sizes)

    def load(self, reader: WeightReader, name: str) -> None:
        """Map the weights from the cache, or read and pack the checkpoint's."""
        cache, size_bytes = self._cache, self.size_bytes
        found = None if cache is None else cache.find(name, size_bytes)
        if found is not None:
            self._experts = self._make(found, self.num_parts)
            reader.skip(f"{name}.")
        else:
            self._experts = self._make(None, self.num_parts if cache is None else 1)
            self._pack(reader, name)
            if cache is not None:
                packed = self._experts.packed.reshape(-1)
                kept = cache.keep(name, packed)
                if kept is not None or self.num_parts > 1:
                    self._experts = self._make(packed if kept is None else kept, self.num_parts)
        self._load_biases(reader, name)
        self.packed_bytes = self.num_experts * self._experts.expert_bytes
        self.is_misplaced = self.num_parts > 1 and not self._experts.is_bound

    def _load_biases(self, reader: WeightReader, name: str) -> None:
        """Read the experts' biases, if any; they are too small to be cached."""
        if self.has_bias:
            gate, up, down = (part.cpu() for part in read_biases(self, reader, name))
            self.biases = (gate, up, down)
            self._set_biases(self._experts)

    def take(self, experts: PackedExperts) -> None:
        """Use experts that are packed already, instead of calling ``load``; they have no biases."""
        self._experts = experts
        self.packed_bytes = self.num_experts * experts.expert_bytes

    def _set_biases(self, experts: PackedExperts) -> None:
        if self.biases is not None:
            for expert_id, biases in enumerate(zip(*self.biases, strict=True)):
                experts.set_bias(expert_id, *biases)

    @property
    def is_in_one_piece(self) -> bool:
        """True if the weights are in memory and in one part, so that ``view_packed`` works."""
        return self._experts.num_parts == 1

    def view_packed(self) -> NDArray[np.uint8]:
        """Return the packed bytes, [E, expert_bytes], not copied.

        Raises: UnsupportedError (the weights are in several parts, or on disk).
        """
        return self._experts.packed

    def make_apart(self) -> PackedExperts:
        """Return experts of the same sizes without weights, for ``PackedExperts.run_apart``."""
        apart = PackedExperts(
            self.weight_format,
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            pool=self._pool,
            activation=self.activation,
            has_bias=self.has_bias,
            is_apart=True,
        )
        self._set_biases(apart)
        return apart

    def _make(self, storage: NDArray[np.uint8] | None, num_parts: int) -> PackedExperts:
        return PackedExperts(
            self.weight_format,
            self.num_experts,
            self.hidden_size,
            self.intermediate_size,
            pool=self._pool,
            storage=storage,
            activation=self.activation,
            has_bias=self.has_bias,
            num_parts=num_parts,
            is_bound=num_parts > 1,
        )

    def _pack(self, reader: WeightReader, name: str) -> None:
        """Pack the checkpoint's codes if this format can hold them, else quantize its values."""
        names = list_expert_weights(reader, name, self.num_experts)
        gate_up, down_format = split_pair(self.weight_format)
        wanted = {True: down_format, False: gate_up}
        formats = [(wanted[is_down(weight)], reader.find_format(weight)) for weight in names]
        if all(held is not None and can_represent(wide, held) for wide, held in formats):
            for i in range(self.num_experts):
                gate, up, down = self._read_codes(reader, name, i)
                gate, up = (convert_codes(matrix, wanted[False]) for matrix in (gate, up))
                self._experts.pack_codes(i, gate, up, convert_codes(down, wanted[True]))
        else:
            self._code(reader, name)

    def _read_codes(
        self, reader: WeightReader, name: str, expert_id: int
    ) -> tuple[CodedMatrix, CodedMatrix, CodedMatrix]:
        """Read one expert's quantized gate, up and down from the checkpoint."""
        if not reader.has(f"{name}.gate_up_proj"):
            names = (f"{name}.{expert_id}.{part}_proj.weight" for part in ("gate", "up", "down"))
            gate, up, down = (reader.read_packed(n) for n in names)
            return gate, up, down
        both = reader.read_packed(f"{name}.gate_up_proj", expert_id)
        gate, up = (select_outputs(both, part) for part in self.spec.gate_up_rows)
        return gate, up, reader.read_packed(f"{name}.down_proj", expert_id)

    def _code(self, reader: WeightReader, name: str) -> None:
        """Quantize the checkpoint's values, in any of its layouts, holding at most one layer of
        them.
        """
        size, hidden = self.intermediate_size, self.hidden_size
        if self.is_transposed:
            gate_up = allocate_scratch(self.num_experts, hidden, 2 * size, dtype=reader.dtype)
            down = allocate_scratch(self.num_experts, size, hidden, dtype=reader.dtype)
            reader.read_into(f"{name}.gate_up_proj", gate_up)
            reader.read_into(f"{name}.down_proj", down)
            for i in range(self.num_experts):
                turned = gate_up[i].t()
                gate, up = (turned[rows].contiguous() for rows in self.spec.gate_up_rows)
                self._experts.pack_expert(i, gate, up, down[i].t().contiguous())
            return
        is_stacked = reader.has(f"{name}.gate_up_proj")
        count = self.num_experts if is_stacked else 1
        gate_up = allocate_scratch(count, 2 * size, hidden, dtype=reader.dtype)
        down = allocate_scratch(count, hidden, size, dtype=reader.dtype)
        if is_stacked:
            read_experts(reader, name, gate_up, down)
        for i in range(self.num_experts):
            if not is_stacked:
                read_experts(reader, name, gate_up, down, first=i)
            slot = i if is_stacked else 0
            gate, up = gate_up[slot, :size], gate_up[slot, size:]
            self._experts.pack_expert(i, gate, up, down[slot])

    def add_into_(self, residual_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        """Add the experts' weighted sum to the residual stream."""
        residual_TD += self._experts.forward(x_TD.contiguous(), ids_TK, w_TK.float())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' weighted sum; differentiable if gradients are enabled."""
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return run_experts(self._experts, hidden_states, top_k_index, top_k_weights)

    def run_adapted(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        factors: ExpertFactors,
    ) -> Tensor:
        """Return the weighted sum of experts with LoRA factors, differentiable."""
        return run_adapted_experts(
            self._experts, self.activation, factors, hidden_states, top_k_index, top_k_weights
        )

    def submit(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> PendingExperts:
        """Begin to compute the experts in the background; return their pending result."""
        x, weights = hidden_states.contiguous(), top_k_weights.float()
        future, out = self._experts.submit(x, top_k_index, weights)
        return PendingExperts(future, lambda: torch.zeros_like(hidden_states).add_(out))

    def run(self, x_TD: Buffer, ids_TK: Buffer, w_TK: Buffer, out_TD: Buffer) -> None:
        """Write the experts' weighted sum to a float32 buffer; ids are int64, weights float32."""
        self._experts.run(x_TD, ids_TK, w_TK, out_TD)
