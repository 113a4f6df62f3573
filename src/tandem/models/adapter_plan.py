"""The memory of a model's LoRA adapters, known from the headers of their files before any loading.

The counts follow what installing an adapter does (``kernels/operators/lora.py``): native kernels
read the second factor in panels of columns, and captured steps read both factors at fixed addresses
in places of equal rank (``kernels/torch/factors.py``), where they are then kept alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.core.adapter import read_sources
from tandem.core.errors import TandemError
from tandem.core.model.layers import MlaSpec
from tandem.core.model.plan import LayerSpec, ModelPlan
from tandem.core.spec import DTYPE_BYTES
from tandem.kernels.cpu.linear import PANEL_COLUMNS
from tandem.kernels.devices import has_native_kernels
from tandem.kernels.native import NATIVE_DTYPES, TORCH_DTYPES
from tandem.kernels.torch.factors import count_fixed_bytes
from tandem.models.adapter_files import read_adapter_ranks
from tandem.models.config import ModelConfig

__all__ = ["AdapterPlan", "count_adapter_bytes", "plan_adapters"]

MIB = 1 << 20

LIKELY_RANK = 16
"""Rank of the adapter whose memory is told where adapters may be loaded while serving."""

LATENT_MODULE = "kv_b_proj"
"""Last word of the name of latent attention's up-projection, which is stored by heads."""


class AdapterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that the LoRA adapters of a model will take."""

    num_adapters: int
    """Number of adapters that are loaded at the start, without those of ``unread``."""
    size_bytes: int
    """Bytes of the adapters that are loaded at the start, as they are held then."""
    is_captured: bool
    """True if captured steps read the factors at fixed addresses."""
    unread: tuple[str, ...] = ()
    """Names of the adapters whose files could not be read; loading them tells the reason."""
    later_bytes: int = 0
    """Bytes of an adapter of ``LIKELY_RANK`` for all modules; 0: none is loaded while serving."""

    def tell(self) -> list[tuple[str, str, str]]:
        """Return rows (item, value, reason) about the adapters, for the printed plan."""
        how = "LoRA factors as native kernels read them"
        if self.is_captured:
            how = "LoRA factors of equal rank, at addresses that captured steps read"
        if self.unread:
            how += f"; not counted, as they cannot be read: {', '.join(self.unread)}"
        if self.later_bytes:
            each = f"{self.later_bytes / MIB:.1f} MiB each at rank {LIKELY_RANK}"
            how += f"; those loaded while serving are not counted: {each}"
        return [("adapters", f"{self.num_adapters}, {self.size_bytes / MIB:.1f} MiB", how)]


class _Matrix(NamedTuple):
    """A matrix of an operator, or one for each attention head, that takes adapters."""

    modules: tuple[str, ...]
    """Modules of the checkpoint whose outputs it gives."""
    num_heads: int
    in_features: int
    out_features: int


def plan_adapters(model: ModelPlan, config: ModelConfig) -> AdapterPlan | None:
    """Return what the adapters of the settings will take; None if none can be loaded.

    Args:
        model: plan of the model.
        config: settings, with the adapters.

    Raises: ConfigError (a setting does not name an adapter as NAME=FOLDER, or a name is there
        twice).
    """
    if model.own is not None or not (config.adapter or config.adapter_folder):
        return None
    adapters: list[dict[str, int]] = []
    unread: list[str] = []
    for source in read_sources(config.adapter):
        try:
            adapters.append(read_adapter_ranks(Path(source.folder).expanduser()))
        except TandemError:
            unread.append(source.name)
    is_captured = _is_captured(model)
    later = {place.module: LIKELY_RANK for layer in model.layers for place in layer.adapters}
    return AdapterPlan(
        num_adapters=len(adapters),
        size_bytes=count_adapter_bytes(model, adapters, is_captured=is_captured),
        is_captured=is_captured,
        unread=tuple(unread),
        later_bytes=count_adapter_bytes(model, [later], is_captured=is_captured)
        if config.adapter_folder
        else 0,
    )


def count_adapter_bytes(
    model: ModelPlan, adapters: Sequence[Mapping[str, int]], *, is_captured: bool
) -> int:
    """Return the bytes of adapters that are loaded in this order.

    Args:
        model: plan of the model.
        adapters: ranks by module of each adapter; modules that take no adapters are ignored.
        is_captured: True if captured steps read the factors; then all of them are where these do.
    """
    item = DTYPE_BYTES[model.spec.dtype]
    if not is_captured:
        sizes = _count_items(model)
        return item * sum(
            rank * sizes.get(name, 0) for ranks in adapters for name, rank in ranks.items()
        )
    total = 0
    for matrix in (matrix for layer in model.layers for matrix in _list_matrices(layer)):
        sums = [sum(ranks.get(name, 0) for name in matrix.modules) for ranks in adapters]
        last = max((place for place, rank in enumerate(sums, 1) if rank), default=0)
        if last:
            total += count_fixed_bytes(
                last + 1,
                max(sums),
                num_heads=matrix.num_heads,
                in_features=matrix.in_features,
                out_features=matrix.out_features,
                item=item,
            )
    return total


def _is_captured(model: ModelPlan) -> bool:
    """Return True if decode steps are captured: those of a device with routed experts on the
    host.
    """
    is_apart = model.device != "cpu" and model.expert_device == "cpu"
    return is_apart and any(matrix.role == "experts" for matrix in model.matrices)


def _count_items(model: ModelPlan) -> dict[str, int]:
    """Return the number of items that an adapter of rank 1 has for each module."""
    is_native = has_native_kernels(model.device)
    is_native = is_native and TORCH_DTYPES[model.spec.dtype] in NATIVE_DTYPES
    items: dict[str, int] = {}
    for layer in model.layers:
        pieces: dict[str, list[int]] = defaultdict(list)
        for matrix in layer.matrices:
            for name, size in matrix.rows:
                pieces[name].append(size)
        for place in layer.adapters:
            if isinstance(layer.mixer, MlaSpec) and place.module.endswith(f".{LATENT_MODULE}"):
                items[place.module] = _count_latent_items(layer.mixer, is_native=is_native)
                continue
            sizes = pieces[place.module]
            items[place.module] = place.in_features + sum(
                _pad(n, is_native=is_native) for n in sizes
            )
    return items


def _count_latent_items(spec: MlaSpec, *, is_native: bool) -> int:
    """Return the items of rank 1 of latent attention's up-projection.

    The first factor is that of the values of all heads, and, transposed, the second factor of the
    keys of all heads. Native kernels want the latter in panels, which is a copy.
    """
    shared = spec.rank + (_pad(spec.rank, is_native=True) if is_native else 0)
    return shared + spec.num_heads * (spec.nope + _pad(spec.value, is_native=is_native))


def _pad(num_columns: int, *, is_native: bool) -> int:
    """Return the number of columns with those that complete a panel of native kernels."""
    return -(-num_columns // PANEL_COLUMNS) * PANEL_COLUMNS if is_native else num_columns


def _list_matrices(layer: LayerSpec) -> Iterator[_Matrix]:
    """Yield the matrices of a layer that take adapters, as operators stack them."""
    taken = {place.module for place in layer.adapters}
    for matrix in layer.matrices:
        modules = tuple(name for name, _ in matrix.rows if name in taken)
        if modules and matrix.role != "head_matrices":
            yield _Matrix(modules, 1, matrix.shape[-1], matrix.shape[0])
    if isinstance(layer.mixer, MlaSpec):
        spec = layer.mixer
        modules = tuple(name for name in taken if name.endswith(f".{LATENT_MODULE}"))
        yield _Matrix(modules, spec.num_heads, spec.nope, spec.rank)
        yield _Matrix(modules, spec.num_heads, spec.rank, spec.value)
