"""LoRA adapters on the matrices of operators: ``y = x W^T + b + scale * (x A^T) B^T``.

An ``AdaptedMatrix`` replaces an operator's matrix and adds, for a step's rows that belong to an
adapter, that adapter's product. Both products are summed in float32 and rounded once. A row's LoRA
product is one sum over K and one over the rank, each in a fixed order, so it does not depend on
other rows; rows without an adapter get bitwise the results of a model without adapters.

A captured step computes the products by ``kernels.torch.factors`` instead, whose graph is the same
for all adapters; their sums have another order.

Shapes: T rows, K inputs, N outputs, r rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tandem._native import LoraBank, LoraRows, TensorView, ThreadPool
from tandem.core.errors import InternalError
from tandem.kernels.cpu.linear import PANEL_COLUMNS
from tandem.kernels.interfaces import AdaptableHeads, AdaptableMatrix, HeadMatrix, LoraPart, Matrix
from tandem.kernels.native import Buffer, view_tensor
from tandem.kernels.torch.factors import NO_PLACE, FixedFactors

CPU_DEVICE = torch.device("cpu")

__all__ = [
    "AdaptedHeads",
    "AdaptedLatents",
    "AdaptedMatrix",
    "AdaptedRows",
    "StepAdapters",
]


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """A linear module of the checkpoint whose outputs are a range of the outputs of an operator's
    matrix.
    """

    matrix: AdaptableMatrix
    in_features: int
    out_features: int
    first_output: int = 0
    order: Tensor | None = None
    """Index of the checkpoint's output that each output of this operator's part is, int64 [N];
    None: the order is the same.
    """

    def set_delta(self, slot: int, a_RK: Tensor, b_NR: Tensor, scale: float) -> None:
        """Set an adapter's LoRA factors in a slot, with outputs in the order of the matrix."""
        ordered = b_NR if self.order is None else b_NR[self.order]
        self.matrix.add_parts(slot, [LoraPart(a_RK, ordered, scale, self.first_output)])


@dataclass(frozen=True, slots=True)
class AdaptedLatents:
    """The checkpoint's up-projection that multi-head latent attention has absorbed.

    Its input is the latent. Head h has n + v outputs: n for keys, whose matrix is applied
    transposed to queries, and v for values.
    """

    key_heads: AdaptableHeads
    value_heads: AdaptableHeads
    in_features: int
    num_heads: int
    key_size: int
    """Key items of a head without RoPE, n."""
    value_size: int
    """Value items of a head, v."""

    @property
    def out_features(self) -> int:
        """Number of outputs of the checkpoint's up-projection."""
        return self.num_heads * (self.key_size + self.value_size)

    def set_delta(self, slot: int, a_RK: Tensor, b_NR: Tensor, scale: float) -> None:
        """Set an adapter's LoRA factors in a slot, divided among each head's key and value
        matrices.
        """
        heads = b_NR.view(self.num_heads, -1, len(a_RK))
        # Both are copied, though a view might do, so that neither keeps memory of the other alive.
        plain = torch.contiguous_format
        keys = heads[:, : self.key_size].transpose(1, 2).clone(memory_format=plain)
        values = heads[:, self.key_size :].clone(memory_format=plain)
        up = a_RK.t()
        self.key_heads.add_parts(
            slot,
            [LoraPart(k, up, scale, head=h) for h, k in enumerate(keys)],
        )
        self.value_heads.add_parts(
            slot, [LoraPart(a_RK, v, scale, head=h) for h, v in enumerate(values)]
        )


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a step (one for each token) that belong to one adapter."""

    slot: int
    rows: Tensor
    """Row numbers, int64, ascending, on the model's device."""
    numbers: list[int]
    """The same row numbers as a list on the host."""


