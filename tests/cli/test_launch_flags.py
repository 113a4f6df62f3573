"""Goal: launch lines of SGLang, KTransformers, llama-server and vLLM start `tandem serve`, or are
told why not.
"""

import json
import shlex

import pytest

from tandem.cli.config import Config, load_config
from tandem.cli.flags.launch_flags import LAUNCH_FLAGS, translate
from tandem.core.config import list_fields
from tandem.core.errors import ConfigError

PUBLISHED = """--host 0.0.0.0 --port 8000 --trust-remote-code --mem-fraction-static 0.92
--chunked-prefill-size 4096 --served-model-name Qwen3-30B-A3B --enable-mixed-chunk
--kt-method AMXINT8 --kt-weight-path /models/Qwen3-30B-A3B-INT8/ --kt-cpuinfer 1
--kt-threadpool-count 2 --max-running-requests 4 --max-total-tokens 512 --enable-p2p-check
--disable-shared-experts-fusion"""
"""The field report's and the talk's lines, without what is refused."""
SEEDS = (
    "--model", "--kt-weight-path", "--kt-method", "--kt-cpuinfer", "--kt-threadpool-count",
    "--kt-num-gpu-experts", "--kt-max-deferred-experts-per-token", "--mem-fraction-static",
    "--chunked-prefill-size", "--enable-mixed-chunk", "--max-running-requests",
    "--max-total-tokens", "--tensor-parallel-size", "--enable-p2p-check",
    "--disable-shared-experts-fusion", "--trust-remote-code", "--attention-backend",
    "--kt-gpu-prefill-token-threshold", "--disable-radix-cache", "--disable-chunked-prefix-cache",
)  # fmt: skip


def test_a_published_line_starts_with_what_it_asks_for(run):
    arguments = shlex.split(PUBLISHED)
    status, out, errors = run("serve", "--model", "demo", *arguments, "--dry-run", "--json")
    assert status == 0, errors
    plan = json.loads(out)
    assert "--trust-remote-code: no code of a checkpoint is ever run" in errors
    assert "--kt-weight-path: experts are packed from MODEL itself" in errors
    rows = {row[0]: row[1] for row in plan["rows"]}
    assert any("512" in str(value) or "8 blocks" in str(value) for value in rows.values()), rows


def given(*flags):
    """Return the arguments that a command gets for these pairs of flag and value."""
    names = {flag.names[0]: flag.parameter for flag in LAUNCH_FLAGS}
    return {names[name]: value for name, value in flags}


def test_mapped_flags_are_the_settings():
    arguments = given(
        ("--model", "demo"),
        ("--kt-method", "AMXINT4"),
        ("--kt-cpuinfer", "3"),
        ("--chunked-prefill-size", "4096"),
        ("--max-running-requests", "37"),
        ("--max-total-tokens", "37000"),
        ("--disable-radix-cache", True),
        ("--kt-max-deferred-experts-per-token", "2"),
        ("--context-length", "1000"),
        ("--kt-num-gpu-experts", "32"),
        ("--kt-gpu-prefill-token-threshold", "400"),
    )
    found = translate(arguments, model=None)
    assert not arguments, "all are taken out"
    config = load_config(None, {}, foreign=found.settings).config
    assert config.model.path == "demo"
    assert config.model.expert_format == "int4"
    assert config.engine.threads == 3
    assert config.model.deferred_experts == 2
    assert config.engine.max_batch_tokens == 4096
    assert config.model.device_experts == 32
    assert config.model.stream_tokens == 400
    assert config.engine.max_running == 37
    assert config.engine.num_kv_blocks == 579
    assert config.engine.prefix_cache is False
    assert config.engine.max_model_len == 1000


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--kt-gpu-experts-ratio", "0.5", "device-experts"),
        ("--tensor-parallel-size", "2", "--unified"),
        ("--record-kt-gpu-expert-distribution", True, "expert-trace"),
        ("--kt-method", "LLAMAFILE", "GGUF"),
        ("--kt-method", "AMXINT3", "AMXINT4"),
        ("--chunked-prefill-size", "-1", "max-batch-tokens"),
        ("--max-total-tokens", "many", "whole number"),
        ("--quantization", "fp8", "linear-format"),
        ("--kt-lora-path", "x", "--adapter"),
    ],
)
def test_what_is_not_here_is_refused_with_what_does_it(flag, value, words):
    flag = "--kt-expert-lora-path" if flag == "--kt-lora-path" else flag
    with pytest.raises(ConfigError, match=words):
        translate(given((flag, value)), model=None)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kt-gpu-experts-ratio", "0"),
        ("--tensor-parallel-size", "1"),
    ],
)
def test_flags_that_ask_for_nothing_are_taken(flag, value):
    assert translate(given((flag, value)), model=None) == ({}, [])


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="MODEL is other"):
        translate(given(("--model", "demo")), model="other")
    found = translate(given(("--max-running-requests", "4")), model=None)
    with pytest.raises(ConfigError, match="same setting"):
        load_config(None, {"engine__max_running": "5"}, foreign=found.settings)


