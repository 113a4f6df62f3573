"""Ctrl-C ends every long command: one line, status 130, no traceback, and no process left."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from slow_hub import REPO, serve_slow_hub

import tandem
from tandem.cli.interrupts import keep_interrupts
from tandem.models.loading.hub import DEMO_FOLDER

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
    "chat": ["chat", "demo", "--prompt", "x", "--prompt", "y", "--max-tokens", "900"],
    "eval": ["eval", "demo", "--data", "rows", "--dataset-dir", ".", "--max-tokens", "2000"],
    "export": ["export", "demo", "--adapter", "adapter", "--out", "out"],
    "pull": ["pull", REPO],
    "store-master": ["store", "master"],
    "store-host": ["store", "host", "--store.memory", "8MiB"],
}
SERVING = {
    "serve": "Serving",
    "serve-pair": "Serving",
    "store-master": "store master at",
    "store-host": "is up",
}
"""What a command says on standard output once Ctrl-C ends it in order, with status 0."""
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
OURS = str(Path(tandem.__file__).parent)
MOMENTS = 40
LATEST_S = 6.0


def start(arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments], cwd=cwd, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell has its background commands ignore it, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def write_inputs(folder):
    """Write a run that lasts longer than the test waits, and an adapter of the demo model."""
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    name, tensors = "model.layers.0.self_attn.q_proj", {}
    with safe_open(DEMO_FOLDER / "model.safetensors", "np") as weights:
        rows, columns = weights.get_slice(f"{name}.weight").get_shape()
    for which, shape in (("A", (4, columns)), ("B", (rows, 4))):
        tensors[f"base_model.model.{name}.lora_{which}.weight"] = np.ones(shape, np.float32)
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


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


@pytest.fixture
def surroundings(name, tmp_path, monkeypatch):
    """What a command talks to: a hub that sends for ever, a master for a host."""
    with contextlib.ExitStack() as opened:
        if name == "pull":
            url = opened.enter_context(serve_slow_hub())
            hub = {
                "ENDPOINT": url,
                "HUB_OFFLINE": "0",
                "HUB_DISABLE_XET": "1",
                "HOME": str(tmp_path),
            }
            for key, value in hub.items():
                monkeypatch.setenv(f"HF_{key}", value)
        if name.startswith("store"):
            monkeypatch.setenv("TANDEM_STORE__MASTER", f"ipc://{tmp_path}/m.sock")
            monkeypatch.setenv("TANDEM_STORE__SEGMENT_DIR", str(tmp_path / "segments"))
        if name == "store-host":
            master = opened.enter_context(start(["store", "master"], tmp_path))
            opened.callback(master.kill)
            assert "store master at" in master.stdout.readline()
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.timeout(1800)
def test_ctrl_c_at_random_moments(name, tmp_path, surroundings):
    chance = random.Random(name)
    counts = dict.fromkeys(("struck", "ended in order", "was done", "before us"), 0)
    for number in range(MOMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_inputs(folder)
        with start(LONG[name], folder) as process:
            try:
                process.wait(chance.uniform(0.15, LATEST_S))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
            else:
                counts["was done"] += 1
                process.communicate(timeout=60)
                continue
            out, errors = process.communicate(timeout=60)
            if process.returncode in (1, -signal.SIGINT) and "tandem: " not in errors:
                # On a busy machine Python itself was still starting, which is not ours.
                assert OURS not in errors, (number, errors)
                counts["before us"] += 1
                continue
            assert "Traceback" not in errors, (number, errors)
            if process.returncode == 0:
                # It served already, and drained; or was at its end.
                assert name not in SERVING or SERVING[name] in out, (number, out, errors)
                counts["ended in order" if name in SERVING else "was done"] += 1
                continue
            assert process.returncode == 130, (number, errors)
            lines = [line for line in errors.splitlines() if line.startswith("tandem: ")]
            assert lines == ["tandem: interrupted"], (number, errors)
            counts["struck"] += 1
    sys.stdout.write(f"{name}: {counts}\n")
    assert counts["struck"], counts


SURVIVES = """
import os, signal, threading
from tandem.cli import interrupts
interrupts.GRACE_S = 0.3
def strike():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    except KeyboardInterrupt:
        return
with interrupts.handle_interrupts():
    with interrupts.keep_interrupts():
        strike()
    threading.Event().wait(0.6)  # The watch may have read of it only now.
    strike()
threading.Event().wait(0.6)
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


IMPORTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException as error:
    print("raised", type(error).__name__)
"""
IMPORTING = """
from tandem.cli import interrupts
with interrupts.handle_interrupts():
    import imported
"""


def test_an_interrupt_within_an_import_ends_the_process_there(tmp_path):
    """Native code that an import runs calls Python where it takes no exceptions: it would abort."""
    (tmp_path / "imported.py").write_text(IMPORTED)
    run = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        # A suite that runs in the background of a shell has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "tandem: interrupted\n")


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
