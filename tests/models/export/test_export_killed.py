"""Goal: a conversion that is killed, or not alone, leaves a whole checkpoint or none.

Method: a process that has imported everything forks a conversion for each thing that one asks of
the file system (audit events of the target's folder), and kills it there. Whatever is left must be
no model, or all of it; the next conversion must succeed. Of two at once, one must be refused.
"""

import json
import threading
from pathlib import Path

import pytest
from forks import fork

from tandem.core.errors import ConfigError, TandemError
from tandem.models.export import MARKER, export_checkpoint
from tandem.models.families import open_checkpoint
from tandem.models.sources.containers import open_source

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MAX_EVENTS = 200

KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from tandem.models.export import export_checkpoint

torch.set_num_threads(1)
model, scratch = Path(sys.argv[1]), Path(sys.argv[2])
export_checkpoint(model, "int8", scratch / "first")  # What is imported late is now.

def convert(out, kill_at):
    count = 0
    def hook(event, args):
        nonlocal count
        # What changes the file system has the target's name in its arguments.
        if event.split(".")[0] in ("open", "os", "shutil", "fcntl") and str(out) in str(args):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    export_checkpoint(model, "int8", out)
    os._exit(0)

for n in range(1, int(sys.argv[3])):
    out = scratch / f"{n}" / "out"
    pid = os.fork()
    if not pid:
        try:
            convert(out, n)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    print(json.dumps(status), flush=True)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
"""


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MARKER}


def is_model(folder: Path) -> bool:
    """Whether a start would take the folder."""
    try:
        checkpoint = open_checkpoint(folder)
        with open_source(folder, quantization=checkpoint.quantization):
            return True
    except TandemError:
        return False


@pytest.fixture
def model(checkpoint):
    return checkpoint("qwen3", **SIZES)


def test_a_kill_at_any_moment_leaves_all_or_nothing(model, tmp_path):
    printed = tmp_path / "printed"
    status = fork(KILLED, [str(model), str(tmp_path), str(MAX_EVENTS)], printed, timeout_s=300)
    assert status == 0, printed.read_text()
    statuses = [json.loads(line) for line in printed.read_text().splitlines()]
    assert len(statuses) > 10
    assert statuses[-1] == 0  # At last nothing was left to be killed at.
    want = read_files(tmp_path / "first")
    was_whole = []
    for n in range(1, len(statuses) + 1):
        out = tmp_path / f"{n}" / "out"
        was_whole.append(out.exists())
        if out.exists():
            assert read_files(out) == want, n
        else:
            draft = out.with_name("out.partial")
            if draft.exists() and is_model(draft):
                assert read_files(draft) == want, n
            export_checkpoint(model, "int8", out)
            assert read_files(out) == want, n
        assert not out.with_name("out.partial").exists(), n
    assert True in was_whole[:-1]  # Some were killed behind the renaming.
    assert False in was_whole


def test_a_second_conversion_is_refused_while_one_writes(model, tmp_path):
    out, refused = tmp_path / "out", []

    def start_another(*_):
        with pytest.raises(ConfigError, match="another conversion writes") as caught:
            export_checkpoint(model, "bf16", out)
        refused.append(caught.value)

    export_checkpoint(model, "int8", out, progress=start_another)
    assert refused
    export_checkpoint(model, "int8", tmp_path / "alone")
    assert read_files(out) == read_files(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == [
        "out"
    ]


def test_of_conversions_that_start_at_once_one_wins(model, tmp_path):
    export_checkpoint(model, "int8", tmp_path / "alone")
    want = read_files(tmp_path / "alone")
    for i in range(10):
        out, barrier, ends = tmp_path / f"{i}", threading.Barrier(3), []

        def convert(out=out, barrier=barrier, ends=ends):
            barrier.wait(60)
            try:
                export_checkpoint(model, "int8", out)
                ends.append("whole")
            except ConfigError as error:
                ends.append(error.what)

        threads = [threading.Thread(target=convert) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert ends.count("whole") == 1, ends
        refusals = [end for end in ends if end != "whole"]
        assert all("another conversion" in end or "there already" in end for end in refusals), ends
        assert read_files(out) == want
        assert not (out / MARKER).exists()
        assert not out.with_name(f"{i}.partial").exists()
