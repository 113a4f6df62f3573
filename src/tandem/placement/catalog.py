"""Machines, models and published measurements that Tandem knows by name.

They are files of the package under ``data/``: parts (processors, accelerators) and machines made of
them, configurations of models without weights, and rows of published speeds. A user's own machine
is a file in the form of one entry of ``machines.yaml``.
"""

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError
from tandem.placement.hardware import HardwareSpec

__all__ = [
    "KnownModel",
    "PublishedRow",
    "PublishedRows",
    "PublishedTraining",
    "find_hardware",
    "find_model",
    "list_hardware",
    "list_models",
    "parse_hardware",
    "read_hardware",
    "read_published",
]

MAX_HARDWARE_BYTES = 1 << 16
Rate = Annotated[float, Meta(gt=0)]


class KnownModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published model that planning knows by name: the fields of its configuration, without
    weights.
    """

    name: str = ""
    title: str
    source: str
    stored_format: str
    """Weight format, as published, of its routed experts; of all matrices if it has none."""
    config: dict[str, Any]
    """Fields of ``config.json`` that affect sizes."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published speed measurement: machine, model, settings, and tokens per second."""

    id: Annotated[str, Meta(pattern="^[a-z0-9.-]+$")]
    machine: str
    model: str
    expert_format: str
    """Weight format of routed experts on the CPU."""
    dense_format: str
    """Weight format of all other matrices, which are on the GPU."""
    kernels: Literal["avx512", "amx"]
    """Instruction set of the CPU's matrix products."""
    prefill: Literal["cpu", "streamed"]
    """Device that computes a prompt's routed experts: the CPU, or the GPU with weights streamed to
    it.
    """
    sockets: Annotated[int, Meta(ge=1)] = 2
    accelerators: Annotated[int, Meta(ge=1)] = 1
    experts_per_token: Annotated[int, Meta(ge=0)] = 0
    """Experts per token if fewer than the model's own number; 0: the model's number."""
    gpu_experts: Annotated[int, Meta(ge=0)] = 0
    """Experts of each layer on the GPU, as published; 0 also if not published."""
    chunk_tokens: Annotated[int, Meta(ge=1)] = 8192
    """Tokens that one prefill step computes; KTransformers' default if not published."""
    prompt_tokens: Annotated[int, Meta(ge=1)]
    users: Annotated[int, Meta(ge=1)] = 1
    prefill_rate: Rate | None = None
    """Prompt tokens per second; None: not published."""
    decode_rate: Rate | None = None
    """Generated tokens per second, all users together."""
    source: str
    note: str = ""


class PublishedTraining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published fine-tuning run: machine, model, batch, speed and memory."""

    id: Annotated[str, Meta(pattern="^[a-z0-9.-]+$")]
    machine: str
    model: str
    tokens: Annotated[int, Meta(ge=1)]
    """Tokens of a micro-batch."""
    accumulation: Annotated[int, Meta(ge=1)] = 16
    rank: Annotated[int, Meta(ge=1)] = 8
    is_checkpointed: bool = True
    """True if activations are checkpointed, LLaMA-Factory's default."""
    rate: Rate
    """Tokens per second, end to end."""
    vram_gb: Rate
    """Memory of all GPUs together, in decimal GB."""
    dram_gb: Rate
    source: str
    note: str = ""


class PublishedRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All published measurements with enough facts to predict them, and those without."""

    fitted: tuple[str, ...]
    """Ids of the rows to which efficiencies are fitted, chosen before any fit."""
    fitted_because: str
    rows: tuple[PublishedRow, ...]
    training: tuple[PublishedTraining, ...]
    """Published fine-tuning runs; no efficiency is fitted to them."""
    left_out: dict[str, str]
    """Published figures that are not predicted, each with the missing fact."""


def _data() -> Traversable:
    return resources.files("tandem.placement") / "data"


def _parse(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError("placement.catalog", f"{where} is not YAML: {error}") from error


def _read(name: str) -> Any:
    return _parse((_data() / name).read_text("utf-8"), name)


@cache
def _read_parts() -> dict[str, dict[str, Any]]:
    return _read("parts.yaml")


@cache
def _read_machines() -> dict[str, dict[str, Any]]:
    return _read("machines.yaml")


def list_hardware() -> list[str]:
    """Return the names of the known machines, in the file's order."""
    return list(_read_machines())


