"""The quantization of a checkpoint, read from its ``quantization_config``: plain data.

Six methods are read: DeepSeek's fp8 blocks, compressed-tensors, modelopt, GPTQ, AWQ and gpt-oss's
mxfp4; unsupported variants are refused by name. The checkpoint's tensors decide which weights are
quantized; the configuration tells how, and which must not be.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.kernels.weights.formats import WEIGHT_FORMATS, WeightFormat

__all__ = [
    "METHODS",
    "MODELOPT_FILE",
    "Quantization",
    "Scheme",
    "read_quantization",
    "take_modelopt",
]

METHODS = {
    "fp8": "DeepSeek's e4m3 in blocks, or with one scale a tensor",
    "compressed-tensors": "pack-quantized, int-quantized, float-quantized, nvfp4- and "
    "mxfp4-pack-quantized",
    "modelopt": "NVFP4, and FP8 with one scale a tensor or an output",
    "gptq": "4 and 8 bits, with and without desc_act",
    "awq": "4 bits, version gemm",
    "mxfp4": "experts of gpt-oss",
}
"""Supported values of ``quant_method``, each with its supported variants."""

BLOCK = 128
"""Number of outputs, and of inputs, that share a scale in our fp8 weight format."""
GROUPS = {4: (128, 64, 32), 8: (128, 64, 32, 16)}
"""Group sizes of our integer formats, by bits, largest first."""
FP4_FORMATS = {16: "nvfp4", 32: "mxfp4"}
"""Names of our formats with e2m1 codes (4-bit floats), by the number of inputs that share a scale.
"""
MAX_GROUP = 1 << 24
MAX_PATTERN_CHARS = 300
MAX_REPEATS = 3
"""Most repeats in a pattern from a file: with more, a hostile pattern could take hours on a
name.
"""

FIELD = "quantization_config"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of one kind of weights: bits and type of codes, and what shares a scale."""

    bits: int
    """Bits of a code: 8 or 4."""
    is_float: bool = False
    """True if codes are e4m3 or e2m1 floats instead of integers."""
    group_size: int = 0
    """Inputs that share a scale; 0: all inputs of an output."""
    is_symmetric: bool = True
    """True if an integer code's zero point is the middle code."""
    block: tuple[int, int] | None = None
    """For e4m3, (outputs, inputs) that share a scale; (0, 0): the whole tensor; None: one
    output.
    """
    is_ordered: bool = False
    """True if the inputs of a group are listed one by one instead of being consecutive (act-order).
    """

    def find_format(self, inputs: int) -> WeightFormat | None:
        """Return the weight format that can hold codes with ``inputs`` inputs; None if there is
        none.
        """
        if self.is_ordered:
            return None
        if self.is_float:
            return self._find_float_format(inputs)
        shared = self.group_size or inputs
        if self.bits == 8 and not self.group_size and self.is_symmetric:
            return WEIGHT_FORMATS["int8row"]
        # A stored group that is a multiple of one of our group sizes is split: each of our groups
        # gets the same scale.
        size = next((g for g in GROUPS[self.bits] if shared % g == 0 and inputs % g == 0), None)
        if size is None:
            return None
        suffix = {(4, True): "sym", (4, False): "zp", (8, True): "", (8, False): "min"}
        return WEIGHT_FORMATS[f"int{self.bits}g{size}{suffix[self.bits, self.is_symmetric]}"]

    def _find_float_format(self, inputs: int) -> WeightFormat | None:
        if self.bits == 4:
            name = FP4_FORMATS[self.group_size]
            return WEIGHT_FORMATS[name] if inputs % self.group_size == 0 else None
        if self.block is None:
            return WEIGHT_FORMATS["fp8row"]
        return None if any(size % BLOCK for size in self.block) else WEIGHT_FORMATS["fp8"]

    def __str__(self) -> str:
        if self.is_float:
            if self.bits == 4:
                return FP4_FORMATS[self.group_size]
            if self.block is None:
                return "fp8 with a scale for each output"
            if self.block == (0, 0):
                return "fp8 with one scale a tensor"
            return f"fp8 in blocks of {self.block[0]} x {self.block[1]}"
        group = f"groups of {self.group_size}" if self.group_size else "rows"
        kind = "symmetric" if self.is_symmetric else "with zero points"
        return f"int{self.bits} in {group}, {kind}" + (", act-order" if self.is_ordered else "")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The contents of a configuration's ``quantization_config``: which modules are quantized, and
    how.
    """

    method: str
    """Quantization method, one of ``METHODS``."""
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Pairs (targets, scheme), of which the first match applies; empty targets match everything."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of modules that are not quantized."""
    notes: tuple[str, ...] = ()
    """Settings that are ignored, with the reason."""
    is_offset: bool = False
    """True if the file stores GPTQ zero points minus one."""

    def find_scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weight; None: the module is not quantized.

        Args:
            module: name of a linear module, or of the experts of a layer.
        """
        if _make_matcher(self.ignored, self.method in ("compressed-tensors", "modelopt"))(module):
            return None
        for targets, scheme in self.schemes:
            if not targets or any(_is_target(module, target) for target in targets):
                return scheme
        return None


def read_quantization(raw: dict[str, Any]) -> Quantization | None:
    """Read a checkpoint's quantization from its ``config.json``; None: it is not quantized.

    Raises:
        ConfigError: a field is missing, of a wrong type or out of bounds.
        UnsupportedError: a method or variant that is not supported; the text names it.
    """
    config = raw.get(FIELD)
    if config is None:
        config = raw.get("compression_config")
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        name = repr(method) if isinstance(method, str) else "by an unnamed method"
        raise _refuse(f"the checkpoint is quantized {name}: known are {known}", "quant_method")
    readers = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "mxfp4": _read_mxfp4,
    }
    return readers[method](config)


def _refuse(what: str, field: str) -> UnsupportedError:
    text = f"{what}: use another checkpoint of the model, in bfloat16 for example"
    return UnsupportedError("models.check_config", text, field=f"{FIELD}.{field}")


def _wrong(what: str, field: str) -> ConfigError:
    return ConfigError("models.check_config", f"{FIELD}: {what}", field=f"{FIELD}.{field}")


def _int(config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field, default)
    if type(value) is not int or not -1 <= value <= MAX_GROUP:
        raise _wrong(f"{field} is {value!r}: need a number", field)
    return value


def _flag(config: dict[str, Any], field: str, *, default: bool) -> bool:
    value = config.get(field, default)
    if type(value) is not bool:
        raise _wrong(f"{field} is {value!r}: need true or false", field)
    return value


def _group(config: dict[str, Any], field: str = "group_size") -> int:
    """Return the number of inputs that share a scale; 0 for all, which files write as -1 or
    null.
    """
    value = _int(config, field, -1) if config.get(field) is not None else -1
    if value == 0:
        raise _wrong(f"{field} is 0: need a number of inputs, or -1 for all", field)
    return max(value, 0)


def _pair(config: dict[str, Any], field: str) -> tuple[int, int]:
    value = config.get(field)
    if isinstance(value, list) and len(value) == 2:
        first, second = value
        if all(type(size) is int and 0 < size <= MAX_GROUP for size in (first, second)):
            return first, second
    raise _wrong(f"{field} is {value!r}: need two numbers", field)


def _names(config: dict[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(f"{field} is {value!r}: need a list of names", field)
    for name in value:
        _check_pattern(name.removeprefix("re:"), field)
    return tuple(value)


def _check_pattern(pattern: str, field: str) -> None:
    """Refuse a pattern that is invalid, or would take too long to match."""
    # Nested repeats take exponential time to match and many repeats in a row polynomial time, so
    # such patterns are refused.
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    is_hostile = len(pattern) > MAX_PATTERN_CHARS or re.search(r"\)[*+?{]", pattern) is not None
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(f"{field} has {pattern[:80]!r}, which is no pattern: {error}", field) from None
    if is_hostile or repeats > MAX_REPEATS:
        raise _refuse(f"{field} has the pattern {pattern[:80]!r}, which is too involved", field)


def _is_target(module: str, target: str) -> bool:
    """Match a target as compressed-tensors does: a class of modules, a pattern, or a name."""
    if target in ("Linear", "Experts"):
        return True
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


@cache
def _make_matcher(patterns: tuple[str, ...], is_ct: bool) -> Callable[[str], bool]:
    """Return a function that tells if patterns name a module; cached, since there are many names.

    transformers reads ``modules_to_not_convert`` as a prefix of whole words or a suffix, as a
    pattern or a name; compressed-tensors reads ``ignore`` as a name, or as a pattern after ``re:``.
    """
    if is_ct:
        names = {pattern for pattern in patterns if not pattern.startswith("re:")}
        found = [re.compile(p.removeprefix("re:")) for p in patterns if p not in names]
        return lambda module: module in names or any(p.match(module) for p in found)
    names = {pattern for pattern in patterns if re.fullmatch(r"[\w.]+", pattern)}
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    found = [re.compile(f"(?:{p}){boundary}") for p in patterns if p not in names]

    def match(module: str) -> bool:
        words = module.split(".")
        return (
            module.endswith(patterns)
            or any(".".join(words[: i + 1]) in names for i in range(len(words)))
            or any(pattern.match(module) for pattern in found)
        )

    return match


def _check_integer(bits: int, method: str) -> None:
    if bits not in GROUPS:
        raise _refuse(f"{method} of {bits} bits: 4 and 8 are read here", "bits")


def _read_fp8(config: dict[str, Any]) -> Quantization:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refuse(f"fp8 of the kind {fmt!r}: e4m3 is read here", "fmt")
    if config.get("expert_dtype", "fp8") != "fp8":
        what = f"experts of the kind {config['expert_dtype']!r} in fp8: fp8 is read here"
        raise _refuse(what, "expert_dtype")
    is_whole = config.get("weight_block_size") is None
    block = (0, 0) if is_whole else _pair(config, "weight_block_size")
    ignored = _names(config, "modules_to_not_convert") or _names(config, "ignored_layers")
    scheme = Scheme(8, is_float=True, block=block)
    scheme_name = config.get("activation_scheme", "dynamic")
    notes = (f"activations in fp8 ({scheme_name}): ignored, products take them in bf16",)
    return Quantization("fp8", (((), scheme),), ignored, notes)


def _read_gptq(config: dict[str, Any]) -> Quantization:
    bits = _int(config, "bits")
    _check_integer(bits, "GPTQ")
    layout = config.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refuse(f"GPTQ in the layout {layout!r}: gptq and gptq_v2 are read here", "format")
    dynamic = config.get("dynamic")
    if dynamic is not None and (
        not isinstance(dynamic, dict) or any(not str(key).startswith("-:") for key in dynamic)
    ):
        what = "GPTQ with settings of their own for some modules (dynamic)"
        raise _refuse(what, "dynamic")
    scheme = Scheme(
        bits,
        group_size=_group(config),
        is_symmetric=_flag(config, "sym", default=True),
        is_ordered=_flag(config, "desc_act", default=False),
    )
    ignored = () if config.get("lm_head") is True else ("lm_head",)
    return Quantization("gptq", (((), scheme),), ignored, is_offset=layout == "gptq")


def _read_awq(config: dict[str, Any]) -> Quantization:
    bits = _int(config, "bits" if "bits" in config else "w_bit")
    if bits != 4:
        raise _refuse(f"AWQ of {bits} bits: 4 are read here", "bits")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refuse(f"AWQ in the layout {version!r}: gemm is read here", "version")
    size = _group(config, "group_size" if "group_size" in config else "q_group_size")
    has_zero = _flag(config, "zero_point", default=True)
    ignored = (*_names(config, "modules_to_not_convert"), "lm_head")
    scheme = Scheme(4, group_size=size, is_symmetric=not has_zero)
    return Quantization("awq", (((), scheme),), ignored)


def _read_mxfp4(config: dict[str, Any]) -> Quantization:
    scheme = Scheme(4, is_float=True, group_size=32)
    return Quantization("mxfp4", (((), scheme),), _names(config, "modules_to_not_convert"))


CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)


def _read_compressed_tensors(config: dict[str, Any]) -> Quantization:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise _wrong(f"config_groups is {type(groups).__name__}: need an object", "config_groups")
    layouts = [config.get("format"), *(group.get("format") for group in groups.values())]
    for layout in layouts:
        if layout is not None and layout not in CT_FORMATS:
            what = f"compressed-tensors in the layout {layout!r}: read are {', '.join(CT_FORMATS)}"
            raise _refuse(what, "format")
    if config.get("quantization_status", "compressed") != "compressed":
        what = f"compressed-tensors of the status {config['quantization_status']!r}"
        raise _refuse(what, "quantization_status")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _refuse("compressed-tensors with sparse weights", "sparsity_config")
    if config.get("transform_config"):
        raise _refuse("compressed-tensors with transforms of activations", "transform_config")
    schemes = tuple(
        (_names(group, "targets"), _read_ct_weights(group.get("weights")))
        for group in groups.values()
    )
    if not schemes:
        raise _wrong("config_groups is empty", "config_groups")
    return Quantization("compressed-tensors", schemes, _names(config, "ignore"), _note_ct(config))


def _note_ct(config: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if config.get("kv_cache_scheme"):
        notes.append(
            "scales of the KV cache (kv_cache_scheme): ignored, blocks keep scales of their own"
        )
    inputs = [group.get("input_activations") for group in config["config_groups"].values()]
    for args in {str(a.get("num_bits")): a for a in inputs if isinstance(a, dict)}.values():
        kind = "fp" if args.get("type") == "float" else "int"
        notes.append(
            f"activations in {kind}{args.get('num_bits')}: ignored, products choose a step of "
            "their own for each token, or take bf16"
        )
    return tuple(notes)


def _read_ct_weights(weights: object) -> Scheme:
    if not isinstance(weights, dict):
        raise _refuse("compressed-tensors that code no weights", "config_groups")
    bits, kind = _int(weights, "num_bits", 8), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    known = ("tensor", "channel", "group", "block", "tensor_group")
    if strategy not in known:
        raise _refuse(f"scales by {strategy!r}: read are {', '.join(known)}", "strategy")
    if kind == "float" and bits == 4:
        size = _group(weights)
        scales = {16: "tensor_group", 32: "group"}
        if scales.get(size) != strategy or not _flag(weights, "symmetric", default=True):
            raise _refuse(
                f"floats of 4 bits in groups of {size}, unlike NVFP4 and MXFP4", "strategy"
            )
        return Scheme(4, is_float=True, group_size=size)
    if kind == "float":
        if bits != 8 or strategy == "group" or not _flag(weights, "symmetric", default=True):
            raise _refuse(f"floats of {bits} bits by {strategy}, unlike fp8", "num_bits")
        if strategy == "channel":
            return Scheme(8, is_float=True)
        block = (0, 0) if strategy == "tensor" else _pair(weights, "block_structure")
        return Scheme(8, is_float=True, block=block)
    if kind != "int":
        raise _refuse(f"weights of the type {kind!r}: int and float are read here", "type")
    _check_integer(bits, "compressed-tensors")
    if strategy not in ("group", "channel"):
        raise _refuse(f"integers with scales by {strategy}: read are group, channel", "strategy")
    size = _group(weights) if strategy == "group" else 0
    is_ordered = weights.get("actorder") in (True, "group", "dynamic")
    is_symmetric = _flag(weights, "symmetric", default=True)
    return Scheme(bits, group_size=size, is_symmetric=is_symmetric, is_ordered=is_ordered)


MODELOPT_SCHEMES = {
    "NVFP4": Scheme(4, is_float=True, group_size=16),
    "W4A16_NVFP4": Scheme(4, is_float=True, group_size=16),
    "FP8": Scheme(8, is_float=True, block=(0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(8, is_float=True),
}
"""Supported schemes, by modelopt's names."""
MODELOPT_FILE = "hf_quant_config.json"
"""File in which modelopt describes the quantization; newer versions also write it to
``config.json``.
"""


