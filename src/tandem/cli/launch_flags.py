"""Flags of SGLang's and KTransformers' launch commands, which ``tandem serve`` accepts too.

Each flag is in one of three classes. A mapped flag sets one of our settings; a settled flag asks
for what Tandem always does, so only a note is printed; a refused flag is an error with the reason
and the setting to use instead. None is ignored silently. The flags are not in ``--help``: they are
for commands that were written for those programs.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from tandem.core.errors import ConfigError

__all__ = ["LAUNCH_FLAGS", "LaunchFlag", "Translation", "make_launch_parameters", "translate"]

PREFIX = "launch__"
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

FOUND = "cores and NUMA nodes are found from affinity and quota"


class LaunchFlag(NamedTuple):
    """A flag of SGLang's or KTransformers' launch command: its argument, and what it becomes
    here.
    """

    names: tuple[str, ...]
    kind: Literal["mapped", "settled", "refused"]
    target: str
    """For a mapped flag, the setting; for a settled one, the reason; for a refused one, the reason
    and what to use instead."""
    has_value: bool = True
    convert: Callable[[str, Mapping[str, str]], str] | None = None
    """For a mapped flag: returns the setting's value, given the flag's value and all given
    flags."""
    harmless: tuple[str, ...] = ()
    """Values with which a refused flag asks for nothing, so that it is accepted."""

    @property
    def parameter(self) -> str:
        """Name of the parameter by which a command receives the flag."""
        return PREFIX + self.names[0].removeprefix("--").replace("-", "_")


class Translation(NamedTuple):
    """The meaning here of another server's flags: settings by path, each with the flag that set it
    and the value, and notes for the user.
    """

    settings: dict[str, tuple[str, str]]
    notes: list[str]


def _count_blocks(value: str, given: Mapping[str, str]) -> str:
    size = int(given.get("--page-size", BLOCK_TOKENS))
    return str(-(-_whole("--max-total-tokens", value) // size))


def _read_chunk(value: str, given: Mapping[str, str]) -> str:
    del given
    if _whole("--chunked-prefill-size", value) < 1:
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


def _switch_off(value: str, given: Mapping[str, str]) -> str:
    del value, given
    return "false"


def _whole(flag: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError("cli.serve", f"{flag} {value}: must be a whole number") from error


LAUNCH_FLAGS = (
    LaunchFlag(("--model", "--model-path"), "mapped", "model.path"),
    LaunchFlag(("--context-length",), "mapped", "engine.max_model_len"),
    LaunchFlag(("--dtype",), "mapped", "model.dtype"),
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


def make_launch_parameters() -> list[inspect.Parameter]:
    """Return one hidden option for each flag of another server, for a command's signature."""
    return [
        inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if flag.has_value else False,
            annotation=Annotated[
                str | None if flag.has_value else bool,
                typer.Option(*flag.names, hidden=True, show_default=False),
            ],
        )
        for flag in LAUNCH_FLAGS
    ]


def translate(arguments: dict[str, Any], *, model: str | None) -> Translation:
    """Remove other servers' flags from a command's arguments; return the settings that they mean.

    Args:
        arguments: arguments of the command; the flags are removed from it.
        model: positional argument MODEL, which ``--model`` must not contradict.

    Raises: ConfigError (a flag is refused, contradicts another, or has a wrong value).
    """
    given: dict[str, str] = {}
    for flag in LAUNCH_FLAGS:
        value = arguments.pop(flag.parameter, None)
        if value is not None and value is not False:
            given[flag.names[0]] = "" if value is True else str(value)
    result = Translation({}, [])
    for flag in LAUNCH_FLAGS:
        name = flag.names[0]
        if name not in given:
            continue
        value = given[name]
        if flag.kind == "settled":
            result.notes.append(f"{name}: {flag.target}")
        elif flag.kind == "refused":
            if value not in flag.harmless:
                what = f"{name}{f' {value}' if value else ''}: {flag.target}"
                raise ConfigError("cli.serve", what, field=name.removeprefix("--"))
        else:
            mapped = value if flag.convert is None else flag.convert(value, given)
            result.settings[flag.target] = (name, mapped)
    _check_model(result, model)
    return result


def _check_model(result: Translation, model: str | None) -> None:
    told = result.settings.get("model.path")
    if told is not None and model is not None and Path(told[1]) != Path(model):
        what = f"MODEL is {model} and {told[0]} is {told[1]}: give one of them"
        raise ConfigError("cli.serve", what, field="model.path")
