"""Commands that need no server: what they print, in text and JSON, and how they fail."""

import json

import pytest

from tandem.bench.harness import BenchRecord
from tandem.cli.config import SHORT_NAMES, Config
from tandem.core.config import list_fields


def test_version(run):
    found = json.loads(run("version", "--json")[1])
    assert found["tandem"]
    assert found["torch"]
    assert f"tandem {found['tandem']}" in run("version")[1]


def test_config_show_names_every_setting_and_its_origin(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("engine: {block_size: 16}\n")
    _, out, _ = run(
        "config", "show", "--json", "--config", str(file), "--port", "9", "--max-model-len", "99",
    )  # fmt: skip
    rows = {row["setting"]: row for row in json.loads(out)}
    assert set(rows) == {field.path for field in list_fields(Config)}
    assert rows["engine.block_size"]["value"] == 16
    assert rows["engine.block_size"]["origin"] == "file c.yaml"
    assert rows["server.port"]["origin"] == "flag --port"
    assert rows["engine.max_model_len"]["value"] == 99
    assert rows["server.host"]["origin"] == "default"
    assert set(SHORT_NAMES) <= set(rows)


def test_a_repeated_flag_adds_to_its_list(run):
    """The documented form: each --adapter counts, not the last alone; commas do, too."""
    arguments = ["--adapter", "a=/x", "--adapter", "b=/y,c=/z", "--server.allowed-hosts", "h"]
    shown = json.loads(run("config", "show", "--json", *arguments)[1])
    values = {row["setting"]: row["value"] for row in shown}
    assert values["model.adapter"] == ["a=/x", "b=/y", "c=/z"]
    assert values["server.allowed_hosts"] == ["h"]
    assert values["server.cors_origins"] == []


def test_config_show_hides_secrets(run):
    _, out, _ = run("config", "show", "--api-key", "s3cret")
    assert "s3cret" not in out
    assert "***" in out


@pytest.mark.parametrize("text", ["[/x]", "[bold]a", ":smile:", "a:b:c", "\\", "long" * 200])
def test_what_rich_would_take_for_markup_is_text(run, text):
    status, out, _ = run("config", "show", "--model.revision", text)
    assert status == 0
    assert f" {text} " in out


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\udcff", "\u202e"])
def test_what_a_terminal_would_take_for_a_command_is_escaped(run, text):
    status, out, _ = run("config", "show", "--model.revision", text)
    assert status == 0
    assert text not in out
    assert ascii(text)[1:-1] in out


def test_dry_run_says_what_and_why(run):
    """The table and the JSON document are of one plan; starting Python for each costs seconds."""
    plan = json.loads(run("serve", "demo", "--dry-run", "--json")[1])
    assert plan["config"]["num_kv_blocks"] > 0
    assert plan["config"]["max_model_len"] == 2048
    assert plan["model"]["spec"]["architecture"] == "Qwen3MoeForCausalLM"
    reasons = {what: (value, why) for what, value, why in plan["rows"]}
    assert {"weights", "dtype", "context", "threads", "KV cache"} <= set(reasons)
    assert all(why for _, why in reasons.values())


def test_plan_reports_rule_by_module_and_unused_rules(run, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- match: {name: '^model\\.layers\\..*\\.mlp\\.experts$'}\n"
        "  replace: {class: Experts}\n"
        "- match: {name: '^no\\.such\\.module$'}\n"
        "  replace: {class: Linear}\n"
    )
    text = run("plan", "demo", "--rules", str(rules))[1]
    assert "Experts" in text
    assert "matched no module" in text
    report = json.loads(run("plan", "demo", "--rules", str(rules), "--json")[1])
    assert report["unused_rules"]
    assert report["modules"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "/nonexistent"), ["/nonexistent"]),
        (("serve",), ["model"]),
        (("bench", "nope"), ["nope", "engine"]),
        (("bench", "engine", "--with-peers"), ["no peers for engine"]),
        (("generate", "demo", "-p", "x", "--file", "y"), ["prompt"]),
        (("pull", "not an id"), ["not an id"]),
        (("config", "show", "--config", "/nonexistent.yaml"), ["/nonexistent.yaml"]),
    ],
)
def test_errors_are_one_line_and_status_1(run, arguments, words):
    status, _, errors = run(*arguments)
    assert status == 1
    assert errors.startswith("tandem: ")
    assert "Traceback" not in errors
    for word in words:
        assert word in errors


