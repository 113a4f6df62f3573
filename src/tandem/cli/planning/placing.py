"""The part of ``tandem plan`` that places a model on a described machine, and computes costs."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from tandem.cli.output import print_json, print_table
from tandem.core.errors import ConfigError, CorruptionError
from tandem.placement.catalog import (
    KnownModel,
    find_hardware,
    find_model,
    list_hardware,
    list_models,
    read_hardware,
)
from tandem.placement.costs import Efficiencies
from tandem.placement.economics import compare, list_classes, replace_by
from tandem.placement.fitting import predict_rows, read_efficiencies
from tandem.placement.hardware import HardwareSpec
from tandem.placement.plan_picture import render_picture
from tandem.placement.plan_text import render_plan
from tandem.placement.planner import Plan, Wishes, make_plan
from tandem.placement.predictions import render_predictions
from tandem.placement.shape import ModelShape, read_shape

__all__ = [
    "MEASURED",
    "find_machine",
    "find_shape",
    "is_known_model",
    "list_known",
    "place_model",
    "print_published",
]

TALK = ("h800", "h20", "xeon-spr")
"""Machines that the KTransformers talk compares; the user's machine is listed beside them."""
MEASURED = "measured"
"""Name that means this machine, as measured."""
TALK_CONTEXT = 128 * 1024
REPLACING = ("h20", "a100", "h100")
"""Machines whose GPUs are counted as replaced by a plan."""
KNOWN_METHODS = {"fp8": "fp8", "mxfp4": "mxfp4", "gptq": "int4", "awq": "int4"}
MAX_CONFIG_BYTES = 1 << 22


def is_known_model(name: str) -> bool:
    """Return True if ``name`` is a model of the catalog of known configurations, and no folder."""
    return name in list_models() and not Path(name).exists()


def place_model(
    model: str,
    hardware: str,
    wishes: Wishes,
    *,
    with_cost: bool,
    with_rejected: bool,
    picture: Path | None = None,
    timeline: Path | None = None,
    as_json: bool,
) -> None:
    """Make a plan of a model on a machine, and print it.

    Args:
        model: name of a known configuration, a folder, a GGUF file or a hub id.
        hardware: name of a known machine, a file, or `measured` for this machine.
        wishes: context, users, rate, quality.
        with_cost: True to print prices and operator classes too.
        with_rejected: True to print rejected choices too.
        picture: file to write the plan to as SVG; None: none.
        timeline: file to write the timeline of a decode step to as HTML; None: none.
        as_json: True to print one JSON document.

    Raises: ConfigError (a picture cannot be written, or everything runs on one device, so that
        there is no timeline); errors of ``make_plan``.
    """
    spec, efficiencies = find_machine(hardware)
    shape, stored_format = find_shape(model)
    planned = make_plan(
        spec,
        shape,
        wishes,
        stored_format=stored_format,
        efficiencies=efficiencies,
    )
    if picture is not None:
        _write(picture, render_picture(planned, spec, shape), "--picture")
    if timeline is not None:
        from tandem.cli.planning.timeline import render_timeline

        _write(timeline, render_timeline(planned, spec, shape, efficiencies), "--timeline")
    if as_json:
        report: dict[str, Any] = {"plan": planned, "hardware": spec, "efficiencies": efficiencies}
        if with_cost:
            report["cost"] = _collect_cost(spec, shape, planned)
        print_json(report)
        return
    sys.stdout.write(render_plan(planned, spec, shape, with_rejected=with_rejected))
    if with_cost:
        _print_cost(_collect_cost(spec, shape, planned), shape)


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        what = f"{option} {file}: {error.strerror}: give a file that can be written"
        raise ConfigError("cli.plan", what) from error


def find_shape(model: str) -> tuple[ModelShape, str]:
    """Return the sizes of a model, and the format that its weights are stored in.

    Args:
        model: name of a known configuration, a folder, a GGUF file or a hub id.

    Raises: errors of ``read_shape`` and ``open_checkpoint``.
    """
    known = find_model(model) if is_known_model(model) else _read_model(model)
    return read_shape(known.config, known.name), known.stored_format


def find_machine(
    hardware: str, of: Literal["ours", "published"] = "ours"
) -> tuple[HardwareSpec, Efficiencies]:
    """Return the description of a machine by name or file; for `measured`, of this machine.

    Args:
        hardware: name or file.
        of: whose efficiencies, unless this machine's are measured; see ``read_efficiencies``.

    Raises: errors of ``read_hardware``.
    """
    if hardware != MEASURED:
        return read_hardware(hardware), read_efficiencies(of)
    from tandem.kernels.calibration import read_calibration

    calibration = read_calibration()
    return calibration.hardware, calibration.efficiencies


