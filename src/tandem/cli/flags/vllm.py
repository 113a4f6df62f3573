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
    LaunchFlag(("--enable-lora",), "settled", "--adapter is enough", False),
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
    LaunchFlag(("--generation-config",), "refused", "values of requests come before the file's"),
    LaunchFlag(("--tokenizer",), "refused", "the model's own tokenizer is used"),
    LaunchFlag(("--revision",), "mapped", "model.revision"),
    LaunchFlag(("--ssl-keyfile",), "mapped", "server.ssl_keyfile"),
    LaunchFlag(("--ssl-certfile",), "mapped", "server.ssl_certfile"),
)
