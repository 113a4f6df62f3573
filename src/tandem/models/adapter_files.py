"""Reading of LoRA adapters in PEFT's format; unknown features are refused by name.

An adapter folder may come from anywhere and hold anything. Only two files are read,
``adapter_config.json`` and ``adapter_model.safetensors``; the header of the second is checked
against the model before a tensor is read, so that memory is bounded by the model's shapes. No
regular expression from a file is run.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.models.sources.mapping import map_file
from tandem.models.sources.safetensors import DTYPES, read_header
from tandem.models.sources.source import TensorEntry

__all__ = [
    "MAX_RANK",
    "AdapterFiles",
    "ExpertShapes",
    "LoraWeights",
    "read_adapter_files",
    "read_adapter_ranks",
]

WHERE = "models.read_adapter"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1024
MAX_ALPHA = 1e6

ExpertShapes = dict[str, tuple[int, int, int]]
"""Shapes (experts, outputs, inputs) of the parameters of a layer's routed experts, by parameter
name in the module's order.
"""

_KEY = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
_INNER = "base_layer"
"""Name under which PEFT keeps the module that a LoRA module wraps."""
_PATTERN = re.compile(r"(\^|\.\*\.)?([\w.]+)")
"""Pattern of the keys in ``rank_pattern`` and ``alpha_pattern`` that are supported: names, or their
ends.
"""

_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "bias",
}
_IGNORED = {
    # Fields about training, PEFT's own choice of modules or the file itself are ignored: the
    # tensors tell the rest.
    "auto_mapping",
    "arrow_config",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "ephemeral_gpu_offload",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of PEFT's ``init_lora_weights`` with which training starts from the model's own weights
unchanged.
"""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The LoRA factors of one module, whose weight changes by ``scale * B A``."""

    a_RK: Tensor  # noqa: N815 - a shape suffix
    """Factor A, in its stored dtype."""
    b_NR: Tensor  # noqa: N815
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The checked contents of an adapter's files."""

    modules: dict[str, LoraWeights]
    """Factors by dotted name of the linear module, sorted."""
    experts: dict[str, LoraWeights]
    """Factors by dotted name of the routed experts' parameter, sorted: row i of A [E R, K] belongs
    to expert i // R, column i of B [N, R E] to expert i modulo E.
    """
    digest: str
    """SHA-256 over the modules' names, scales, dtypes, shapes and bytes, in hex."""


def read_adapter_files(
    folder: Path,
    find_shape: Callable[[str], tuple[int, int]],
    *,
    find_experts: Callable[[str], ExpertShapes] | None = None,
    within: Path | None = None,
) -> AdapterFiles:
    """Read and check an adapter.

    Args:
        folder: the adapter's folder.
        find_shape: returns (outputs, inputs) of a linear module that can be adapted; raises
            UnsupportedError for any other name.
        find_experts: returns the parameters of the routed experts of a name, empty for other names;
            None: adapters of routed experts are refused.
        within: refuse files whose real path is not below this folder; None: any path.

    Raises:
        NotFoundError: a file is missing.
        CorruptionError: a file does not parse, tensors do not form pairs, or values are not finite.
        ConfigError: a setting is out of bounds; a file is not within ``within``.
        UnsupportedError: not plain LoRA in safetensors for modules that can be adapted.
    """
    config = _read_config(_find_file(folder, CONFIG_FILE, within), has_experts=bool(find_experts))
    path = _find_file(folder, WEIGHTS_FILE, within)
    halves = _pair(folder, read_header(path).values())
    scales: dict[str, float] = {}
    parameters: dict[str, str] = {}
    for name, half in halves.items():
        found = None if find_experts is None else _find_parameter(config, name, find_experts)
        if found is None:
            count, (num_outputs, num_inputs) = 1, find_shape(name)
        else:
            parameters[name], (count, num_outputs, num_inputs) = found
        rank, scales[name] = _find_scale(config, parameters.get(name, name))
        rows = rank * count
        for which, shape in (("A", (rows, num_inputs)), ("B", (num_outputs, rows))):
            if half[which].shape != shape:
                what = f"lora_{which} of {name} is {list(half[which].shape)}, needs {list(shape)}"
                raise CorruptionError(WHERE, f"{folder}: {what}")
    stored = _read_tensors(path, halves, scales)
    modules = {name: weights for name, weights in stored.items() if name not in parameters}
    experts = {parameters[name]: stored[name] for name in stored if name in parameters}
    return AdapterFiles(modules, dict(sorted(experts.items())), _digest({**modules, **experts}))


def read_adapter_ranks(folder: Path) -> dict[str, int]:
    """Return the ranks of an adapter's modules, by dotted name, from the header of its weights.

    Raises: NotFoundError (there are no weights); CorruptionError (their header does not parse, or
        tensors do not form pairs); UnsupportedError (not plain LoRA in safetensors).
    """
    halves = _pair(folder, read_header(_find_file(folder, WEIGHTS_FILE, None)).values())
    return {name: half["A"].shape[0] for name, half in halves.items() if half["A"].shape}


def _find_parameter(
    config: dict[str, Any], name: str, find_experts: Callable[[str], ExpertShapes]
) -> tuple[str, tuple[int, int, int]] | None:
    """Return (dotted name, shape) of the experts' parameter whose adapter PEFT calls ``name``.

    None if it is no adapter of routed experts. PEFT wraps the module once for each adapted
    parameter, in their order, so the last parameter's wrapper is outermost and has the module's own
    name.
    """
    base, *inner = name.split(f".{_INNER}")
    shapes = find_experts(base)
    if not shapes:
        return None
    wanted = config.get("target_parameters") or []
    if not isinstance(wanted, list) or not all(isinstance(end, str) for end in wanted):
        _refuse_number("target_parameters", wanted, "a list of names")
    full_names = {f"{base}.{key}": shape for key, shape in shapes.items()}
    adapted = [
        full
        for full in full_names
        if any(full == end or full.endswith(f".{end}") for end in wanted)
    ]
    if any(inner) or len(inner) >= len(adapted):
        what = f"{name} is the adapter of no parameter in target_parameters"
        raise CorruptionError(WHERE, f"{what}: {', '.join(map(str, wanted))[:200]}")
    parameter = adapted[-1 - len(inner)]
    return parameter, full_names[parameter]


