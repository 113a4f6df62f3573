"""Flags of ``llama-server``."""

from collections.abc import Mapping

from tandem.cli.flags.flag import LaunchFlag
from tandem.core.errors import ConfigError

__all__ = ["LLAMA_SERVER_FLAGS"]

PLACING = "--model.device cuda keeps all but routed experts on a GPU"
MAPPED_FILE = "files are mapped and packed once; what was packed stays in the packed cache"
CACHE_TYPES = {"f32": "float32", "bf16": "bfloat16", "q8_0": "int8", "f16": "auto"}


def _read_context(value: str, given: Mapping[str, str]) -> str:
    del given
    return "" if value == "0" else value


def _read_threads(value: str, given: Mapping[str, str]) -> str:
    del given
    return "" if value == "-1" else value


def _read_cache_type(value: str, given: Mapping[str, str]) -> str:
    other = given.get("--cache-type-v", value)
    if other != value:
        what = f"--cache-type-k {value} and --cache-type-v {other}: keys and values have one type"
        raise ConfigError("cli.serve", what, field="engine.kv_dtype")
    if value not in CACHE_TYPES:
        what = f"--cache-type-k {value}: known are {', '.join(CACHE_TYPES)}, or --engine.kv-dtype"
        raise ConfigError("cli.serve", what, field="engine.kv_dtype")
    return CACHE_TYPES[value]


LLAMA_SERVER_FLAGS = (
    LaunchFlag(("--ctx-size", "-c"), "mapped", "engine.max_model_len", convert=_read_context),
    LaunchFlag(("--threads", "-t"), "mapped", "engine.threads", convert=_read_threads),
    LaunchFlag(("--threads-batch", "-tb"), "settled", "all phases use --engine.threads"),
    LaunchFlag(("--alias", "-a"), "mapped", "server.served_model_name"),
    LaunchFlag(("--parallel", "-np"), "mapped", "engine.max_running", convert=_read_threads),
    LaunchFlag(("--ubatch-size", "-ub"), "mapped", "engine.max_batch_tokens"),
    LaunchFlag(("--batch-size", "-b"), "settled", "--ubatch-size bounds the tokens of a step"),
    LaunchFlag(("--cont-batching", "-cb"), "settled", "requests are always batched", False),
    LaunchFlag(("--cache-type-k", "-ctk"), "mapped", "engine.kv_dtype", convert=_read_cache_type),
    LaunchFlag(("--cache-type-v", "-ctv"), "settled", "values of KV have the type of keys"),
    LaunchFlag(
        ("--n-gpu-layers", "--gpu-layers", "-ngl"),
        "refused",
        f"{PLACING}; it is not given by layers",
        harmless=("0",),
    ),
    LaunchFlag(
        ("--cpu-moe", "-cmoe"),
        "settled",
        "routed experts are computed on the CPU unless --model.expert-device says otherwise",
        False,
    ),
    LaunchFlag(
        ("--n-cpu-moe", "-ncmoe"),
        "refused",
        "--model.device-experts N keeps N experts of each layer in the GPU's memory",
    ),
    LaunchFlag(
        ("--override-tensor", "-ot"),
        "refused",
        f"{PLACING}, --model.rules FILE places modules by their names",
        harmless=("exps=CPU", "ffn_.*_exps=CPU", ".ffn_.*_exps.=CPU", r"\.ffn_.*_exps\.=CPU"),
    ),
    LaunchFlag(("--flash-attn", "-fa"), "settled", "there is one attention for a device"),
    LaunchFlag(("--jinja",), "settled", "chat templates are always rendered as jinja", False),
    LaunchFlag(("--chat-template", "--chat-template-file"), "mapped", "server.chat_template"),
    LaunchFlag(
        ("--lora",), "refused", "give --adapter NAME=FOLDER, a LoRA adapter in PEFT's format"
    ),
    LaunchFlag(("--mlock",), "settled", MAPPED_FILE, False),
    LaunchFlag(("--no-mmap",), "settled", MAPPED_FILE, False),
    LaunchFlag(("--numa",), "settled", "NUMA nodes are found from affinity and quota"),
    LaunchFlag(("--api-key-file",), "mapped", "server.api_key_file"),
    LaunchFlag(("--metrics",), "settled", "metrics are at /metrics", False),
    LaunchFlag(("--embeddings", "--embedding"), "settled", "/v1/embeddings is there", False),
    LaunchFlag(
        ("--mmproj", "-mm"), "refused", "images are not read: leave it out to serve text alone"
    ),
)
