"""``tandem plan``: which rule took which module, and which rules matched nothing."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json

__all__ = ["plan"]

DEVICES = ("cpu", "cuda")
"""Kinds that a plan can be made for, here or for another machine."""


def plan(
    model: Annotated[
        str, typer.Argument(help="Folder, GGUF file, hub id or `demo`; weights are not read.")
    ],
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
    json: JsonFlag = False,
) -> None:
    """Show what a rule file makes of a model."""
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
