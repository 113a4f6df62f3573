"""Folders that other programs packed for their own kernels: refused, with what to do instead."""

import re
from collections.abc import Iterable
from pathlib import Path

from tandem.core.errors import UnsupportedError

__all__ = ["refuse_foreign_files", "refuse_foreign_tensors"]

KT_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)(_bwd)?_exps\.\d+\.numa\.\d+\.(weight|scale)$")
KT_FILES = ("*.kt", "_layer_*/_numa_*/*.kt")


def refuse_foreign_files(folder: Path) -> None:
    """Raise if a folder has files of packed experts as KTransformers writes them.

    Raises: UnsupportedError.
    """
    for pattern in KT_FILES:
        found = next(folder.glob(pattern), None)
        if found is not None:
            raise _refuse(folder, found.name)


def refuse_foreign_tensors(folder: Path, names: Iterable[str]) -> None:
    """Raise if one of a folder's tensors is of experts as KTransformers packs them.

    Raises: UnsupportedError.
    """
    for name in names:
        if KT_TENSOR.match(name):
            raise _refuse(folder, f"tensor {name!r}")


def _refuse(folder: Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        "models.open_weights",
        f"{folder} has {what}: experts that KTransformers packed, for one instruction set and one "
        "number of NUMA nodes. Take the checkpoint they were made of: `tandem serve` packs it "
        "while it loads, `tandem convert CHECKPOINT --format int8` (or int4) ahead of that",
    )