def find_hardware(name: str) -> HardwareSpec:
    """Return the description of a known machine.

    Raises: NotFoundError (no machine of this name).
    """
    machines = _read_machines()
    if name not in machines:
        what = f"no machine {name!r}: give a file, or one of {', '.join(machines)}"
        raise NotFoundError("placement.find_hardware", what)
    return _build(machines[name] | {"name": name}, name)


def parse_hardware(text: str, where: str) -> HardwareSpec:
    """Parse a file that describes a machine.

    Args:
        text: YAML with the fields of ``HardwareSpec``; ``processor`` and ``accelerator`` are names
            of known parts or mappings of their fields.
        where: the file's name, for messages and as the machine's name if the file gives none.

    Raises: ConfigError that names the field.
    """
    if len(text) > MAX_HARDWARE_BYTES:
        raise ConfigError("placement.hardware", f"{where} is over {MAX_HARDWARE_BYTES} characters")
    fields = _parse(text, where)
    if not isinstance(fields, dict):
        raise ConfigError("placement.hardware", f"{where} must be a mapping of a machine's fields")
    return _build({"name": where, "title": where, "source": where} | fields, where)


def read_hardware(name_or_file: str) -> HardwareSpec:
    """Return a known machine by its name, or the machine that a file describes.

    Raises:
        NotFoundError: there is neither such a machine nor such a file.
        ConfigError: the file does not describe a machine.
    """
    if name_or_file in _read_machines():
        return find_hardware(name_or_file)
    path = Path(name_or_file)
    if not path.is_file():
        return find_hardware(name_or_file)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {path}: {error}: give a YAML file of a machine"
        raise NotFoundError("placement.read_hardware", what) from error
    return parse_hardware(text, path.name)


def _build(fields: dict[str, Any], where: str) -> HardwareSpec:
    parts = _read_parts()
    for field, kind in (("processor", "processors"), ("accelerator", "accelerators")):
        part = fields.get(field)
        if not isinstance(part, str):
            continue
        if part not in parts[kind]:
            what = f"{where}: no {field} {part!r}: use one of {', '.join(parts[kind])}"
            raise ConfigError("placement.hardware", what, field=field)
        fields = fields | {field: parts[kind][part]}
    try:
        spec = msgspec.convert(fields, HardwareSpec)
    except msgspec.ValidationError as error:
        raise ConfigError("placement.hardware", f"{where}: {error}") from error
    if (spec.accelerator is None) != (spec.num_accelerators == 0):
        what = f"{where}: accelerator and num_accelerators go together"
        raise ConfigError("placement.hardware", what, field="num_accelerators")
    if spec.accelerator is None and spec.processor is None:
        what = f"{where}: a machine has a processor or an accelerator"
        raise ConfigError("placement.hardware", what, field="processor")
    return spec


def list_models() -> list[str]:
    """Return the names of the models whose configurations are known."""
    folder = _data() / "models"
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )


def find_model(name: str) -> KnownModel:
    """Return the configuration of a known model.

    Raises: NotFoundError (no model of this name).
    """
    names = list_models()
    if name not in names:
        what = f"no configuration {name!r}: use a folder, or one of {', '.join(names)}"
        raise NotFoundError("placement.find_model", what)
    text = (_data() / "models" / f"{name}.json").read_text("utf-8")
    return msgspec.structs.replace(msgspec.json.decode(text, type=KnownModel), name=name)


@cache
def read_published() -> PublishedRows:
    """Return the published measurements of speed and training that are stored in the package's
    data.
    """
    return msgspec.convert(_read("published.yaml"), PublishedRows)
