"""Flags of SGLang's and KTransformers' launch commands."""

from collections.abc import Mapping

from tandem.cli.flags.flag import LaunchFlag, read_count
from tandem.core.errors import ConfigError

__all__ = ["SGLANG_FLAGS"]

BLOCK_TOKENS = 64
"""Default number of tokens of a block."""
EXPERT_FORMATS = {
    "AMXINT4": "int4",
    "AMXINT8": "int8",
    "MOE_INT4": "int4",
    "MOE_INT8": "int8",
    "BF16": "bf16",
    "FP8": "auto",
    "FP8_PERCHANNEL": "auto",
    "RAWINT4": "auto",
    "GPTQ_INT4": "auto",
    "MXFP4": "auto",
    "MXFP8": "auto",
}
"""Weight format of routed experts by value of ``--kt-method``; native methods keep the
checkpoint's."""

HALF: dict[str, str] = dict.fromkeys(("float16", "half", "fp16"), "computed in bfloat16")
"""Notes for dtypes of 16 bits that are not computed in."""
FOUND = "cores and NUMA nodes are found from affinity and quota"


def _count_blocks(value: str, given: Mapping[str, str]) -> str:
    size = int(given.get("--page-size", BLOCK_TOKENS))
    return str(-(-read_count("--max-total-tokens", value) // size))


def _read_chunk(value: str, given: Mapping[str, str]) -> str:
    del given
    if read_count("--chunked-prefill-size", value) < 1:
        what = (
            "--chunked-prefill-size: steps always have a bound here: give --engine.max-batch-tokens"
        )
        raise ConfigError("cli.serve", what, field="engine.max_batch_tokens")
    return value


def _read_method(value: str, given: Mapping[str, str]) -> str:
    del given
    if value == "LLAMAFILE":
        what = "--kt-method LLAMAFILE: give the GGUF file or its folder as MODEL, without it"
        raise ConfigError("cli.serve", what, field="model.path")
    if value not in EXPERT_FORMATS:
        known = ", ".join(EXPERT_FORMATS)
        what = f"--kt-method {value}: known are {known}; or give --expert-format"
        raise ConfigError("cli.serve", what, field="model.expert_format")
    return EXPERT_FORMATS[value]


def _read_dtype(value: str, given: Mapping[str, str]) -> str:
    del given
    return "bfloat16" if value.lower() in HALF else value


def _switch_off(value: str, given: Mapping[str, str]) -> str:
    del value, given
    return "false"


SGLANG_FLAGS = (
    LaunchFlag(("--model", "--model-path", "-m"), "mapped", "model.path"),
    LaunchFlag(("--context-length",), "mapped", "engine.max_model_len"),
    LaunchFlag(("--dtype",), "mapped", "model.dtype", convert=_read_dtype, notes=HALF),
    LaunchFlag(("--page-size",), "mapped", "engine.block_size"),
    LaunchFlag(
        ("--chunked-prefill-size",), "mapped", "engine.max_batch_tokens", convert=_read_chunk
    ),
    LaunchFlag(("--max-running-requests",), "mapped", "engine.max_running"),
    LaunchFlag(("--max-queued-requests",), "mapped", "engine.max_queue"),
    LaunchFlag(("--max-total-tokens",), "mapped", "engine.num_kv_blocks", convert=_count_blocks),
    LaunchFlag(
        ("--disable-radix-cache",), "mapped", "engine.prefix_cache", False, convert=_switch_off
    ),
    LaunchFlag(("--kt-method",), "mapped", "model.expert_format", convert=_read_method),
    LaunchFlag(("--kt-cpuinfer",), "mapped", "engine.threads"),
    LaunchFlag(
        ("--kt-weight-path",),
        "settled",
        "experts are packed from MODEL itself, for whatever NUMA nodes there are; `tandem convert` "
        "does it ahead. Folders that KTransformers converted are not read",
    ),
    LaunchFlag(("--kt-threadpool-count",), "settled", FOUND),
    LaunchFlag(("--kt-numa-nodes",), "refused", f"{FOUND}: start it under numactl or taskset"),
    LaunchFlag(("--kt-num-gpu-experts",), "mapped", "model.device_experts"),
    LaunchFlag(
        ("--kt-gpu-experts-ratio",),
        "refused",
        "give --model.device-experts, a number for each layer",
        harmless=("0", "0.0"),
    ),
    LaunchFlag(("--kt-gpu-prefill-token-threshold",), "mapped", "model.stream_tokens"),
    LaunchFlag(
        ("--kt-enable-dynamic-expert-update",),
        "settled",
        "experts in a GPU's memory always follow what is chosen, by --model.expert-policy",
        has_value=False,
    ),
    LaunchFlag(
        ("--record-kt-gpu-expert-distribution",),
        "refused",
        "give --engine.expert-trace FILE, and replay it by `tandem plan --experts FILE`",
        has_value=False,
    ),
    LaunchFlag(
        ("--kt-expert-placement-strategy",),
        "settled",
        "--model.expert-policy says which experts stay in a GPU's memory",
    ),
    LaunchFlag(("--kt-max-deferred-experts-per-token",), "mapped", "model.deferred_experts"),
    LaunchFlag(
        ("--kt-expert-lora-path", "--kt-lora-path"),
        "refused",
        "give --adapter NAME=FOLDER, a folder in PEFT's format",
    ),
    LaunchFlag(
        ("--mem-fraction-static",),
        "settled",
        "a share of a GPU's memory; the cache takes a share of what is free, or "
        "--engine.kv-cache-gib",
    ),
    LaunchFlag(
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        "refused",
        "no tensor parallelism yet: leave it out; --unified N starts several instances",
        harmless=("1",),
    ),
    LaunchFlag(
        ("--data-parallel-size", "--dp-size", "--dp"),
        "mapped",
        "cluster.unified",
    ),
    LaunchFlag(
        ("--expert-parallel-size", "--ep-size", "--ep"),
        "refused",
        "no expert parallelism yet: leave it out",
        harmless=("1",),
    ),
    LaunchFlag(("--enable-mixed-chunk",), "settled", "steps mix decodes and chunks anyway", False),
    LaunchFlag(
        ("--enable-p2p-check",), "settled", "there are no GPUs that exchange memory here", False
    ),
    LaunchFlag(
        ("--disable-shared-experts-fusion",),
        "settled",
        "shared experts are computed apart from routed ones anyway",
        False,
    ),
    LaunchFlag(
        ("--disable-chunked-prefix-cache",), "settled", "a cached prefix is read in place", False
    ),
    LaunchFlag(
        ("--trust-remote-code",),
        "settled",
        "no code of a checkpoint is ever run; transformers' own classes are taken",
        False,
    ),
    LaunchFlag(("--skip-server-warmup",), "settled", "nothing is warmed up by requests", False),
    LaunchFlag(("--disable-cuda-graph",), "settled", "no CUDA graph is captured here", False),
    LaunchFlag(("--attention-backend",), "settled", "there is one attention for a device"),
    LaunchFlag(("--fp8-gemm-backend",), "settled", "there is one product for a format"),
    LaunchFlag(
        ("--watchdog-timeout",), "settled", "an instance that does not answer is started again"
    ),
    LaunchFlag(
        ("--tool-call-parser",),
        "settled",
        "the form of calls is read from the chat template, or set by --server.output-format",
    ),
    LaunchFlag(
        ("--reasoning-parser",),
        "settled",
        "the form of reasoning is read from the chat template, or set by --server.output-format",
    ),
    LaunchFlag(
        ("--quantization",),
        "refused",
        "a checkpoint's format is recognised; --model.expert-format and --model.linear-format "
        "choose another",
    ),
)