def take_modelopt(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the ``quantization_config`` equivalent to the contents of ``MODELOPT_FILE``."""
    inner = raw.get("quantization")
    found = dict(inner) if isinstance(inner, dict) else {}
    return {**found, "quant_method": "modelopt"}


def _make_pattern(name: str) -> str:
    return "re:" + ".*".join(re.escape(part) for part in name.split("*")) + "$"


def _read_modelopt(config: dict[str, Any]) -> Quantization:
    algorithm = config.get("quant_algo")
    scheme = MODELOPT_SCHEMES.get(algorithm) if isinstance(algorithm, str) else None
    if scheme is None:
        known = ", ".join(MODELOPT_SCHEMES)
        raise _refuse(f"modelopt's {algorithm!r}: read are {known}", "quant_algo")
    size = config.get("group_size")
    if scheme.bits == 4 and size not in (None, scheme.group_size):
        raise _refuse(f"NVFP4 in groups of {size!r}: groups of 16 are read here", "group_size")
    field = "ignore" if config.get("ignore") is not None else "exclude_modules"
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(f"{field} is {names!r}: need a list of names", field)
    # In these lists a star is a wildcard for any characters.
    ignored = _names({field: [_make_pattern(n) if "*" in n else n for n in names]}, field)
    notes = ["activations in the checkpoint's format: ignored, products choose a step of their own"]
    if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        notes.append("scales of the KV cache: ignored, blocks keep scales of their own")
    return Quantization("modelopt", (((), scheme),), ignored, tuple(notes))
