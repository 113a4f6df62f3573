"""Reading LoRA adapters in PEFT's format: what is trusted, and what is refused by name.

A folder from elsewhere may hold anything. Only ``adapter_config.json`` and
``adapter_model.safetensors`` are read; names, shapes and settings are checked before use.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError

__all__ = ["Adapter", "LoraPair", "read_adapter"]

WHERE = "finetune.read_adapter"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1024
_KEY = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])(?:\.default)?\.weight")
_UNSUPPORTED = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The update of one matrix: ``W + scale * B A`` with A [r, K] and B [N, r]."""

    a_RK: Tensor  # noqa: N815 - a shape suffix
    b_NR: Tensor  # noqa: N815


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on the CPU."""

    scale: float
    pairs: dict[str, LoraPair]
    """By dotted name of the linear module."""
    base_model: str


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        NotFoundError: a file is missing.
        CorruptionError: a file does not parse, or tensors do not pair.
        ConfigError: a setting is out of bounds.
        UnsupportedError: it is not plain LoRA in safetensors; the text says why.
    """
    config = _read_config(folder)
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except OSError as error:
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        if pickles:
            what = f"{folder}: {pickles[0]} is a pickle, which is never read: save as safetensors"
            raise UnsupportedError(WHERE, what) from error
        raise NotFoundError(WHERE, f"no adapter_model.safetensors in {folder}") from error
    except SafetensorError as error:
        raise CorruptionError(WHERE, f"{folder}/adapter_model.safetensors: {error}") from error
    rank = _check_number(config, "r", 1, MAX_RANK)
    alpha = _check_number(config, "lora_alpha", 0, 1e6)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise UnsupportedError(WHERE, f"{folder}: tensor {name!r} is not plain LoRA")
        halves.setdefault(match[1], {})[match[2]] = tensor
    pairs: dict[str, LoraPair] = {}
    for name, half in halves.items():
        shapes = {which: tuple(tensor.shape) for which, tensor in half.items()}
        a, b = half.get("A"), half.get("B")
        is_pair = a is not None and b is not None and a.dim() == b.dim() == 2
        if a is None or b is None or not is_pair or len(a) != rank or b.shape[1] != rank:
            what = f"{folder}: {name} has {shapes}, rank is {rank:g}"
            raise CorruptionError(WHERE, what)
        if not (a.is_floating_point() and b.is_floating_point()):
            raise CorruptionError(WHERE, f"{folder}: {name} is not of a floating dtype")
        pairs[name] = LoraPair(a, b)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return Adapter(scale, pairs, str(config.get("base_model_name_or_path") or ""))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CorruptionError(WHERE, f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise NotFoundError(WHERE, f"{folder} is not an adapter: no adapter_config.json") from error
    except ValueError as error:
        raise CorruptionError(WHERE, f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UnsupportedError(WHERE, f"{path}: not a LoRA adapter")
    used = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise UnsupportedError(WHERE, f"{path} uses {', '.join(used)}: train plain LoRA")
    return config


def _check_number(config: dict[str, Any], key: str, low: float, high: float) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(WHERE, f"{key} {value!r}: give {low:g} to {high:g}", field=key)
    return value
