"""A table over all commands: each has --json and help, completes, and names the next command."""

import asyncio
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from command_tree import COMMANDS as ALL

from tandem.cli.commands.serve import _Announcer
from tandem.cli.config import Config
from tandem.cli.main import COMMANDS
from tandem.cli.simulating import record
from tandem.server.config import ServerConfig

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster" / "cluster.yaml"


def test_the_table_is_whole():
    assert {words[0] for words in ALL} == set(COMMANDS)
    assert len(ALL) > 45


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_command_has_json_and_says_what_each_word_means(words):
    options = [p for p in ALL[words].params if p.param_type_name == "option"]
    assert any("--json" in option.opts for option in options)
    assert ALL[words].help
    silent = [p.name for p in options if not p.help and not p.hidden]
    assert silent == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tandem ", list(COMMANDS)),
        ("tandem st", ["store"]),
        ("tandem store dr", ["drain"]),
        ("tandem serve --max-model", ["--max-model-len"]),
        ("tandem serve --model.dt", ["--model.dtype"]),
        ("tandem bench moe --c", ["--cases"]),
        ("tandem plan demo --hardware 8xa", ["8xa800"]),
    ],
)
def test_a_shell_completes(run, monkeypatch, line, found):
    monkeypatch.setenv("_TANDEM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    status, out, _ = run()
    assert (status, out.split()) == (0, found)


NEXT = {
    "pull some/model": "tandem serve some/model",
    "pull some/model --revision v2": "tandem serve some/model --model.revision v2",
    "export demo --adapter a --out 'my model'": "tandem serve 'my model'",
    "convert demo --format int8 --packed-cache packed": (
        "tandem serve demo --model.expert-format int8 --model.packed-cache packed"
    ),
    "verify demo": "tandem serve demo",
    "finetune recipe.yaml": "tandem chat demo --adapter out",
    "finetune experts.yaml": "tandem export demo --adapter experts --out FOLDER",
    "plan demo": "tandem serve demo",
    "doctor": "tandem plan MODEL, which tells what serving a model is here",
    "cluster keys secret": (
        "tandem cluster launch MODEL --launcher.listen tcp://HOST:PORT --cluster.secret-file secret"
    ),
    f"cluster render {CLUSTER}": "kubectl apply -f FILE, with this output as FILE",
    "sim record t.jsonl --seconds 0": "tandem sim run SCENARIO --trace t.jsonl",
}


def ask_nobody(url, path, kind, body=None, **_):
    row = {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [0]}
    rows = [row] if body["action"] == "stop" else []
    return msgspec.convert({"recording": "r", "rows": rows, "num_lost": 0}, kind)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with recipes, and nobody who trains, downloads or answers."""
    monkeypatch.chdir(tmp_path)
    for name, targets in (("recipe", []), ("experts", ["experts.gate_up_proj"])):
        out = "out" if name == "recipe" else name
        recipe = {"model_name_or_path": "demo", "dataset": "rows.json", "output_dir": out}
        Path(f"{name}.yaml").write_text(yaml.dump(recipe))
        Path(out).mkdir()
        config = {"target_parameters": targets}
        Path(out, "adapter_config.json").write_text(json.dumps(config))

    def train(recipe, *, has_bar):
        return SimpleNamespace(
            output_dir=recipe.output.output_dir,
            results={"train_loss": 1.0},
            num_examples=1,
            num_bad_rows=0,
            num_too_short=0,
            trainable_parameters=1,
        )

    def fake(name, **members):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))

    fake("tandem.finetune.training.trainer", finetune=train)
    fake("tandem.finetune.export", export_merged=lambda model, adapter, out: out)
    monkeypatch.setattr("tandem.models.loading.hub.pull", lambda *_, **__: Path("pulled"))
    monkeypatch.setattr(record, "call_server", ask_nobody)


@pytest.mark.parametrize("line", NEXT)
def test_a_command_names_the_next_one(run, workplace, line):
    status, out, errors = run(*shlex.split(line))
    assert status == 0, errors
    assert out[:1] != "\n", "nothing that draws has been there"
    if line.startswith("finetune"):
        assert "mean loss 1.0000" in out
    assert errors.splitlines()[-1] == f"next: {NEXT[line]}"
    assert "next:" not in out, "a script reads the result there"


@pytest.mark.parametrize("line", ["cluster keys secret", "verify demo", "pull some/model"])
def test_with_json_there_is_one_document_and_nothing_else(run, workplace, line):
    status, out, errors = run(*shlex.split(line), "--json")
    assert (status, errors) == (0, "")
    assert json.loads(out)


def test_a_server_names_the_client_that_reaches_it(capsys):
    plan = [
        ("model", "/models/demo", "Qwen3MoeForCausalLM"),
        ("weights", "15 MiB", "7 parameters"),
        ("dtype", "bfloat16", "as stored"),
        ("context", "2048 tokens", "the model's own"),
        ("KV cache", "64 blocks", "twice"),
        ("requests", "64 running", ""),
        ("speed", "9 tokens/s", "predicted for one user"),
    ]
    info = SimpleNamespace(plan=plan, rejected=[], load_seconds=1.0, model="demo")

    async def announce(**settings):
        async def wait_ready():
            return info

        cluster = SimpleNamespace(wait_ready=wait_ready, instances=[SimpleNamespace(name="a")])
        started = asyncio.get_running_loop().create_future()
        started.set_result(SimpleNamespace(url="http://127.0.0.1:9"))
        config = Config(server=ServerConfig(**settings))
        announcer = _Announcer(config, is_verbose=False, with_rejected=False)
        await announcer.announce(cluster, started, json=False)

    asyncio.run(announce())
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "model    demo, Qwen3MoeForCausalLM, bfloat16",
        "memory   15 MiB of weights, KV cache of 64 blocks",
        "context  2048 tokens, 64 running",
        "speed    9 tokens/s, predicted",
        "Serving demo at http://127.0.0.1:9",
    ]
    last = "next: tandem chat --url http://127.0.0.1:9, or open that address in a browser\n"
    assert told.err == last
    plan[-1] = ("speed", "unknown", "not measured: measure it")
    asyncio.run(announce(api_key=("secret",)))
    told = capsys.readouterr()
    assert "speed    unknown (not measured: measure it)\n" in told.out
    assert told.err == "next: tandem chat --url http://127.0.0.1:9 --api-key KEY\n"


def test_a_model_that_is_known_by_name_is_planned_without_a_download(run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, _, errors = run("plan", "Qwen/Qwen3-30B-A3B")
    assert status == 1
    assert "tandem plan qwen3-30b-a3b" in errors
