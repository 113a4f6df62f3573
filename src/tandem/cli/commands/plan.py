"""``tandem plan``: a model placed on a machine, and which rule took which of its modules."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.core.errors import ConfigError

__all__ = ["plan"]

GIB = 1 << 30
DEVICES = ("cpu", "cuda")
"""Kinds that a plan can be made for, here or for another machine."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, GGUF file, hub id or `demo`, or a configuration that `--list` names; "
            "weights are not read."
        ),
    ] = "",
    hardware: Annotated[
        str,
        typer.Option(
            help="Machine to place the model on: a name of `--list`, a YAML file, or `measured` "
            "for this one, which takes seconds once."
        ),
    ] = "",
    context: Annotated[
        int, typer.Option(help="Tokens of a sequence, prompt and answer; with --hardware.")
    ] = 8192,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt; 0 is half the context.")] = 0,
    users: Annotated[int, typer.Option(help="Users that are answered at once.")] = 1,
    rate: Annotated[
        float, typer.Option(help="Tokens a second for each user: how many users get them?")
    ] = 0,
    quality: Annotated[
        str, typer.Option(help="Coarsest format of weights: stored, int8 or int4.")
    ] = "int8",
    gpu_experts: Annotated[
        int, typer.Option(help="Routed experts of a layer on the GPU; -1 is as many as fit.")
    ] = -1,
    cost: Annotated[
        bool, typer.Option("--cost", help="Prices of rates and sizes; operator classes.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the plan too: layers by devices."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="Draw when GPU and CPU work in a decode step, in one page."
        ),
    ] = None,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Tell the choices that were rejected, and why.")
    ] = False,
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
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of this machine that serving may take, such as 16GiB: what stays on disk, "
            "and how fast it is read."
        ),
    ] = "",
    list_known: Annotated[
        bool, typer.Option("--list", help="List the machines and models that are known by name.")
    ] = False,
    experts: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Replay a trace of routing (engine.expert_trace) through caches of experts: hit "
            "rates by policy, size and layer.",
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Predict published speeds of hybrid serving.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Place a model on a machine (--hardware), or show what a rule file makes of it."""
    from tandem.cli.planning import placing

    if experts is not None:
        from tandem.cli.planning.expert_rates import print_rates

        print_rates(experts, as_json=json)
        return
    if published:
        placing.print_published(as_json=json)
        return
    if list_known:
        placing.list_known(as_json=json)
        return
    if not model:
        raise typer.BadParameter("give a model, or --list", param_hint="'MODEL'")
    if hardware:
        if rules is not None:
            what = "--rules is of a model's modules here, not of another machine"
            raise typer.BadParameter(what, param_hint="'--rules'")
        wishes = _check_wishes(
            context=context,
            prompt=prompt,
            users=users,
            rate=rate,
            quality=quality,
            gpu_experts=None if gpu_experts == -1 else gpu_experts,
        )
        placing.place_model(
            model,
            hardware,
            wishes,
            with_cost=cost,
            with_rejected=rejected,
            picture=picture,
            timeline=timeline,
            as_json=json,
        )
        return
    if placing.is_known_model(model) or cost or rejected or picture or timeline:
        what = "give the machine to place the model on: a name of `tandem plan --list`, or a file"
        raise typer.BadParameter(what, param_hint="'--hardware'")
    if device.partition(":")[0] not in DEVICES:
        what = f"{device!r} is not one of {', '.join(DEVICES)}"
        raise typer.BadParameter(what, param_hint="'--device'")
    if memory:
        if rules is not None or device != "cpu":
            what = "--memory plans serving on this machine's CPU: leave out --rules and --device"
            raise typer.BadParameter(what, param_hint="'--memory'")
        _plan_memory(model, memory, expert_format, linear_format, as_json=json)
        return
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
        sys.stdout.write(f"{render_plan(planned)}\n{_tell_fit(planned)}\n")


def _tell_fit(planned: Any) -> str:
    """Return whether a model fits the memory that is free here, and how much KV beside it."""
    from tandem._native import read_topology
    from tandem.engine.build import RUNTIME_BYTES
    from tandem.engine.config import EngineConfig
    from tandem.models.loading.loader import make_kv_layout

    config = EngineConfig()
    layout = make_kv_layout(planned.spec, config.block_size, config.kv_dtype)
    free = read_topology().memory_available_bytes
    left = free - planned.weight_bytes - RUNTIME_BYTES
    here = f"of {free / GIB:.1f} GiB that are free here the weights and a process take "
    here += f"{(free - left) / GIB:.1f}"
    if left < 0:
        return f"{here}: they do not fit; experts can lie on disk, which --memory SIZE plans."
    tokens = left // max(layout.bytes_per_token, 1)
    return f"{here}: they fit, beside KV for {tokens:,} tokens of {layout.bytes_per_token} bytes."


def _plan_memory(
    model: str, memory: str, expert_format: str, linear_format: str, *, as_json: bool
) -> None:
    """Print what serving a model in so much memory would be."""
    from tandem.engine.build import plan_engine
    from tandem.engine.config import EngineConfig
    from tandem.models.config import ModelConfig

    try:
        wish = msgspec.convert({"memory": memory}, EngineConfig)
    except msgspec.ValidationError as error:
        what = f"--memory {memory}: give a size such as 16GiB"
        raise ConfigError("cli.plan", what, field="engine.memory") from error
    planned = plan_engine(
        ModelConfig(path=model, expert_format=expert_format, linear_format=linear_format), wish
    )
    if as_json:
        print_json({**msgspec.structs.asdict(planned), "rows": planned.rows()})
    else:
        print_table(("what", "value", "why"), planned.rows())


def _check_wishes(**fields: Any) -> Any:
    """Return the wishes, checked.

    Raises: ConfigError that names the flag.
    """
    from tandem.placement.planner import Wishes

    try:
        return msgspec.convert(fields, Wishes)
    except msgspec.ValidationError as error:
        what, _, field = str(error).partition(" - at `$.")
        flag = field.rstrip("`").replace("_", "-")
        raise ConfigError("cli.plan", f"--{flag}: {what}: see `tandem plan --help`") from error
