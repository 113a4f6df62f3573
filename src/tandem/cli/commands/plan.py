"""``tandem plan``: which rule took which module, which machines and models are known."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.placement.catalog import (
    KnownModel,
    find_hardware,
    find_model,
    list_hardware,
    list_models,
)
from tandem.placement.hardware import HardwareSpec

__all__ = ["plan"]

DEVICES = ("cpu", "cuda")
"""Kinds that a plan can be made for, here or for another machine."""


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder, GGUF file, hub id or `demo`; weights are not read.")
    ] = "",
    rules: Annotated[
        Path | None, typer.Option(help="YAML rule file; built-in rules follow its own.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of modules without a rule.")] = "cpu",
    expert_format: Annotated[
        str, typer.Option(help="Weight format of routed experts without a rule.")
    ] = "auto",
    linear_format: Annotated[
        str, typer.Option(help="Weight format of other matrices without a rule.")
    ] = "auto",
    list_known: Annotated[
        bool, typer.Option("--list", help="List the machines and models that are known by name.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show what a rule file makes of a model."""
    if list_known:
        _list_known(json=json)
        return
    if not model:
        raise typer.BadParameter("give a model, or --list", param_hint="'MODEL'")
    if device.partition(":")[0] not in DEVICES:
        what = f"{device!r} is not one of {', '.join(DEVICES)}"
        raise typer.BadParameter(what, param_hint="'--device'")
    from tandem.models.loading.hub import resolve_folder
    from tandem.models.planning.plan_report import render_plan
    from tandem.models.planning.planner import plan_model

    planned = plan_model(
        resolve_folder(model),
        rules=rules,
        device=device,
        expert_format=expert_format,
        linear_format=linear_format,
    )
    if json:
        print_json(msgspec.to_builtins(planned))
    else:
        sys.stdout.write(render_plan(planned) + "\n")


def _list_known(*, json: bool) -> None:
    machines = [find_hardware(name) for name in list_hardware()]
    models = [find_model(name) for name in list_models()]
    if json:
        print_json({"machines": machines, "models": models})
        return
    head = ("machine", "is", "cores", "DRAM GiB", "GB/s", "GPUs GiB", "GB/s", "$", "source")
    print_table(head, [_tell_machine(machine) for machine in machines])
    sys.stdout.write("\n")
    print_table(("model", "is", "format", "source"), [_tell_model(model) for model in models])


def _tell_machine(spec: HardwareSpec) -> tuple[object, ...]:
    gpu = spec.accelerator
    gpus = "" if gpu is None else f"{spec.num_accelerators} x {gpu.memory_gib:g}"
    return (
        spec.name,
        spec.title,
        spec.cores or "",
        f"{spec.memory_gib:g}" if spec.memory_gib else "",
        f"{spec.cpu_bandwidth_gbps:g}" if spec.cpu_bandwidth_gbps else "",
        gpus,
        "" if gpu is None else f"{gpu.bandwidth_gbps:g}",
        f"{spec.price_usd:,.0f}",
        spec.source,
    )


def _tell_model(model: KnownModel) -> tuple[object, ...]:
    return (model.name, model.title, model.stored_format, model.source)
