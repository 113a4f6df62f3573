"""Plausible mistakes over all commands: one line with the remedy, the right status, no traceback.

Status 2: the words of the command line are wrong; 1: they are well-formed, and cannot be done.
"""

import re

import pytest
from command_tree import COMMANDS

from tandem.kernels import calibration

URL = "--url=http://127.0.0.1:1"

WORDS = [
    "cluster --roles prefill", "cluster dance", "cluster role", "cluster keys a b", "cluster up",
    "cluster drain", "cluster undrain", "cluster remove", "cluster restart a b", "cluster add x",
    "cluster render", "cluster render c.yaml --to paper",
    "sim", "sim hits", "sim hit t.jsonl", "sim run",
    "sim run s.yaml --sets a=1",
    "sim sweep s.yaml", "sim record", "sim calibrate", "sim decide", "sim compare --rates x",
    "sim capacity", "sim paper", "sim advise s.yaml", "sim hits t.jsonl --blocks",
    # A name that is no command, and near ones.
    "srve demo", "server demo", "start demo", "models", "stop",
    "finetun r.yaml", "benchmark engine", "doctr", "versoin", "config list", "config sho",
    "config", "store", "store list", "store masters", "store delete k", "store status",
    "-v", "serve -p 80 demo",
    # Flags that are not there.
    "serve demo --prot 80", "serve demo --models demo", "serve demo --gpu 1",
    "serve demo --max-len 10", "serve demo --engine.kv-cache 1", "serve demo --engine.nothing 1",
    "serve demo -port 80", "serve demo demo",


    "chat demo --port 8000", "chat demo --model demo",
    "generate demo hello", "generate -p x --maxtokens 5", "generate -p x --n 2",
    "plan demo --format int8", "pull demo --token x", "verify demo --all",
    "convert demo --quantize int8", "finetune r.yaml --epochs 3", "eval demo --dataset d",
    "export demo --output o", "explain id --port 8000", "doctor --verbose", "bench engine --fast",
    "version --short", "config show --all",
    # What a command needs and did not get.
    "plan", "pull", "show", "rm", "list x", "ps x",
    "verify", "convert", "finetune", "eval", "export", "explain", "bench",
    "eval demo", "export demo", "export demo --out o", "store put", "store put k", "store get",
    "store rm", "store drain", "store retire",
    "serve demo --port", "chat --prompt", "generate -p", "serve demo --config",
    # Values of the wrong kind.
    "chat --max-tokens 0", "chat --max-tokens many", "chat --temperature -1",
    "chat --temperature hot", "chat --seed x", "chat --max-model-len 0", "chat --max-model-len -5",
    "generate -p x --max-tokens -1", "generate -p x --temperature -0.1", "generate -p x --top-p 2",
    "generate -p x --top-p -1", "generate -p x --seed 1.5", "eval demo --data d --max-samples 0",
    "eval demo --data d --max-tokens 0", "serve demo --log-level loud",
    "store put k f --replicas 0", "store put k f --soft-pin-s -1", "store ls --limit 0",
    "store drain h --wait-s -1", "store master --log-level x",
    "store set-floor x", "store set-floor --force", "store host --log-level x",
    "store host --segment 1", "store host x", "store master x", "store stat x", "doctor x",
    "version x", "config show x", "verify demo demo", "explain a b", "bench --json x",
    "bench serve demo", "bench serve --nothing", "bench run nothing",
    "bench engine --cases", "plan --hardware measured", "plan demo --cost",
    "plan demo --users many",
    "convert demo", "convert demo --to int8", "convert demo --format int8 --to bf16 --out o",
    "convert demo --out o", "plan demo --device tpu",
]  # fmt: skip
"""Status 2."""