def _find_file(folder: Path, name: str, within: Path | None) -> Path:
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # A loop of links.
        pickles = sorted(p.name for p in folder.glob("*.bin")) if name == WEIGHTS_FILE else []
        if pickles:
            what = f"{folder}: {pickles[0]} is a pickle, which is never read: save as safetensors"
            raise UnsupportedError(WHERE, what) from error
        raise NotFoundError(
            WHERE, f"{folder} is not an adapter: no {name}: give its folder"
        ) from error
    if within is not None and not real.is_relative_to(within):
        raise ConfigError(WHERE, f"{path} leads out of {within}: not read", field="lora_path")
    if not real.is_file():
        raise NotFoundError(WHERE, f"{path} is not a file")
    return real


def _read_config(path: Path, *, has_experts: bool) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CorruptionError(WHERE, f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise NotFoundError(WHERE, f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptionError(WHERE, f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UnsupportedError(WHERE, f"{path}: peft_type is not LORA")
    start = config.get("init_lora_weights")
    used = [] if start in _PLAIN_STARTS else [f"init_lora_weights {start!r}"]
    if config.get("bias", "none") != "none":
        used.append("bias")
    # An unknown field may change the adapter's arithmetic, so an adapter whose file sets one is
    # refused.
    known = _READ | _IGNORED | ({"target_parameters"} if has_experts else set())
    used += [key for key, value in config.items() if value and key not in known]
    used = ["target_parameters (routed experts)" if u == "target_parameters" else u for u in used]
    if used:
        text = ", ".join(str(key)[:100] for key in used[:8])
        raise UnsupportedError(WHERE, f"{path} uses {text}: only plain LoRA is served")
    return config


def _pair(folder: Path, entries: Iterable[TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    halves: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries:
        match = _KEY.fullmatch(entry.name)
        if match is None:
            what = f"tensor {entry.name[:200]!r} is not plain LoRA of a linear module"
            raise UnsupportedError(WHERE, f"{folder}: {what}")
        if entry.dtype not in DTYPES:
            raise UnsupportedError(WHERE, f"{folder}: {entry.name} is stored as {entry.dtype}")
        half = halves.setdefault(match[1], {})
        if match[2] in half:
            raise CorruptionError(WHERE, f"{folder}: {match[1]} has two lora_{match[2]}")
        half[match[2]] = entry
    for name, half in halves.items():
        if len(half) != 2:
            what = f"{name} has lora_{''.join(half)} alone: A and B belong together"
            raise CorruptionError(WHERE, f"{folder}: {what}")
    if not halves:
        raise CorruptionError(WHERE, f"{folder}: no tensors")
    return dict(sorted(halves.items()))


def _find_scale(config: dict[str, Any], name: str) -> tuple[int, float]:
    """Return (rank, scale) of a module, determined as PEFT does."""
    rank = _match(config, "rank_pattern", name, config.get("r"))
    alpha = _match(config, "alpha_pattern", name, config.get("lora_alpha"))
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        _refuse_number("r", rank, f"1 to {MAX_RANK}")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not 0 <= alpha <= MAX_ALPHA:  # NaN is in no range.
        _refuse_number("lora_alpha", alpha, f"0 to {MAX_ALPHA:g}")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank)


def _match(config: dict[str, Any], key: str, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, or all of it after ^.

    Raises: UnsupportedError (a pattern is a general regular expression).
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        _refuse_number(key, patterns, "an object")
    found, has_found = default, False
    for pattern, value in patterns.items():
        parsed = _PATTERN.fullmatch(pattern.replace("\\.", "."))
        if parsed is None:
            what = f"{key} {pattern[:100]!r} is a regular expression: give names of modules"
            raise UnsupportedError(WHERE, what, field=key)
        if has_found:
            continue
        start, end = parsed.groups()
        is_whole = end == name and start != ".*."
        if is_whole or (start != "^" and name.endswith(f".{end}")):
            found, has_found = value, True
    return found


def _refuse_number(key: str, value: Any, wanted: str) -> NoReturn:
    raise ConfigError(WHERE, f"{key} is {str(value)[:100]}: give {wanted}", field=key)


def _read_tensors(
    path: Path, halves: dict[str, dict[str, TensorEntry]], scales: dict[str, float]
) -> dict[str, LoraWeights]:
    data = map_file(path)

    def read(entry: TensorEntry) -> Tensor:
        # The bytes are copied, because the file may change while the tensor is in use.
        own = bytearray(data[entry.begin : entry.end])
        stored = torch.frombuffer(own, dtype=DTYPES[entry.dtype])
        if not bool(torch.isfinite(stored).all()):
            raise CorruptionError(WHERE, f"{path}: {entry.name} holds NaN or infinity")
        return stored.view(entry.shape)

    return {
        name: LoraWeights(read(half["A"]), read(half["B"]), scales[name])
        for name, half in halves.items()
    }


def _digest(modules: dict[str, LoraWeights]) -> str:
    digest = hashlib.sha256(b"tandem-adapter\0")
    for name, weights in modules.items():
        digest.update(f"{name}\0".encode() + struct.pack("<d", weights.scale))
        for tensor in (weights.a_RK, weights.b_NR):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}\0".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
