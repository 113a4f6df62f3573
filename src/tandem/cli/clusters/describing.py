"""Commands that read a cluster file: ``up`` starts its processes, ``render`` writes manifests."""

import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from tandem.cli.extras import require_extra, require_serve
from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.errors import ConfigError
from tandem.core.logs import LogLevel, configure_logging

if TYPE_CHECKING:
    from tandem.integrations.deploying.processes import ProcessPlan
    from tandem.integrations.deploying.spec import ClusterSpec

__all__ = ["render", "up"]

START_TIMEOUT_S = 1800.0
"""Time limit in seconds for all models to load."""
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
        print_next("kubectl", "apply", "-f", "FILE", why="with this output as FILE")


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
    on: Annotated[
        Literal["machine", "ray"],
        typer.Option(help="Plain processes on this machine, or actors of a Ray cluster."),
    ] = "machine",
    address: Annotated[
        str, typer.Option(help="IP:PORT of a running Ray cluster; empty: one is started here.")
    ] = "",
    interface: Annotated[
        str, typer.Option(help="IP address of this machine that Ray binds; with Ray.")
    ] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(help="From `tandem cluster keys`, at this path on each machine; with Ray."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines.")] = LogLevel.WARNING,
    json: JsonFlag = False,
) -> None:
    """Start all processes of a cluster, and keep them running until a signal."""
    from tandem.integrations.deploying.spec import load_spec

    spec = load_spec(file)
    require_serve()
    configure_logging("cluster", log_level)
    if on == "machine":
        asyncio.run(_up(spec, json=json))
        return
    if secret_file is None:
        raise ConfigError(
            "cluster.up",
            "processes on several machines need keys: make them with `tandem cluster keys`",
            field="secret_file",
        )
    from tandem.server.config import is_loopback

    if not interface or is_loopback(interface):
        raise ConfigError(
            "cluster.up",
            "name the address that Ray is to bind: it takes loopback for the machine's first one",
            field="interface",
        )
    require_extra("ray", "ray")
    _up_on_ray(spec, secret_file.absolute(), address, interface, json=json)


def _up_on_ray(
    spec: "ClusterSpec", secret_file: Path, address: str, interface: str, *, json: bool
) -> None:
    import threading

    from tandem.integrations.deploying.ray_cluster import (
        RayCluster,
        list_role_resources,
        set_ray_token,
    )
    from tandem.rpc import make_runtime_dir

    folder = make_runtime_dir()
    try:
        set_ray_token(secret_file, folder)
        import ray  # pyright: ignore[reportMissingImports]

        if address:
            ray.init(address=address, _node_ip_address=interface, log_to_driver=False)
        else:
            count = sum(group.launchers for group in spec.groups) + spec.servers.count
            count += 1 + spec.store.hosts if spec.store is not None else 0
            ray.init(
                _node_ip_address=interface,
                include_dashboard=False,
                log_to_driver=False,
                resources=dict.fromkeys(list_role_resources(spec), float(count)),
            )
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        with RayCluster(spec, secret_file) as cluster:
            told = cluster.wait_up(START_TIMEOUT_S)
            _show_up(spec, {each["name"]: each["pid"] for each in told}, json=json)
            stop.wait()
        ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
        print_next("tandem", "cluster", "list", "--url", urls[0])
    sys.stdout.flush()
