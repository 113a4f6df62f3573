"""Ctrl-C ends every long command: one line, status 130, no traceback, and no process left."""

import json
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from tandem.cli.interrupts import keep_interrupts

LONG = {
    "serve": ["serve", "demo", "--port", "0"],
    "serve-pair": ["serve", "demo", "--port", "0", "--prefill", "1", "--decode", "1"],
    "bench": ["bench", "moe", "--quick"],
    "convert": ["convert", "demo", "--to", "int8g128", "--out", "out"],
    "finetune": ["finetune", "recipe.yaml"],
    "plan": ["plan", "demo"],
    "verify": ["verify", "demo", "--again"],
    "doctor": ["doctor"],
    "generate": ["generate", "demo", "-p", "x", "--max-tokens", "2000"],
}
"""Without ``pull``: where no hub can be reached it ends at once, and a test downloads nothing."""
RECIPE = {
    "model_name_or_path": "demo",
    "dataset": "rows",
    "dataset_dir": ".",
    "output_dir": "out",
    "num_train_epochs": 1000,
    "logging_steps": 1,
    "save_steps": 5,
    "cutoff_len": 64,
}
ROWS = [{"instruction": f"Name {i}.", "input": "", "output": f"It is {i}."} for i in range(10)]
MOMENTS = 40
LATEST_S = 6.0


def start(arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments], cwd=cwd, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell has its background commands ignore it, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def write_recipe(folder):
    """Write a run that lasts longer than the test waits."""
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))


def test_ctrl_c_while_a_server_loads(tmp_path, monkeypatch):
    """It imports, beside its instance; the pipes close when that has ended as well."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with start(["serve", "demo", "--port", "0"], tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith(" uvicorn"):
                break
        os.killpg(process.pid, signal.SIGINT)
        lines = process.communicate(timeout=60)[1].splitlines()
        assert process.returncode == 130
        told = [line for line in lines if not line.startswith("import time:")]
        assert told == ["tandem: interrupted"]


def test_an_interrupt_that_is_kept_is_caught_where_it_is_raised(run, monkeypatch):
    """As in a chat: the turn ends, and neither the command nor the process does."""

    def find_version(_):
        with keep_interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(60)
        return "1"

    monkeypatch.setattr("tandem.cli.commands.version.package_version", find_version)
    assert run("version")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.timeout(1800)
def test_ctrl_c_at_random_moments(name, tmp_path):
    chance = random.Random(name)
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_recipe(folder)
        with start(LONG[name], folder) as process:
            try:
                process.wait(chance.uniform(0.15, LATEST_S))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
            else:
                continue  # It had ended by itself.
            out, errors = process.communicate(timeout=60)
            if process.returncode == 0 and (
                "Serving" in out or name not in ("serve", "serve-pair")
            ):
                continue  # It served already, and drained; or was at its end.
            assert process.returncode == 130, (number, errors)
            lines = [line for line in errors.splitlines() if line.startswith("tandem: ")]
            assert lines == ["tandem: interrupted"], (number, errors)
            assert "Traceback" not in errors, (number, errors)


SURVIVES = """
import os, signal, threading
from tandem.cli import interrupts
interrupts.GRACE_S = 0.05
def strike():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    except KeyboardInterrupt:
        return
with interrupts.handle_interrupts():
    with interrupts.keep_interrupts():
        strike()
    threading.Event().wait(0.3)  # The watch may have read of it only now.
    strike()
threading.Event().wait(0.3)
print("alive")
"""


def test_an_interrupt_that_was_kept_or_ended_its_command_ends_no_process():
    """The watch is for a main thread that does not come to its handler, and for nothing else."""
    result = subprocess.run(
        [sys.executable, "-c", SURVIVES], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


WITHIN_EXEC = """
from tandem.cli.interrupts import end_interrupted
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    end_interrupted()
"""


def test_an_interrupt_while_text_is_executed_has_the_same_status(tmp_path):
    """As when a dataclass is made: Python notes it, and would die of the signal at its end."""
    (tmp_path / "struck.py").write_text(WITHIN_EXEC)
    run = subprocess.run(
        [sys.executable, "-m", "struck"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (130, "tandem: interrupted\n")


AT_THE_END = """
import os, signal, sys
import tandem.__main__

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["late"] = Late()
sys.argv = ["tandem", "version"]
tandem.__main__.main()
"""


def test_an_interrupt_while_python_ends_changes_no_status():
    """The command is done; by then Python has given SIGINT its default action, to end it."""
    run = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")