class StepAdapters:
    """The rows of the running step by adapter; all matrices of a model share this object.

    Use from one thread; ``begin`` and ``end`` enclose a step.

    Args:
        num_slots: number of adapters that can be loaded.
        is_native: True if native kernels compute the adapters' products, False for torch.
        device: the model's device, if torch computes.
        pool: threads for the native kernels; None: the caller's thread.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        is_native: bool,
        device: torch.device = CPU_DEVICE,
        pool: ThreadPool | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.is_native = is_native
        self.pool = pool
        self._device = device
        self.matrices: list[AdaptedMatrix | AdaptedHeads] = []
        """All matrices that share this object."""
        self.groups: tuple[RowGroup, ...] = ()
        self.native: LoraRows | None = None
        """The rows by adapter for the native kernels; None outside of a step, and in a step without
        adapters.
        """
        self.num_rows = 0
        self._sums: dict[tuple[int, ...], Buffer] = {}
        self.places: Tensor | None = None
        """Place of each row's factors in a step at fixed addresses, int64 [T]; None: another step.
        """
        self._places_by_size: dict[int, Tensor] = {}
        self._place_by_slot: dict[int, int] = {}
        self._contents = [0] * num_slots
        """For each adapter slot: the number of adapters that it held before its present one, which
        tells an old content from a new one.
        """
        self._placed: dict[int, int] = {}
        """For each adapter slot with a place at a fixed address: the value of ``_contents`` when
        the factors were moved there. If it differs, those of the present adapter are to be moved.
        """
        self._layout = 0

    def begin(self, num_rows: int, rows_by_slot: Mapping[int, list[int]]) -> None:
        """Begin a step of ``num_rows`` rows, given the rows of each adapter by the adapter's slot;
        ``end`` ends it.
        """
        if num_rows != self.num_rows:
            self._sums.clear()
        self.num_rows = num_rows
        if self.is_native and rows_by_slot:
            self.native = LoraRows(num_rows)
            for slot, rows in rows_by_slot.items():
                self.native.add(slot, rows)
        elif not self.is_native:
            self.groups = tuple(
                RowGroup(slot, torch.tensor(rows, device=self._device), rows)
                for slot, rows in rows_by_slot.items()
            )

    def fix(self, size: int) -> int:
        """Compute the begun step's products at fixed addresses; return the number of their layout,
        which changes whenever memory moves.

        The factors of the step's adapters are moved to their places first, unless they are there.
        Steps of one size and one layout use the same memory, whatever their adapters; a layout that
        was replaced never returns.

        Args:
            size: rows of the step with those that pad it, which repeat the first row.
        """
        assert not self.is_native, "native kernels look up the rows of each step"
        numbers = [NO_PLACE] * self.num_rows
        for group in self.groups:
            place = self.place(group.slot)
            for row in group.numbers:
                numbers[row] = place
        numbers += numbers[:1] * (size - len(numbers))
        places = self._places_by_size.get(size)
        if places is None:
            places = torch.zeros(size, dtype=torch.int64, device=self._device)
            self._places_by_size[size] = places
        places.copy_(torch.tensor(numbers))
        self.places, self.num_rows = places, size
        return self._layout

    def place(self, slot: int) -> int:
        """Move the factors of the adapter in a slot to fixed addresses, unless they are there;
        return its place. The caller ensures that no step runs, or that this is its thread.
        """
        place = self._place_by_slot.setdefault(slot, len(self._place_by_slot) + 1)
        if self._placed.get(slot) != self._contents[slot]:
            for matrix in self.matrices:
                # Counted at once: if memory is lacking for a later matrix, graphs with the
                # addresses that this one had are not to be used either.
                self._layout += matrix.place(slot, place)
            self._placed[slot] = self._contents[slot]
        return place

    def empty(self, slot: int) -> None:
        """Remove the factors of a slot from all matrices at once. The caller ensures that no
        running step uses the slot.
        """
        self._contents[slot] += 1
        for matrix in self.matrices:
            matrix.remove_parts(slot)

    def end(self) -> None:
        """End the step that ``begin`` began: no row belongs to an adapter any more."""
        self.groups, self.native, self.places = (), None, None

    def sum_buffer(self, *shape: int) -> Buffer:
        """Return a float32 buffer [T, *shape] that the step's matrices share, with its previous
        contents.
        """
        found = self._sums.get(shape)
        if found is None:
            found = Buffer.allocate(self.num_rows, *shape, dtype=torch.float32)
            self._sums[shape] = found
        return found


class _Adapted:
    """Addition of adapters' products to the result of a matrix, or of one matrix per head.

    Args:
        step: the rows of each adapter; shared by all matrices of a model.
        out_shape: (heads, outputs of each); 1 head for a matrix without heads.
    """

    def __init__(self, step: StepAdapters, out_shape: tuple[int, int]) -> None:
        self._step = step
        self._out_shape = out_shape
        self._bank = LoraBank(step.num_slots) if step.is_native else None
        self._parts: dict[int, list[LoraPart]] = {}
        """LoRA factors by adapter slot, if torch and not a native kernel computes; without those of
        ``_places``.
        """
        self._factors: FixedFactors | None = None
        """LoRA factors at fixed addresses, which captured steps (replayed graphs) read; None: none
        was moved there.
        """
        self._places: dict[int, int] = {}
        """Place in ``_factors`` by adapter slot, of those whose factors lie there and nowhere
        else.
        """

    def add_parts(self, slot: int, parts: list[LoraPart]) -> None:
        """Add LoRA factors of the adapter in a slot. The caller ensures that no running step uses
        the slot.
        """
        if self._bank is None:
            assert slot not in self._places, f"slot {slot} is not empty"
            self._parts[slot] = [*self._parts.get(slot, ()), *parts]
            return
        packed: dict[int, TensorView] = {}
        for part in parts:
            down = view_tensor(part.a_RK.contiguous())
            # The heads of latent attention's keys have one B, which is packed once.
            up = packed.get(id(part.b_NR))
            if up is None:
                up = packed[id(part.b_NR)] = view_tensor(_pack_panels(part.b_NR))
            size = len(part.b_NR)
            self._bank.add_part(slot, down, up, part.scale, part.first_output, size, part.head)

    def remove_parts(self, slot: int) -> None:
        """Remove an adapter's factors at once. The caller ensures that no running step uses it."""
        self._parts.pop(slot, None)
        self._places.pop(slot, None)
        if self._bank is not None:
            self._bank.clear(slot)

    def place(self, slot: int, place: int) -> bool:
        """Move a slot's factors to a place at fixed addresses; return True if a graph that was
        captured before does not compute with them.
        """
        if slot in self._places:
            return False  # Moved by a call that failed at a later matrix.
        parts, factors = self._parts.get(slot, ()), self._factors
        if factors is None:
            if not parts:
                return False
            factors = self._factors = FixedFactors(*self._out_shape)
        is_moved = factors.put(place, parts)
        if parts:
            self._places[slot] = place
            del self._parts[slot]
        return is_moved

    def _find_parts(self, slot: int) -> Sequence[LoraPart]:
        """Return a slot's factors, wherever they lie."""
        place = self._places.get(slot)
        if place is None or self._factors is None:
            return self._parts.get(slot, ())
        return self._factors.list_parts(place)

    @property
    def _is_needed(self) -> bool:
        """True if the step has rows of an adapter that changes this matrix; in a step at fixed
        addresses, if any such step's adapter changed it.
        """
        if self._bank is not None:
            rows = self._step.native
            return rows is not None and self._bank.is_needed(rows)
        if self._step.places is not None:
            return self._factors is not None
        parts, places = self._parts, self._places
        return any(group.slot in parts or group.slot in places for group in self._step.groups)

    def _add(self, x: Buffer, sums: Buffer, out: Buffer | None, *, is_added: bool) -> None:
        """Add adapters' products to float32 sums in place, and round these to ``out``; [T, ...] or
        [T, H, ...].
        """
        step, num_rows = self._step, len(x.tensor)
        if num_rows != step.num_rows:
            what = f"{num_rows} rows of a step of {step.num_rows}: whose are they?"
            raise InternalError("kernels.lora", what)
        if self._bank is not None:
            assert step.native is not None, "no step runs"
            out_view = None if out is None else out.view
            self._bank.run(x.view, sums.view, step.native, out_view, is_added, step.pool)
            return
        has_heads = x.tensor.dim() == 3
        x_THK = x.tensor if has_heads else x.tensor[:, None]
        sums_THN = sums.tensor if has_heads else sums.tensor[:, None]
        if step.places is not None:
            assert self._factors is not None, "no adapter changes this matrix"
            self._factors.add_(sums_THN, x_THK, step.places)
        for group in () if step.places is not None else step.groups:
            for part in self._find_parts(group.slot):
                x_RK = x_THK[group.rows, part.head].float()
                low = x_RK @ part.a_RK.float().t() * part.scale
                end = part.first_output + len(part.b_NR)
                # A factor at a fixed address is stored transposed; the product is to have the same
                # operands, and so the same bits, as before it was moved there.
                b_NR = part.b_NR.contiguous().float()
                sums_THN[group.rows, part.head, part.first_output : end] += low @ b_NR.t()
        if out is not None and is_added:
            out.tensor.add_(sums.tensor)
        elif out is not None:
            out.tensor.copy_(sums.tensor)


