"""Interface of weight containers, and the record of tensors that were read.

A container (safetensors, GGUF) returns tensors as they are stored; a codec
(``tandem.models.codecs``) knows the meaning of their bytes. Operators use neither directly: a
``WeightSource`` returns a weight's values, or its codes in a weight format, by the skeleton's name
of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol, Self

import torch
from torch import Tensor

from tandem.core.errors import ConfigError, CorruptionError
from tandem.kernels.interfaces import WeightReader

__all__ = [
    "Progress",
    "StoredTensors",
    "TensorEntry",
    "UseLedger",
    "WeightSource",
    "refuse_nan",
    "require_finite",
]

HARMLESS_EXTRAS = {
    r"\.rotary_emb\.inv_freq$": "RoPE frequencies, which are computed from the configuration",
    r"\.self_attn\.masked_bias$|\.self_attn\.bias$": "the causal mask of an old checkpoint",
}
"""Tensors of a checkpoint that no operator needs: patterns of names, with the reason."""


def require_finite(name: str, values: Tensor) -> None:
    """Refuse a weight with NaN or infinity, which would spoil every answer; costs as much as a
    copy.

    Raises: CorruptionError (a value is NaN or infinite, or too large for the dtype).
    """
    if values.numel():
        # aminmax is the only torch reduction that is fast in bfloat16, and it propagates NaN.
        least, most = torch.aminmax(values)
        if not bool(torch.isfinite(least) & torch.isfinite(most)):
            refuse_nan(name, str(values.dtype).removeprefix("torch."))


def refuse_nan(name: str, kind: str) -> NoReturn:
    """Raise CorruptionError for a weight with values that are not finite."""
    what = f"tensor {name!r} holds NaN or infinity, as {kind}: its file is damaged, or was made so"
    raise CorruptionError("models.read_weights", f"{what}: download it again")


class Progress(Protocol):
    """Callback for progress while weights are read: bytes as stored, and the last item done."""

    def __call__(self, done_bytes: int, total_bytes: int, what: str, /) -> None:
        """Report bytes done, bytes in all and the item just done; called in the reading thread."""
        ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor: byte range within ``path``, counted from the start of the file."""

    name: str
    path: Path
    dtype: str
    """Stored dtype under the container's name for it."""
    shape: tuple[int, ...]
    begin: int
    end: int


class StoredTensors(Protocol):
    """A checkpoint's tensors as a codec reads them: stored bytes, by the names in the file."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors of the checkpoint as they are stored, by name."""
        ...

    def view(
        self, name: str, dtypes: Mapping[str, torch.dtype], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return a tensor as stored, not copied and not to be written to; marks it as used.

        Args:
            name: name of the tensor.
            dtypes: accepted stored dtypes, with torch's dtype for each.
            shape: required shape; None: any.

        Raises: NotFoundError (no such tensor); ShapeError (another shape or dtype).
        """
        ...


class WeightSource(WeightReader, Protocol):
    """All weights of a checkpoint. Not thread-safe. Use as a context manager.

    Made by ``open_source``. Files are mapped while it is open.
    """

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors as they are stored; the weights' digest is computed from their bytes."""
        ...

    def list_sizes(self) -> dict[str, int]:
        """Return the stored bytes of each weight, by the name under which it is read."""
        ...

    def check_all_used(self, harmless: Mapping[str, str]) -> dict[str, str]:
        """Return the unused tensors with the reason why they are not needed, {name: why}.

        Args:
            harmless: exact names of tensors that this model does not need, with the reason.

        Raises:
            ConfigError: a tensor was not used and is not known to be harmless.
        """
        ...

    def holds_exactly(self, dtype: torch.dtype) -> bool:
        """Return True if reading in ``dtype`` rounds no stored value."""
        ...

    def close(self) -> None:
        """Unmap the files; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class UseLedger:
    """Record of the tensors of a container that were used; reports progress.

    Args:
        entries: all tensors.
        progress: called once for each tensor, on its first use.
        unneeded: tensors that no operator needs: patterns of names, with the reason.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        progress: Progress | None,
        unneeded: Mapping[str, str] | None = None,
    ) -> None:
        self._entries = entries
        self._unneeded = HARMLESS_EXTRAS | dict(unneeded or {})
        self._progress = progress
        self._used: set[str] = set()
        self._done_bytes = 0
        self.total_bytes = sum(entry.end - entry.begin for entry in entries.values())

    def mark(self, name: str) -> None:
        """Note that a tensor is used and report progress; later calls for it change nothing."""
        if name in self._used:
            return
        entry = self._entries[name]
        self._used.add(name)
        self._done_bytes += entry.end - entry.begin
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes, name)

    def skip(self, prefix: str) -> None:
        """Mark every tensor whose name starts with ``prefix`` as used, so that ``check`` does not
        report it.
        """
        for name in self._entries:
            if name.startswith(prefix):
                self.mark(name)

    def check(self, harmless: Mapping[str, str]) -> dict[str, str]:
        """Return the unused tensors with the reason why they are not needed, {name: why}. Raises:
        ConfigError (an unused tensor that may be needed).
        """
        unused: dict[str, str] = {}
        for name in sorted(self._entries.keys() - self._used):
            reasons = [why for p, why in self._unneeded.items() if re.search(p, name)]
            if name in harmless:
                reasons.append(harmless[name])
            if not reasons:
                raise ConfigError(
                    "models.read_weights",
                    f"tensor {name!r} in {self._entries[name].path.name} belongs to no module of "
                    "the model: the configuration does not fit the weights",
                )
            unused[name] = reasons[0]
        return unused
