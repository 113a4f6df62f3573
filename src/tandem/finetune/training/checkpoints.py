"""Checkpoints from which a run resumes with the same bits, without pickle.

A checkpoint is a folder ``checkpoint-N``: the adapter in PEFT's format, ``trainer_state.json`` of
transformers, ``optimizer.safetensors`` and ``random_state.safetensors`` for tensors, and
``run_state.json`` for everything else (schedule, parameter groups, sum of the losses, random state
of Python and numpy). It is written under another name and renamed when all of it is on the disk, so
a folder with such a name is complete.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.core.errors import ConflictError, CorruptionError, NotFoundError

__all__ = [
    "check_checkpoint",
    "find_last_checkpoint",
    "list_checkpoints",
    "load_run_state",
    "publish_folder",
    "restore_random_state",
    "save_run_state",
]

OPTIMIZER_NAME = "optimizer.safetensors"
RANDOM_NAME = "random_state.safetensors"
STATE_NAME = "run_state.json"
VERSION = 1
WHERE = "finetune.resume"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run's output folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def find_last_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint folder of a run's output folder. Raises: NotFoundError (there is
    none).
    """
    found = list_checkpoints(folder)
    if not found:
        what = f"no checkpoint in {folder}: leave resume_from_checkpoint out to begin"
        raise NotFoundError(WHERE, what, field="resume_from_checkpoint")
    return found[-1]


def check_checkpoint(folder: Path) -> None:
    """Check that a run can resume from a folder, before a model is loaded for it.

    Raises: NotFoundError: a file is missing; CorruptionError: the state does not parse.
    """
    if not all((folder / name).is_file() for name in ("adapter_config.json", "trainer_state.json")):
        what = f"{folder} is no checkpoint: name a folder checkpoint-N, or true for the last one"
        raise NotFoundError(WHERE, what, field="resume_from_checkpoint")
    _read_state(folder)


def publish_folder(partial: Path, final: Path) -> None:
    """Sync a folder that is completely written, and rename it to ``final``, in place of a folder
    that has that name.
    """
    for path in [*partial.rglob("*"), partial]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    replaced = final.with_name(f".{final.name}.replaced.partial")
    if replaced.exists():
        shutil.rmtree(replaced)
    # The old folder is renamed before it is removed: half removed under its own name, it would be
    # taken for a checkpoint.
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if replaced.exists():
        shutil.rmtree(replaced)


def save_run_state(folder: Path, optimizer: Any, scheduler: Any, loss_sum: float) -> None:
    """Write the state of the optimizer, of its schedule and of all random generators, and the sum
    of all steps' losses, to files in a folder.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach().contiguous()
            else:
                scalars.setdefault(str(index), {})[key] = value
    save_file(tensors, folder / OPTIMIZER_NAME)
    save_file({"torch": torch.get_rng_state()}, folder / RANDOM_NAME)
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    document = {
        "version": VERSION,
        "param_groups": state["param_groups"],
        "scalars": scalars,
        "scheduler": scheduler.state_dict(),
        "loss_sum": loss_sum,
        "python_random": random.getstate(),
        "numpy_random": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    (folder / STATE_NAME).write_text(json.dumps(document), "utf-8")


def load_run_state(folder: Path, optimizer: Any, scheduler: Any) -> float | None:
    """Restore the optimizer and its schedule from the files of ``save_run_state``.

    The random generators are left to ``restore_random_state``.

    Returns: the sum of all steps' losses; None if an earlier release wrote the files, without it.

    Raises:
        NotFoundError: a file is missing, for example because ``save_only_model`` was set.
        CorruptionError: a file does not parse.
        ConflictError: the state belongs to other trained parameters.
    """
    document, tensors = _read_state(folder), _read_tensors(folder / OPTIMIZER_NAME)
    live = optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = document["param_groups"]
    if [g["params"] for g in live] != [g["params"] for g in saved]:
        raise ConflictError(WHERE, f"{folder} has other parameters: train with the same recipe")
    # JSON has no tuples: a list is turned into a tuple where the optimizer's own option is one.
    groups = [
        {k: tuple(v) if isinstance(now.get(k), tuple) else v for k, v in was.items()}
        for now, was in zip(live, saved, strict=True)
    ]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if not index.isdigit() or int(index) >= len(parameters):
            raise ConflictError(WHERE, f"{folder}: no parameter for {name}")
        if tensor.dim() and tensor.shape != parameters[int(index)].shape:
            what = f"{folder}: {name} is {tuple(tensor.shape)}: train with the same recipe"
            raise ConflictError(WHERE, what)
        state.setdefault(int(index), {})[key] = tensor
    for index, values in document["scalars"].items():
        state.setdefault(int(index), {}).update(values)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    scheduler.load_state_dict(document["scheduler"])
    return document.get("loss_sum")


def restore_random_state(folder: Path) -> None:
    """Set all random generators to their state at the time of ``save_run_state``.

    Raises: NotFoundError: a file is missing; CorruptionError: a file does not parse.
    """
    document, tensors = _read_state(folder), _read_tensors(folder / RANDOM_NAME)
    version, internal, gauss = document["python_random"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = document["numpy_random"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_NAME
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        what = f"{path}: {error}: only checkpoints with save_only_model: false resume"
        raise NotFoundError(WHERE, what, field="resume_from_checkpoint") from error
    except ValueError as error:
        raise CorruptionError(WHERE, f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise CorruptionError(WHERE, f"{path} is not a run state of version {VERSION}")
    return document


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except OSError as error:
        raise NotFoundError(WHERE, f"{path}: {error}", field="resume_from_checkpoint") from error
    except SafetensorError as error:
        raise CorruptionError(WHERE, f"{path}: {error}") from error