INPUTS = [
    "cluster --url http://127.0.0.1:1", "cluster list --url http://127.0.0.1:1",
    "cluster render nothing.yaml", "cluster up nothing.yaml", "cluster up .",
    "serve --hub.file nothing.yaml", "serve demo --hub.file x.yaml",
    "cluster launch demo", "cluster launch --launcher.listen ipc:///x/l.sock",
    "cluster launch demo --launcher.listen tcp://127.0.0.1:7", "cluster keys /no/such/folder/k",
    "sim hits nothing.jsonl", "sim hits .",
    "sim run nothing.yaml", "sim run .",
    "sim sweep nothing.yaml instances.0.count=1 --output x.jsonl", "sim capacity nothing.yaml",
    "sim paper --trace nothing.jsonl --requests 10",
    "sim advise nothing.yaml --prices nothing.yaml",
    "serve", "serve nothing", "serve ./nothing", "serve org/name", "serve nothing.gguf",
    "serve demo --port -1", "serve demo --port 99999", "serve demo --port http",
    "serve demo --host no.such.host.invalid --dry-run --port x",
    "serve demo --max-model-len many", "serve demo --max_model_len -1",
    "serve demo --engine.block_size 7x", "serve demo --engine.kv-dtype int3",
    "serve demo --tp 2", "serve demo --tensor-parallel-size 2", "serve demo --dtype float8",
    "serve demo --kt-num-gpu-experts 32 --dry-run", "serve demo --quantization fp8",
    "serve demo --model.dtype float8", "serve demo --engine.kv-cache-gib lots",
    "serve demo --prefill 1", "serve demo --decode 1", "serve demo --unified -1",
    "serve demo --unified 2 --prefill 1 --decode 1", "serve demo --adapter x",
    "serve demo --adapter nothing=nothing", "serve demo --store.memory lots",
    "serve demo --store.memory 1B", "serve demo --store.memory 1GiB --store.master h:1",
    "serve demo --store.ssd-dir d", "serve demo --config nothing.yaml", "serve demo --config .",
    "config show --config nothing.yaml", "config show --port x",
    "config show --engine.threads -1", "config show --engine.max-batch-tokens -1",
    "chat --url nonsense --prompt x",
    f"chat {URL} --prompt x", f"chat demo {URL} --prompt x", f"chat {URL}/v1 --prompt x",
    f"chat {URL} --adapter a --prompt x", "chat --url http:// --prompt x",
    "chat --url ftp://h --prompt x", "chat --url http://h:port --prompt x",
    "chat --url http://h:99999 --prompt x", "chat --url http://[::1 --prompt x",
    "generate", f"generate -p x {URL}", f"generate -p x {URL}/v1", "generate -p x --url nonsense",
    "generate -f nothing", "generate -p x -f y", f"generate -p x {URL} --adapter a",
    f"explain id {URL}", "explain id --url nonsense", f"explain id {URL}/v1",
    "pull nothing", "pull a/b/c", "pull /etc", "plan nothing", "plan ./nothing", "verify nothing",
    "plan demo --rules nothing.yaml", "plan demo --model.expert-format int3",
    "plan demo --model.linear-format int3", "convert nothing --format int8",
    "convert demo --format int3", "convert demo --to int3 --out o",
    "convert nothing --to bf16 --out o", "finetune nothing.yaml", "finetune .",
    "eval nothing --data d", "eval demo --data nothing", "eval demo --data d --adapter nothing",
    "export nothing --adapter a --out o", "export demo --adapter nothing --out o",
    "bench nothing", "bench engine --with-peers", "bench engine --cases nothing",
    "bench engine --trace t.jsonl", "bench engine --json no/such/folder",
    "doctor --peer nothing", "doctor --peer h:x",
    "plan demo --hardware measured --users 0", "plan demo --hardware measured --quality int3",
    "plan demo --hardware measured --rate -1", "plan demo --hardware measured --context -5",
    "plan demo --hardware measured --gpu-experts -3",
    "bench serve --base-url http://127.0.0.1:1", "bench run",
    "plan nothing --hardware measured", "plan demo --hardware nothing",
    "generate -f . --url http://127.0.0.1:1", "export demo --adapter . --out o",
    "store set-floor", "store set-floor --yes", "store host --store.master nonsense",
    "store host --store.segment-dir /proc/nothing", "store host --store.segment-bytes 1",
    "store host --store.segment-bytes lots", "store master --store.master nonsense",
    "store get k", "store put k nothing", "store rm k", "store ls", "store stat", "store drain h",
    "store retire h",
]  # fmt: skip
"""Status 1."""

REMEDIES = {
    1: r"--[a-z]|`tandem |\b(give|write|choose|name|set) |there is |"
    r"(run there|one running)\?$|such/folder",
    2: r": see `tandem [a-z -]*--help`$",
}
"""By status: a flag, a command, a verb that says what to do, or the question that answers itself;
or the folder that was named. A colon is none."""


@pytest.fixture
def elsewhere(tmp_path, tmp_path_factory, monkeypatch):
    """An empty folder to work in, no hub, a machine that is measured once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "DEFAULT_ROOT", tmp_path_factory.mktemp("hardware"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def list_faults(run, status, cases):
    """Return what is wrong with the answers to mistakes, each with its words."""
    for words in cases:
        found, out, err = run(*words.split())
        lines = err.strip().splitlines()
        if found != status:
            yield f"{words}: status {found}: {out[-200:]} {err[-300:]}"
        elif words in ("bench", "config", "sim", "store"):
            if "Usage:" not in out:
                yield f"{words}: no help"
        elif len(lines) != 1 or not lines[0].startswith("tandem: "):
            yield f"{words}: {err!r}"
        elif not re.search(REMEDIES[status], lines[0]):
            yield f"{words}: no remedy: {err!r}"


def test_every_command_has_its_mistakes():
    commands = [" ".join(path) for path in COMMANDS]
    assert "store set-floor" in commands
    mistaken = [" ".join(words.split()) + " " for words in (*WORDS, *INPUTS)]
    without = [
        name for name in commands if not any(words.startswith(f"{name} ") for words in mistaken)
    ]
    assert not without


def test_a_wrong_command_line_is_one_line_and_status_2(run, elsewhere):
    assert len(WORDS) + len(INPUTS) >= 150
    assert not list(list_faults(run, 2, WORDS))


def test_what_cannot_be_done_is_one_line_and_status_1(run, elsewhere, tmp_path, monkeypatch):
    of_a_store = [words for words in INPUTS if words.startswith("store ")]
    assert not list(list_faults(run, 1, [w for w in INPUTS if w not in of_a_store]))
    # For these alone: an instance that cannot reach its store warns, in a line before the error.
    monkeypatch.setenv("TANDEM_STORE__MASTER", f"ipc://{tmp_path}/m")
    monkeypatch.setenv("TANDEM_RPC__CONNECT_TIMEOUT_MS", "100")
    assert not list(list_faults(run, 1, of_a_store))


def test_flags_take_underscores(run):
    for flag in ("--max_model_len", "--max-model-len", "--engine.max_model_len"):
        status, out, _ = run("config", "show", "--json", flag, "77")
        assert (status, '"value": 77' in out) == (0, True), flag
