"""``tandem plan``: how a model would be served here or on another machine (weight formats, memory,
speed), and why.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tandem.cli.config import PLAN_SETTINGS, Config, load_config, with_config_flags
from tandem.cli.output import JsonFlag, print_json, print_next, show_work
from tandem.core.errors import ConfigError, NotFoundError
from tandem.models.deferred_imports import defer_imports
from tandem.models.loading.hub import resolve_folder

__all__ = ["plan"]

GIB = 1 << 30
DEVICES = ("cpu", "cuda")
"""Kinds of devices for which a plan can be made."""


def _complete_machine(incomplete: str) -> list[str]:
    """Return the known machines whose names begin with ``incomplete``, for completion in a
    shell.
    """
    from tandem.placement.catalog import list_hardware

    return [name for name in list_hardware() if name.startswith(incomplete)]


@with_config_flags(PLAN_SETTINGS)
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
            autocompletion=_complete_machine,
            help="Another machine to place the model on: a name of `--list` or a YAML file. "
            "Without it the plan is that of `tandem serve` on this one, which is measured once, in "
            "seconds. `measured` places it here as on another.",
        ),
    ] = "",
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and answer; 8192 with --hardware, else the model's."
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt, with --hardware; half the context.")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(help="Users that are answered at once; 1 with --hardware, else as set."),
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Tokens a second for each user: how many users get them?")
    ] = 0,
    quality: Annotated[
        str | None,
        typer.Option(
            help="Coarsest format of weights: stored, int8 or int4; int8 with --hardware, else "
            "stored."
        ),
    ] = None,
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
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    rules: Annotated[
        Path | None,
        typer.Option(help="YAML rule file; built-in rules follow its own. Shows --modules."),
    ] = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="Tell which rule took which module, and matrices.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Device of modules without a rule; another shows --modules.")
    ] = "cpu",
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
    **flags: Any,
) -> None:
    """Tell what serving a model is here and why; or place it on another machine (--hardware)."""
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
    is_elsewhere = bool(hardware) or placing.is_known_model(model)
    if is_elsewhere:
        if rules is not None or modules:
            what = "modules are of a model here, not on another machine"
            raise typer.BadParameter(what, param_hint="'--rules' or '--modules'")
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
            hardware or placing.MEASURED,
            wishes,
            with_cost=cost,
            with_rejected=rejected,
            picture=picture,
            timeline=timeline,
            as_json=json,
        )
        return
    if cost or picture or timeline or prompt is not None or gpu_experts != -1:
        what = "it is of a machine of `tandem plan --list`, or of a file: give that too"
        raise typer.BadParameter(what, param_hint="'--hardware'")
    if device.partition(":")[0] not in DEVICES:
        what = f"{device!r} is not one of {', '.join(DEVICES)}"
        raise typer.BadParameter(what, param_hint="'--device'")
    settings = load_config(config, flags, model=model).config
    if rules is not None or modules or device != "cpu":
        _show_modules(settings, rules, device, json=json)
        return
    # The model's folder is looked up before anything is imported or measured, which takes seconds,
    # so that a wrong name is found first.
    try:
        folder = resolve_folder(settings.model.path, revision=settings.model.revision)
    except NotFoundError as error:
        known = settings.model.path.rpartition("/")[2].lower()
        if not placing.is_known_model(known):
            raise
        what = f"{error.what}; or plan from its configuration alone: `tandem plan {known}`"
        raise NotFoundError("cli.plan", what) from error
    defer_imports()
    from tandem.cli.planning.serving import follow_wishes, show_serving
    from tandem.kernels.calibration import read_calibration
    from tandem.models.own.plan import open_served

    settings, wished = follow_wishes(
        settings, context=context or 0, users=users or 0, quality=quality or ""
    )
    open_served(folder)
    with show_work("measuring this machine"):
        read_calibration(is_new=measure)
    show_serving(settings, with_rejected=rejected, as_json=json, wished=wished, rate=rate)
    if not json and not wished:
        print_next("tandem", "serve", model)


def _show_modules(settings: Config, rules: Path | None, device: str, *, json: bool) -> None:
    """Print, for each module of the model, the rule that applies and the operator that it gives."""
    from tandem.models.planning.plan_report import render_plan
    from tandem.models.planning.planner import plan_model

    model = settings.model
    if settings.engine.memory:
        what = "it plans serving on this machine's CPU: leave out --rules, --modules and --device"
        raise typer.BadParameter(what, param_hint="'--memory'")
    planned = plan_model(
        resolve_folder(model.path, revision=model.revision),
        dtype=model.dtype,
        rules=rules or (Path(model.rules) if model.rules else None),
        device=device,
        expert_format=model.expert_format,
        linear_format=model.linear_format,
    )
    if json:
        print_json(msgspec.to_builtins(planned))
    else:
        sys.stdout.write(f"{render_plan(planned)}\n{_tell_fit(planned, model)}\n")


def _tell_fit(planned: Any, model: Any) -> str:
    """Return a sentence that says whether the model fits the memory that is free here, and how much
    KV fits beside it.
    """
    from tandem._native import read_topology
    from tandem.engine.config import EngineConfig
    from tandem.engine.planning import RUNTIME_BYTES
    from tandem.models.adapter_plan import plan_adapters
    from tandem.models.loading.loader import make_kv_layout

    config = EngineConfig()
    layout = make_kv_layout(planned.spec, config.block_size, config.kv_dtype)
    free = read_topology().memory_available_bytes
    adapters = plan_adapters(planned, model)
    left = free - planned.weight_bytes - RUNTIME_BYTES
    left -= 0 if adapters is None else adapters.size_bytes
    taking = "weights" if adapters is None else "weights, the adapters"
    here = f"of {free / GIB:.1f} GiB that are free here the {taking} and a process take "
    here += f"{(free - left) / GIB:.1f}"
    if left < 0:
        return f"{here}: they do not fit; experts can lie on disk, which --memory SIZE plans."
    tokens = left // max(layout.bytes_per_token, 1)
    return f"{here}: they fit, beside KV for {tokens:,} tokens of {layout.bytes_per_token} bytes."


def _check_wishes(**fields: Any) -> Any:
    """Return a ``Wishes`` (what the user wants of a placement) of these fields, checked.

    Raises: ConfigError, which names the flag.
    """
    from tandem.placement.planner import Wishes

    try:
        return msgspec.convert({k: v for k, v in fields.items() if v is not None}, Wishes)
    except msgspec.ValidationError as error:
        what, _, field = str(error).partition(" - at `$.")
        flag = field.rstrip("`").replace("_", "-")
        raise ConfigError("cli.plan", f"--{flag}: {what}: see `tandem plan --help`") from error