def test_convert_writes_a_checkpoint_that_the_next_command_reads(run, tmp_path):
    """A full disk, a folder in the way and the formats are tests of `models.export`."""
    out = tmp_path / "demo4"
    written = json.loads(run("convert", "demo", "--to", "int4g32", "--out", str(out), "--json")[1])
    assert (written["weight_format"], written["num_coded"]) == ("int4g32", 168)
    assert written["size_bytes"] < 0.5 * written["source_bytes"]
    plan = run("plan", str(out), "--modules")[1]
    assert "as the checkpoint stores it: int4 in groups of 32, with zero points" in plan
    # One advice: which option it was that is missing.
    for wrong, advice in (
        (("--to", "int8"), "--to int8 writes a folder: give --out FOLDER"),
        (("--format", "q4_k_m"), "a GGUF file is --to q4_k_m --out FOLDER"),
    ):
        status, _, errors = run("convert", "demo", *wrong)
        assert (status, advice in errors) == (2, True), errors
    # Of experts that are packed ahead: with --to they would be passed over.
    other = ("convert", "demo", "--to", "int8", "--out", str(tmp_path / "other"))
    for more in (["--verify"], ["--rules", "r.yaml"], ["--packed-cache", "p"]):
        status, _, errors = run(*other, *more)
        assert (status, more[0] in errors) == (2, True)
    assert not (tmp_path / "other").exists()


def test_convert_packs_once_and_says_what(run, tmp_path):
    arguments = ("convert", "demo", "--format", "int8", "--packed-cache", str(tmp_path))
    first = json.loads(run(*arguments, "--json")[1])
    assert (first["weight_format"], first["num_files"], first["num_packed"]) == ("int8g128", 6, 6)
    assert first["size_bytes"] < 0.6 * first["source_bytes"]
    assert "0 packed now, 6 were there" in run(*arguments, "--verify")[1]
    line = (
        "--input-path", "demo", "--input-type", "bf16", "--output", str(tmp_path),
        "--quant-method", "int8", "--cpuinfer-threads", "60", "--threadpool-count", "2",
    )  # fmt: skip
    status, out, errors = run("convert", *line, "--json")
    assert status == 0, errors
    assert json.loads(out)["num_packed"] == 0, "KTransformers' line makes the same files"
    assert run("convert", "--input-path", "demo", "--quant-method", "awq")[0] == 2
    assert run("convert", "demo", "--quant-method", "int8")[0] == 2
    status, _, errors = run("convert", "demo", "--format", "int3", "--packed-cache", str(tmp_path))
    assert status == 1
    assert "choose one of" in errors


def run_two_cases(*_, **__):
    yield BenchRecord(
        bench="engine", case="first", ours=1.0, baseline=None, baseline_name=None, unit="us",
        ratio=None, ratio_iqr=None, ceiling=None, ceiling_fraction=None, check="ok", n=1,
    )  # fmt: skip
    raise KeyboardInterrupt


def test_a_benchmark_that_is_stopped_has_written_what_it_measured(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.cli.commands.bench.run_cases", run_two_cases)
    file = tmp_path / "lines.json"
    file.write_text("of an earlier run\n")
    assert run("bench", "engine", "--json", str(file))[0] == 130
    assert [json.loads(line)["case"] for line in file.read_text().splitlines()] == ["first"]


@pytest.mark.parametrize("name", ["", "no/such/folder"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    run, tmp_path, monkeypatch, name
):
    monkeypatch.setattr("tandem.cli.commands.bench.run_cases", lambda *_, **__: pytest.fail("ran"))
    status, _, errors = run("bench", "engine", "--json", str(tmp_path / name))
    assert status == 1
    assert str(tmp_path) in errors
