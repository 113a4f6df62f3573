"""Refusal of folders that other programs packed for their own kernels."""

import re
from collections.abc import Iterable
from pathlib import Path

from tandem.core.errors import UnsupportedError

__all__ = ["refuse_foreign_files", "refuse_foreign_tensors"]

KT_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)(_bwd)?_exps\.\d+\.numa\.\d+\.(weight|scale)$")
KT_FILES = ("*.kt", "_layer_*/_numa_*/*.kt")


def refuse_foreign_files(folder: Path) -> None:
    """Check that a folder has no files of packed experts from KTransformers.

    Raises: UnsupportedError (it has one; the text names it).
    """
    for pattern in KT_FILES:
        found = next(folder.glob(pattern), None)
        if found is not None:
            raise _refuse(folder, found.name)


def refuse_foreign_tensors(folder: Path, names: Iterable[str]) -> None:
    """Check that none of a folder's tensors holds experts packed by KTransformers.

    Raises: UnsupportedError (one does; the text names it).
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
