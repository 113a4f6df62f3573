"""The output folder of a run: that it can be made, the checkpoint to resume from, the check that no
result is lost, and the removal of an earlier run's files.
"""

import os
import shutil
from pathlib import Path

from tandem.core.errors import ConfigError, ConflictError, NotFoundError
from tandem.finetune.recipes.recipe import Recipe
from tandem.finetune.training.callbacks import LOG_NAME, STATE_NAME
from tandem.finetune.training.checkpoints import (
    check_checkpoint,
    find_last_checkpoint,
    list_checkpoints,
)

__all__ = ["check_folders", "clear_folder", "make_folder"]

WHERE = "finetune.run"
ADAPTER_NAME = "adapter_config.json"
CARD_NAME = "README.md"
LEFT_AT_END = ("adapter_*", "*_results.json", STATE_NAME, "training_*.png", CARD_NAME)
"""Patterns of the files that a training run writes when it ends. The next run in the folder removes
them when it starts: if it were interrupted, they would pass for its results.
"""


def check_folders(recipe: Recipe) -> Path | None:
    """Check the folders that a recipe names; return the checkpoint to resume from, or None. Changes
    nothing.

    Raises:
        ConfigError: the output folder is a file, or cannot be made.
        NotFoundError: the checkpoint or the adapter does not exist.
        CorruptionError: the checkpoint's state does not parse.
        ConflictError: the output folder has files that would be lost.
    """
    folder, wish = Path(recipe.output.output_dir), recipe.train.resume_from_checkpoint
    _check_place(folder)
    _check_adapter(recipe)
    if wish:
        resume_from = find_last_checkpoint(folder) if wish is True else Path(wish)
        check_checkpoint(resume_from)
        return resume_from
    if recipe.output.overwrite_output_dir:
        return None
    if list_checkpoints(folder) or any((folder / p).exists() for p in (ADAPTER_NAME, LOG_NAME)):
        what = f"{folder} holds a run: set overwrite_output_dir or resume_from_checkpoint: true"
        raise ConflictError(WHERE, what, field="output_dir")
    if (folder / CARD_NAME).exists():
        what = f"{folder} holds a {CARD_NAME}, and no run: name another output_dir, or set "
        raise ConflictError(WHERE, what + "overwrite_output_dir", field="output_dir")
    return None


def make_folder(folder: Path) -> None:
    """Make the output folder of a run and the folders above it, as far as they are missing.

    Raises: ConfigError (it is a file, or cannot be made).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refuse_place(folder, str(error)) from error


def _check_place(folder: Path) -> None:
    """Check that ``make_folder`` can make the folder, as far as can be told without trying.

    Raises: ConfigError (it cannot).
    """
    try:
        folder.is_dir()  # Raises for a name that the file system refuses.
        # The nearest folder that is there is the one in which the others are made.
        found = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not found.is_dir():
            raise _refuse_place(folder, f"{found} is not a folder")
        if not os.access(found, os.W_OK | os.X_OK):
            raise _refuse_place(folder, f"{found} cannot be written to")
    except OSError as error:
        raise _refuse_place(folder, str(error)) from error


def _refuse_place(folder: Path, why: str) -> ConfigError:
    what = f"results cannot be written to {str(folder)!r}: {why}: name another output_dir"
    return ConfigError(WHERE, what, field="output_dir")


def _check_adapter(recipe: Recipe) -> None:
    name, folder = recipe.model.adapter_name_or_path, Path(recipe.output.output_dir)
    if name is None:
        return
    field = "adapter_name_or_path"
    if not (Path(name) / ADAPTER_NAME).is_file():
        what = f"{name} is not an adapter: no {ADAPTER_NAME}"
        raise NotFoundError(WHERE, what, field=field)
    if not recipe.train.resume_from_checkpoint and recipe.output.overwrite_output_dir:
        lost = {path.resolve() for path in (folder, *list_checkpoints(folder))}
        if Path(name).resolve() in lost:
            what = f"{name} would be removed from {folder} before it is read: name another "
            raise ConflictError(WHERE, what + "output_dir", field=field)


def clear_folder(folder: Path) -> None:
    """Remove the checkpoints and the final files that an earlier run left in its output folder."""
    for path in list_checkpoints(folder):
        shutil.rmtree(path)
    for pattern in LEFT_AT_END:
        for path in folder.glob(pattern):
            path.unlink()
