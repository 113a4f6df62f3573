"""Commands that read the file of a cluster: ``up`` starts it, ``render`` writes it down."""

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from tandem.cli.extras import require_extra, require_serve
from tandem.cli.output import JsonFlag, print_json
from tandem.core.logs import LogLevel, configure_logging

if TYPE_CHECKING:
    from tandem.integrations.deploying.processes import ProcessPlan
    from tandem.integrations.deploying.spec import ClusterSpec

__all__ = ["render", "up"]

SpecFile = Annotated[Path, typer.Argument(help="The description of the cluster, YAML.")]


def render(
    file: SpecFile,
    to: Annotated[
        Literal["kubernetes", "processes"],
        typer.Option(help="Manifests, or the command lines of one machine."),
    ] = "kubernetes",
    check: Annotated[
        bool, typer.Option(help="Check manifests against the bundled schemas; needs jsonschema.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Write the processes of a cluster as Kubernetes manifests or as command lines."""
    from tandem.integrations.deploying.spec import load_spec

    spec = load_spec(file)
    if to == "processes":
        _render_processes(spec, json=json)
        return
    from tandem.integrations.deploying.kubernetes import dump_manifests, render_manifests
    from tandem.integrations.deploying.manifests import check_manifests

    manifests = render_manifests(spec)
    if check:
        require_extra("kubernetes", "jsonschema")
        check_manifests(manifests)
    if json:
        print_json(manifests)
    else:
        sys.stdout.write(dump_manifests(manifests))


def _render_processes(spec: "ClusterSpec", *, json: bool) -> None:
    import shlex

    from tandem.integrations.deploying.runner import plan_local

    plans = plan_local(spec, Path("/run/tandem") / spec.name)
    if json:
        print_json(plans)
        return
    for plan in plans:
        settings = msgspec.json.encode(plan.settings).decode()
        sys.stdout.write(f"# {plan.name}: settings {settings}\n")
        sys.stdout.write(f"tandem {shlex.join(plan.arguments)}\n")


def up(
    file: SpecFile,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines.")] = LogLevel.WARNING,
    json: JsonFlag = False,
) -> None:
    """Start all processes of a cluster on this machine, and keep them running until a signal."""
    from tandem.integrations.deploying.spec import load_spec

    spec = load_spec(file)
    require_serve()
    configure_logging("cluster", log_level)
    asyncio.run(_up(spec, json=json))


async def _up(spec: "ClusterSpec", *, json: bool) -> None:
    from tandem.integrations.deploying.runner import ProcessRunner, plan_local
    from tandem.rpc import make_runtime_dir

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = make_runtime_dir()

    def note_up(plan: "ProcessPlan", line: str) -> None:
        if not json:
            sys.stdout.write(f"{plan.name}: {line}\n")
            sys.stdout.flush()

    try:
        plans = plan_local(spec, folder)
        async with ProcessRunner(plans, folder, spec.drain_s, on_up=note_up) as runner:
            stopped = asyncio.create_task(stop.wait())
            starting = asyncio.create_task(runner.wait_up())
            try:
                await asyncio.wait((stopped, starting), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    _show_up(spec, runner.list_pids(), json=json)
                    await stopped
            finally:
                for task in (stopped, starting):
                    task.cancel()
                await asyncio.gather(stopped, starting, return_exceptions=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _show_up(spec: "ClusterSpec", pids: dict[str, int], *, json: bool) -> None:
    servers = spec.servers
    urls = [f"http://{servers.host}:{servers.port + n}" for n in range(servers.count)]
    if json:
        print_json({"servers": urls, "pids": pids})
    else:
        sys.stdout.write(f"{spec.name} is up: {', '.join(urls)}\n")
    sys.stdout.flush()