def test_every_flag_of_the_seeds_is_known_and_every_target_a_setting():
    names = {name for flag in LAUNCH_FLAGS for name in flag.names}
    assert set(SEEDS) <= names
    paths = {field.path for field in list_fields(Config)}
    ours = {field.flag for field in list_fields(Config)}
    for flag in LAUNCH_FLAGS:
        assert flag.kind != "mapped" or flag.target in paths, flag
        assert not ours & set(flag.names), flag
        assert len(flag.target) > 8


def test_lines_of_llama_server_and_vllm_mean_their_settings(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    cases = [
        (
            [
                *(("--model", "demo"), ("--ctx-size", "4k"), ("--threads", "2"), ("--jinja", True)),
                *(("--alias", "gpt"), ("--parallel", "8"), ("--cache-type-k", "q8_0")),
                *(("--n-gpu-layers", "0"), ("--override-tensor", "exps=CPU"), ("--cpu-moe", True)),
                ("--chat-template", str(template)),
            ],
            {
                "model.path": "demo",
                "engine.max_model_len": 4096,
                "engine.threads": 2,
                "server.served_model_name": ("gpt",),
                "engine.max_running": 8,
                "engine.kv_dtype": "int8",
                "server.chat_template": str(template),
            },
        ),
        (
            [
                *(("--dtype", "Half"), ("--max-num-seqs", "16"), ("--kv-cache-dtype", "fp8")),
                *(("--gpu-memory-utilization", "0.9"), ("--enable-auto-tool-choice", True)),
                *(("--lora-modules", "a=/x"), ("--seed", "1"), ("--device", "auto")),
                *(("--max-lora-rank", "16"), ("--max-cpu-loras", "3"), ("--load-format", "auto")),
                *(("--no-enable-prefix-caching", True), ("--no-enable-log-requests", True)),
            ],
            {
                "model.dtype": "bfloat16",
                "engine.max_running": 16,
                "engine.kv_dtype": "fp8",
                "model.adapter": ("a=/x",),
                "model.max_adapters": 3,
                "engine.prefix_cache": False,
                "model.device": "cpu",
            },
        ),
        (
            [("--ctx-size", "0"), ("--threads", "-1")],
            {"engine.max_model_len": 0, "engine.threads": 0},
        ),
    ]
    for flags, expected in cases:
        found = translate(given(*flags), model=None)
        config = load_config(None, {}, foreign=found.settings).config
        for path, value in expected.items():
            section, name = path.split(".")
            assert getattr(getattr(config, section), name) == value, path
    with pytest.raises(ConfigError, match=r"--model\.device cuda"):
        translate(given(("--n-gpu-layers", "99")), model=None)
    with pytest.raises(ConfigError, match="one type"):
        translate(given(("--cache-type-k", "q8_0"), ("--cache-type-v", "f16")), model=None)
    with pytest.raises(ConfigError, match="same setting"):
        translate(given(("--context-length", "1"), ("--ctx-size", "2")), model=None)


def test_short_flags_of_llama_server_are_parsed(run):
    words = ("-m", "demo", "-c", "1k", "-t", "1", "-ngl", "0", "-np", "2", "--dry-run", "--json")
    status, out, errors = run("serve", *words)
    assert status == 0, errors
    assert "1024" in out