def _read_model(model: str) -> KnownModel:
    """Return a model's configuration from a folder, also of a model that cannot be served."""
    from tandem.models.families import open_checkpoint
    from tandem.models.loading.hub import resolve_folder

    folder = resolve_folder(model)
    file = folder / "config.json"
    if file.is_file() and file.stat().st_size <= MAX_CONFIG_BYTES:
        try:
            parsed = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise CorruptionError("cli.plan", f"{file} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise CorruptionError("cli.plan", f"{file} is no JSON object")
        config = cast("dict[str, Any]", parsed)
    else:
        config = open_checkpoint(model).config.to_dict()
    name = folder.resolve().name if Path(model).expanduser().exists() else model
    return KnownModel(
        name=name,
        title=name,
        source=str(folder),
        stored_format=_find_format(config),
        config=config,
    )


def _find_format(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = str(cast("Mapping[str, Any]", quantization).get("quant_method"))
        return KNOWN_METHODS.get(method, "int4g32")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return "f32" if dtype.endswith("float32") else "bf16"


def _collect_cost(spec: HardwareSpec, shape: ModelShape, planned: Plan) -> dict[str, Any]:
    talk = [find_hardware(name) for name in TALK]
    is_priced = spec.name not in TALK and spec.price_usd > 0
    specs = [spec, *talk] if is_priced else talk
    gpus = [find_hardware(name).accelerator for name in REPLACING]
    users = planned.wishes.users
    return {
        "machines": compare(specs),
        "classes": list_classes(shape, context=TALK_CONTEXT, users=users),
        "replaces": replace_by(planned, [gpu for gpu in gpus if gpu is not None]),
        "kv_bytes_per_token": shape.kv_bytes,
        "state_bytes_per_sequence": shape.state_bytes,
    }


def _print_cost(cost: dict[str, Any], shape: ModelShape) -> None:
    sys.stdout.write("\n")
    head = ("machine", "$", "$ per TFLOPS", "$ per GB/s", "$ per GB", "cheapest for")
    rows = [
        (
            one.title,
            f"{one.price_usd:,.0f}",
            f"{one.usd_per_tflops:.1f}",
            f"{one.usd_per_gbps:.2f}",
            f"{one.usd_per_gb:.1f}",
            ", ".join(one.roles) or "-",
        )
        for one in cost["machines"]
    ]
    print_table(head, rows)
    sys.stdout.write("\n")
    rows = [
        (one.name, f"{one.items / 1e9:.1f} B", f"{one.ops_per_byte:.1f}", one.definition)
        for one in cost["classes"]
    ]
    print_table(("class", "items", "FLOP a byte held", "is"), rows)
    kept = f"KV {shape.kv_bytes:,} bytes a token"
    if shape.state_bytes:
        kept += f", state {shape.state_bytes:,} bytes a sequence"
    instead = "; ".join(
        f"{one.count} x {one.title} (${one.price_usd:,.0f})" for one in cost["replaces"]
    )
    sys.stdout.write(f"\n{kept}\non GPUs alone: {instead}\n")


def list_known(*, as_json: bool) -> None:
    """Print the machines and models that are known by name."""
    machines = [find_hardware(name) for name in list_hardware()]
    models = [find_model(name) for name in list_models()]
    if as_json:
        print_json({"machines": machines, "models": models})
        return
    head = ("machine", "is", "cores", "DRAM GiB", "GB/s", "GPUs GiB", "GB/s", "$", "source")
    print_table(head, [_tell_machine(machine) for machine in machines])
    sys.stdout.write("\n")
    rows = [(model.name, model.title, model.stored_format, model.source) for model in models]
    print_table(("model", "is", "format", "source"), rows)


def _tell_machine(spec: HardwareSpec) -> tuple[object, ...]:
    gpu = spec.accelerator
    return (
        spec.name,
        spec.title,
        spec.cores or "",
        f"{spec.memory_gib:g}" if spec.memory_gib else "",
        f"{spec.cpu_bandwidth_gbps:g}" if spec.cpu_bandwidth_gbps else "",
        "" if gpu is None else f"{spec.num_accelerators} x {gpu.memory_gib:g}",
        "" if gpu is None else f"{gpu.bandwidth_gbps:g}",
        f"{spec.price_usd:,.0f}",
        spec.source,
    )


def print_published(*, as_json: bool) -> None:
    """Print the cost model's predictions beside published speeds."""
    if as_json:
        print_json(
            [msgspec.to_builtins(figure) for figure in predict_rows(read_efficiencies("published"))]
        )
    else:
        sys.stdout.write(render_predictions())
