"""The LoRA adapters of a loaded model, and their installation in its operators.

Adapters are stored by digest, in the model's dtype, in slots with the same number in all matrices.
Loading and unloading may happen on any thread while steps run, since a step uses only the adapters
that its rows name; the caller ensures that no request uses an adapter that is being unloaded.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tandem.core.errors import CapacityError, ConflictError, CorruptionError, UnsupportedError
from tandem.kernels.devices import DeviceContext
from tandem.kernels.interfaces import AdaptedPart, HeadMatrix, Matrix
from tandem.kernels.operators.lora import AdaptedHeads, AdaptedMatrix, StepAdapters
from tandem.kernels.operators.operator import Operator
from tandem.models.adapter_files import AdapterFiles, read_adapter_files

__all__ = ["LoadedAdapter", "ModelAdapters"]

WHERE = "models.load_adapter"
_REASONS = (
    (re.compile(r"\.experts(\.|$)"), "routed experts are not served with adapters"),
    (re.compile(r"(^|\.)lm_head$"), "the head is not served with adapters"),
    (re.compile(r"(^|\.)embed_tokens$"), "the embedding is not served with adapters"),
    (re.compile(r"\.(gate|router)$"), "routers are not served with adapters"),
)
"""Reasons why modules of the model cannot be adapted, by patterns of names."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter that is installed in a slot of a model's adapter table."""

    digest: str
    """Digest of the adapter's files, as ``AdapterFiles.digest``."""
    slot: int
    rank: int
    """Largest LoRA rank of the adapter's modules."""
    num_modules: int
    size_bytes: int


class ModelAdapters:
    """The LoRA adapters of one model, and the slots that hold their weights.

    Args:
        skeleton: the loaded modules, whose operators are made to take adapters here, once.
        dtype: the model's dtype, to which adapters are rounded.
        context: the model's device.
        max_adapters: most adapters that are loaded at a time.
        is_captured: True if decode steps are captured in graphs.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        dtype: torch.dtype,
        context: DeviceContext,
        max_adapters: int,
        *,
        is_captured: bool = False,
    ) -> None:
        execution = context.choose_execution(dtype)
        self._device = context.device.torch_device
        self._step = StepAdapters(
            max_adapters, is_native=execution.is_native, device=self._device, pool=context.pool
        )
        self._dtype = dtype
        self._is_captured = is_captured
        self._parts: dict[str, AdaptedPart] = {}
        for name, module in skeleton.named_modules():
            if isinstance(module, Operator):
                self._parts |= module.adapt(self, name)
        self._plain = {n for n, m in skeleton.named_modules() if isinstance(m, nn.Linear)}
        self._loaded: dict[str, LoadedAdapter] = {}
        self._free_slots = list(range(max_adapters))
        self._lock = threading.Lock()
        """Lock of the table and the slots; held while an adapter is loaded."""

    def wrap_matrix(self, matrix: Matrix) -> AdaptedMatrix:
        """Return an operator's matrix wrapped so that it adds LoRA adapters' deltas to its
        products.
        """
        return AdaptedMatrix(matrix, self._step)

    def wrap_heads(self, matrix: HeadMatrix) -> AdaptedHeads:
        """Return matrices, one for each attention head, wrapped so that they add LoRA adapters'
        deltas.
        """
        return AdaptedHeads(matrix, self._step)

    @property
    def modules(self) -> Mapping[str, AdaptedPart]:
        """Linear modules that can be adapted, by dotted name."""
        return self._parts

    def read(self, folder: Path, *, digest: str = "", within: Path | None = None) -> AdapterFiles:
        """Read an adapter for this model without installing it.

        Args:
            folder: folder in PEFT's format.
            digest: digest that the contents must have; empty: any.
            within: as for ``read_adapter_files``.

        Raises: the errors of ``read_adapter_files``; ConflictError (another digest).
        """
        files = read_adapter_files(folder, self._find_shape, within=within)
        if digest and files.digest != digest:
            what = f"{folder} has changed since it was loaded: load it again under its name"
            raise ConflictError(WHERE, what)
        return files

    def install(self, files: AdapterFiles) -> LoadedAdapter:
        """Install an adapter in a slot; an installed adapter with the same contents is returned.

        Raises: CapacityError (no free slot); CorruptionError (weights too large for the dtype).
        """
        with self._lock:
            found = self._loaded.get(files.digest)
            if found is not None:
                return found
            if not self._free_slots:
                what = (
                    f"{len(self._loaded)} adapters are in memory, the most that max_adapters allows"
                )
                raise CapacityError(WHERE, f"{what}: unload one, or wait for its last request")
            slot = self._free_slots.pop()
            try:
                made = self._install(slot, files)
            except BaseException:
                self._clear(slot)
                raise
            self._loaded[files.digest] = made
            return made

    def place(self, digest: str) -> None:
        """Move an adapter's factors to fixed addresses now, if steps are captured. The first
        captured step with the adapter would do it, and until then the factors take memory in
        addition to what is reserved there. Only before the first step.
        """
        if self._is_captured:
            with self._lock:
                self._step.place(self._loaded[digest].slot)

    def uninstall(self, digest: str) -> None:
        """Free the slot of an adapter at once. The caller ensures that no running step uses it; an
        unknown digest is ignored.
        """
        with self._lock:
            found = self._loaded.pop(digest, None)
            if found is not None:
                self._clear(found.slot)

    def begin_step(self, num_rows: int, rows: Mapping[str, list[int]]) -> None:
        """Begin a step, given the rows of each adapter by digest; ``end_step`` ends it."""
        self._step.begin(num_rows, {self._loaded[digest].slot: own for digest, own in rows.items()})

    def fix_step(self, size: int) -> int:
        """Move the factors and rows of the begun step's adapters to fixed addresses, which a
        captured graph of ``size`` rows reads.

        Returns: the number of the memory's layout, as ``StepAdapters.fix``.
        """
        return self._step.fix(size)

    def end_step(self) -> None:
        """End the step that ``begin_step`` began: rows belong to no adapter any more."""
        self._step.end()

    def _find_shape(self, name: str) -> tuple[int, int]:
        part = self._parts.get(name)
        if part is not None:
            return part.out_features, part.in_features
        reason = next((why for pattern, why in _REASONS if pattern.search(name)), None)
        if reason is None and name in self._plain:
            reason = "a placement rule left it to transformers, which takes no adapters here"
        if reason is None:
            reason = "the model has no such linear module"
        raise UnsupportedError(WHERE, f"{name[:200]}: {reason}")

    def _install(self, slot: int, files: AdapterFiles) -> LoadedAdapter:
        rank = size_bytes = 0
        for name, weights in files.modules.items():
            a, b = (
                t.to(dtype=self._dtype, device=self._device).contiguous()
                for t in (weights.a_RK, weights.b_NR)
            )
            if not bool(a.isfinite().all() and b.isfinite().all()):
                what = f"{name} has weights that are too large for {self._dtype}"
                raise CorruptionError(WHERE, what)
            self._parts[name].set_delta(slot, a, b, weights.scale)
            rank = max(rank, len(a))
            size_bytes += a.nbytes + b.nbytes
        return LoadedAdapter(files.digest, slot, rank, len(files.modules), size_bytes)

    def _clear(self, slot: int) -> None:
        self._step.empty(slot)
        self._free_slots.append(slot)
