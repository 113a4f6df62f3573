"""What goes wrong in a run is named, and nothing that looks whole is half-written."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading

import pytest
import torch
from safetensors.torch import load_file

from tandem.cli.main import app
from tandem.core.errors import CapacityError, ConfigError, UnsupportedError
from tandem.finetune.export import export_merged
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training import trainer
from tandem.finetune.training.checkpoints import find_last_checkpoint
from tandem.finetune.training.trainer import finetune

KILLED = """
import json, os, sys
import importlib
import torch
torch.set_num_threads(1)
module = importlib.import_module("tandem.finetune.{module}")
whole = module.publish_folder
calls = []
def kill(partial, final):
    calls.append(final)
    if len(calls) == {call}:
        os.kill(os.getpid(), 9)
    whole(partial, final)
module.publish_folder = kill
from tandem.finetune.export import export_merged
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.trainer import finetune
{work}
"""


def run_killed(module: str, call: int, work: str) -> None:
    """Run Python that kills itself when a whole folder is about to get its name.

    It computes on one thread as the test's own process does: sums in another order have other bits.
    """
    code = KILLED.format(module=module, call=call, work=work)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_and_leaves_no_checkpoint(small_disk, make_values, tmp_path):
    """The checkpoint that did not fit is gone; the export neither has a folder."""
    values = make_values(small_disk / "out", lora_rank=8, save_steps=1, plot_loss=False)
    with pytest.raises(CapacityError, match=r"is full.*resume_from_checkpoint"):
        finetune(make_recipe(values))
    assert not list((small_disk / "out").glob("*checkpoint*"))
    assert not (small_disk / "out" / "adapter_config.json").exists()
    shutil.rmtree(small_disk / "out")
    whole = make_values(tmp_path / "whole", max_steps=1, plot_loss=False)
    finetune(make_recipe(whole))
    with pytest.raises(CapacityError, match="is full"):
        export_merged("demo", tmp_path / "whole", small_disk / "merged")
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "tensorboard"])
def test_a_reporter_that_is_not_installed_is_refused_before_the_model(
    name, make_values, tmp_path, monkeypatch
):
    """By the name of its package, not after minutes of loading."""
    monkeypatch.setattr(trainer, "find_spec", lambda package: None)
    monkeypatch.setattr(trainer, "load_frozen", lambda *args, **options: pytest.fail("loaded"))
    values = make_values(tmp_path / "out", report_to=name)
    with pytest.raises(UnsupportedError, match=f"pip install {name}"):
        finetune(make_recipe(values))
    assert not (tmp_path / "out").exists()


def test_a_reporter_that_nobody_knows_is_refused(make_values, tmp_path):
    """With the names that there are."""
    with pytest.raises(ConfigError, match="tensorboard"):
        finetune(make_recipe(make_values(tmp_path / "out", report_to="tensorbord")))


WRITES = ["save_pretrained", "save_to_json", "save_run_state", "fsync", "rename"]
KILLED_IN = """
import os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from tandem.finetune.training import callbacks, checkpoints
from peft import PeftModel
from transformers import TrainerState

def kill_in(owner, name):
    whole, calls = getattr(owner, name), []
    def killed(*args, **options):
        path = str(args[0]) if owner is Path else ""
        if name != "rename" or "checkpoint-4" in path:
            calls.append(1)
        if len(calls) == {call}:
            os.kill(os.getpid(), 9)
        return whole(*args, **options)
    setattr(owner, name, killed)

owners = {{"save_pretrained": PeftModel, "save_to_json": TrainerState, "fsync": os}}
owners |= {{"save_run_state": callbacks, "rename": Path}}
kill_in(owners[{name!r}], {name!r})
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.trainer import finetune
finetune(make_recipe({values!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_a_run_killed_at_any_write_resumes_from_the_last_whole_checkpoint(
    name, make_values, tmp_path
):
    """kill -9 before the adapter, the states, the syncs and the name of the second checkpoint."""
    values = make_values(tmp_path / "out", plot_loss=False)
    # The first checkpoint syncs its files and two folders; the second is killed among its own.
    call = {"fsync": 12, "rename": 1}.get(name, 2)
    code = KILLED_IN.format(name=name, call=call, values=values)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    names = {p.name for p in (tmp_path / "out").iterdir() if "checkpoint" in p.name}
    assert names == {"checkpoint-2", ".checkpoint-4.partial"}
    assert find_last_checkpoint(tmp_path / "out").name == "checkpoint-2"
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    finetune(make_recipe({**values, "resume_from_checkpoint": True}))
    finetune(make_recipe({**values, "output_dir": str(tmp_path / "whole")}))
    first, second = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("whole", "out")
    )
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (tmp_path / "out" / ".checkpoint-4.partial").exists()


def test_the_bar_of_a_terminal_shows_loss_and_speed(make_values, tmp_path, monkeypatch):
    """`tandem finetune` on a terminal; standard output stays the command's own."""
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(make_values(tmp_path / "out", max_steps=2, plot_loss=False)))
    shown: list[bytes] = []
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 120))

    def read():
        with contextlib.suppress(OSError):  # The other side is closed.
            while piece := os.read(master, 4096):
                shown.append(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        app(["finetune", str(path)], standalone_mode=False)
        monkeypatch.undo()
    reader.join(timeout=60)
    os.close(master)
    text = b"".join(shown).decode()
    assert "2/2" in text
    assert re.search(r"loss=\d+\.\d{4}, tok/s=[1-9]\d*", text)
    assert "{'loss'" not in text


@pytest.mark.slow
def test_a_run_killed_in_a_checkpoint_resumes_bit_by_bit(make_values, tmp_path):
    """kill -9 when the second checkpoint is written but has no name yet."""
    whole, out = make_values(tmp_path / "whole"), make_values(tmp_path / "out")
    finetune(make_recipe(whole))
    run_killed("training.callbacks", 2, f"finetune(make_recipe({out!r}))")
    names = {p.name for p in (tmp_path / "out").iterdir() if "checkpoint" in p.name}
    assert names == {"checkpoint-2", ".checkpoint-4.partial"}
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    finetune(make_recipe({**out, "resume_from_checkpoint": True}))
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "out")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    run_killed(
        "export", 1, f"export_merged('demo', {values_dir(out)!r}, {values_dir(out) + 'm'!r})"
    )
    assert not (tmp_path / "outm").exists()
    assert (tmp_path / ".outm.partial").is_dir()
    assert (export_merged("demo", tmp_path / "out", tmp_path / "outm") / "config.json").is_file()
    assert not (tmp_path / ".outm.partial").exists()


def values_dir(values) -> str:
    return values["output_dir"]