def _pack_panels(b_NR: Tensor) -> Tensor:
    """Return B in panels of 64 columns, [panels, r, 64], padded with zeros."""
    padding = -len(b_NR) % PANEL_COLUMNS
    padded = functional.pad(b_NR, (0, 0, 0, padding))
    return padded.unflatten(0, (-1, PANEL_COLUMNS)).transpose(1, 2).contiguous()


class AdaptedMatrix(_Adapted):
    """A ``Matrix`` with LoRA adapters.

    Args:
        base: the matrix without adapters; owned.
        step: the rows of each adapter in the running step.
    """

    def __init__(self, base: Matrix, step: StepAdapters) -> None:
        super().__init__(step, (1, base.out_features))
        step.matrices.append(self)
        self.base = base
        self.out_features = base.out_features

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Dtype that the base matrix asks ``run`` to write; None: that of the input."""
        return self.base.out_dtype

    def forward(self, x_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return ``x W^T + b`` with the adapters' products, in ``dtype``."""
        if not self._is_needed:
            return self.base.forward(x_TK, dtype=dtype)
        sums = self.base.forward(x_TK, dtype=torch.float32)
        x, flat = x_TK.reshape(-1, x_TK.shape[-1]), sums.view(-1, self.out_features)
        self._add(Buffer(x), Buffer(flat), None, is_added=False)
        return sums.to(dtype)

    def add_into_(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add ``x W^T + b`` with the adapters' products to the residual in place."""
        if self._is_needed:
            residual_TN += self.forward(x_TK, dtype=torch.float32)
        else:
            self.base.add_into_(residual_TN, x_TK)

    def run(self, x_TK: Buffer, out_TN: Buffer, *, is_added: bool = False) -> None:
        """Write ``x W^T + b`` with the adapters' products to a buffer, or add it if
        ``is_added``.
        """
        if not self._is_needed:
            self.base.run(x_TK, out_TN, is_added=is_added)
            return
        sums = self._step.sum_buffer(self.out_features)
        self.base.run(x_TK, sums)
        self._add(x_TK, sums, out_TN, is_added=is_added)


class AdaptedHeads(_Adapted):
    """A ``HeadMatrix``, one matrix for each attention head, with LoRA adapters.

    Args:
        base: the matrices without adapters; owned.
        step: the rows of each adapter in the running step.
    """

    def __init__(self, base: HeadMatrix, step: StepAdapters) -> None:
        super().__init__(step, base.out_shape)
        step.matrices.append(self)
        self.base = base
        self.out_shape = base.out_shape

    def forward(self, x_THK: Tensor) -> Tensor:
        """Multiply each head's input with its matrix, with the adapters' products."""
        if not self._is_needed:
            return self.base.forward(x_THK)
        if not self._step.is_native:
            sums = self.base.forward(x_THK).float()
            self._add(Buffer(x_THK), Buffer(sums), None, is_added=False)
            return sums.to(x_THK.dtype)
        out = Buffer(x_THK.new_empty(len(x_THK), *self.out_shape))
        self.run(Buffer(x_THK), out)
        return out.tensor

    def run(self, x_THK: Buffer, out_THN: Buffer) -> None:
        """Multiply each head's input with its matrix into a buffer, with the adapters' products."""
        if not self._is_needed:
            self.base.run(x_THK, out_THN)
            return
        sums = self._step.sum_buffer(*self.out_shape)
        self.base.run(x_THK, sums)
        self._add(x_THK, sums, out_THN, is_added=False)
