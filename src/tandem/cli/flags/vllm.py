"""Flags of ``vllm serve``."""

from collections.abc import Mapping

from tandem.cli.flags.flag import LaunchFlag
from tandem.core.errors import ConfigError

__all__ = ["VLLM_FLAGS"]

KV_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8", "fp8_e4m3": "fp8"}


def _read_kv_dtype(value: str, given: Mapping[str, str]) -> str:
    del given
    if value not in KV_DTYPES:
        what = f"--kv-cache-dtype {value}: known are {', '.join(KV_DTYPES)}; or --engine.kv-dtype"
        raise ConfigError("cli.serve", what, field="engine.kv_dtype")
    return KV_DTYPES[value]


def _read_device(value: str, given: Mapping[str, str]) -> str:
    del given
    return "" if value == "auto" else value


def _switch_off(value: str, given: Mapping[str, str]) -> str:
    del value, given
    return "false"


VLLM_FLAGS = (
    LaunchFlag(
        ("--gpu-memory-utilization",),
        "settled",
        "a share of a GPU's memory; the cache takes a share of what is free, or "
        "--engine.kv-cache-gib",
    ),
    LaunchFlag(("--max-num-seqs",), "mapped", "engine.max_running"),
    LaunchFlag(("--max-num-batched-tokens",), "mapped", "engine.max_batch_tokens"),
    LaunchFlag(("--kv-cache-dtype",), "mapped", "engine.kv_dtype", convert=_read_kv_dtype),
    LaunchFlag(("--block-size",), "mapped", "engine.block_size"),
    LaunchFlag(
        ("--enable-auto-tool-choice",),
        "settled",
        "a model may always call the tools it gets",
        False,
    ),
    LaunchFlag(("--enable-prefix-caching",), "settled", "prefixes are always kept", False),
    LaunchFlag(("--enable-chunked-prefill",), "settled", "prompts are always cut in chunks", False),
    LaunchFlag(
        ("--no-enable-prefix-caching",),
        "mapped",
        "engine.prefix_cache",
        False,
        convert=_switch_off,
    ),
    LaunchFlag(("--enable-lora",), "settled", "--adapter is enough", False),
    LaunchFlag(("--max-lora-rank",), "settled", "an adapter has its own rank"),
    LaunchFlag(("--max-loras",), "settled", "a batch mixes all adapters that are loaded"),
    LaunchFlag(("--max-cpu-loras",), "mapped", "model.max_adapters"),
    LaunchFlag(("--lora-modules",), "mapped", "model.adapter"),
    LaunchFlag(
        ("--seed",),
        "settled",
        "a request's seed fixes its answer; without one, its request id does",
    ),
    LaunchFlag(("--device",), "mapped", "model.device", convert=_read_device),
    LaunchFlag(("--enforce-eager",), "settled", "nothing is compiled at the start", False),
    LaunchFlag(("--swap-space",), "settled", "requests that do not fit wait, or are computed anew"),
    LaunchFlag(
        ("--pipeline-parallel-size", "-pp"),
        "refused",
        "no stages yet: leave it out",
        harmless=("1",),
    ),
    LaunchFlag(
        ("--generation-config",),
        "refused",
        "values of requests come before the file's: leave it out",
        harmless=("auto",),
    ),
    LaunchFlag(
        ("--override-generation-config",),
        "refused",
        "requests name their own sampling: leave it out, or change generation_config.json",
    ),
    LaunchFlag(
        ("--no-enable-log-requests", "--disable-log-requests"),
        "settled",
        "no prompt is ever logged",
        False,
    ),
    LaunchFlag(
        ("--disable-log-stats",), "settled", "--server.load-log-s 0 ends the lines of load", False
    ),
    LaunchFlag(("--uvicorn-log-level",), "settled", "--log-level is that of all logs"),
    LaunchFlag(
        ("--guided-decoding-backend", "--structured-outputs-config"),
        "settled",
        "llguidance holds all grammars",
    ),
    LaunchFlag(("--limit-mm-per-prompt",), "settled", "images are not read"),
    LaunchFlag(("--speculative-config",), "refused", "no speculative decoding yet: leave it out"),
    LaunchFlag(
        ("--root-path",), "refused", "paths have no prefix: let the proxy before it remove that"
    ),
    LaunchFlag(
        ("--load-format",),
        "refused",
        "the files say what they are: leave it out",
        harmless=("auto", "safetensors", "gguf"),
    ),
    LaunchFlag(("--download-dir",), "refused", "set the variable HF_HUB_CACHE, and leave it out"),
    LaunchFlag(("--tokenizer",), "refused", "the model's own tokenizer is used"),
    LaunchFlag(("--revision",), "mapped", "model.revision"),
    LaunchFlag(("--ssl-keyfile",), "mapped", "server.ssl_keyfile"),
    LaunchFlag(("--ssl-certfile",), "mapped", "server.ssl_certfile"),
)
