"""``tandem store``: the processes of a store, and its objects from the command line."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.config import STORE_SETTINGS, Config, load_config, with_config_flags
from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.core.descriptors import raise_limit
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.logs import LogLevel, configure_logging

if TYPE_CHECKING:
    from tandem.store import HostService, StoreClient
    from tandem.store.messages import DiskStatus

__all__ = ["app"]

app = typer.Typer(help="Keep objects in the memory of many hosts.", no_args_is_help=True)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
LogLevelFlag = Annotated[LogLevel, typer.Option(help="Least severe lines to write.")]
Key = Annotated[str, typer.Argument(help="Key of the object.")]
DRAIN_POLL_S = 0.1
JOIN_NOTICE_S = 2.0
"""Seconds without a master after which a host says that it is waiting for one."""


@app.command("master")
@with_config_flags(STORE_SETTINGS)
def master(
    config: ConfigFile = None,
    log_level: LogLevelFlag = LogLevel.INFO,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Run the master of a store until it is told to stop."""
    from tandem.store import MasterService
    from tandem.transfer import PollingLoop

    settings = _start(config, flags, "store-master", log_level)
    service = MasterService(settings.store, settings.rpc)

    def tell() -> None:
        if json:
            print_json({"endpoint": service.endpoint})
        else:
            sys.stdout.write(f"store master at {service.endpoint}\n")

    with asyncio.Runner(loop_factory=PollingLoop) as runner:
        runner.run(_serve(service, tell))


@app.command("host")
@with_config_flags(STORE_SETTINGS)
def host(
    config: ConfigFile = None,
    log_level: LogLevelFlag = LogLevel.INFO,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Offer this machine's memory to a store until told to stop; with a name, it survives that."""
    from tandem.store import HostService
    from tandem.transfer import PollingLoop

    settings = _start(config, flags, "store-host", log_level)
    service = HostService(settings.store, settings.rpc)

    def tell() -> None:
        if json:
            print_json({"host": service.host.name})
        else:
            sys.stdout.write(f"store host {service.host.name} is up\n")

    with asyncio.Runner(loop_factory=PollingLoop) as runner:
        runner.run(_serve(service, tell, _join))


@app.command("put")
@with_config_flags(STORE_SETTINGS)
def put(
    key: Key,
    file: Annotated[Path, typer.Argument(help="File with the value; - is standard input.")],
    replicas: Annotated[int, typer.Option(min=1, help="Copies, each on another host.")] = 1,
    upsert: Annotated[bool, typer.Option(help="Replace an object of the same key.")] = False,
    hard_pin: Annotated[bool, typer.Option(help="Never evict it.")] = False,
    soft_pin_s: Annotated[float, typer.Option(min=0, help="Evict it late, for so long.")] = 0.0,
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Store a file under a key; says whether there was one already."""
    from tandem.store import PutOptions

    value = sys.stdin.buffer.read() if str(file) == "-" else _read_file(file)
    options = PutOptions(replicas=replicas, upsert=upsert, hard_pin=hard_pin, soft_pin_s=soft_pin_s)
    with _connect(config, flags) as client:
        result = client.put(key, value, options)
    if json:
        print_json({"key": key, "result": result.value, "size_bytes": len(value)})
    else:
        sys.stdout.write(f"{result.value}\n")


@app.command("get")
@with_config_flags(STORE_SETTINGS)
def get(
    key: Key,
    file: Annotated[Path, typer.Argument(help="Where to write; - is standard output.")] = Path("-"),
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Write the value of an object to a file or standard output."""
    if json and str(file) == "-":
        what = "the value goes to standard output, where --json would be mixed with it: give a FILE"
        raise ConfigError("store.get", what, field="file")
    with _connect(config, flags) as client:
        value = client.get(key)
    if str(file) == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    else:
        file.write_bytes(value)
    if json:
        print_json({"key": key, "file": str(file), "size_bytes": len(value)})


@app.command("ls")
@with_config_flags(STORE_SETTINGS)
def ls(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """List keys, sizes in bytes, and how many replicas can be read."""
    with _connect(config, flags) as client:
        page = client.list_keys(prefix, limit=limit)
    rows = list(zip(page.keys, page.sizes, page.num_replicas, strict=True))
    if json:
        names = ("key", "size_bytes", "replicas")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    print_table(("key", "bytes", "replicas"), rows)
    if not page.is_last:
        sys.stdout.write(f"... there are more than {limit}\n")


@app.command("rm")
@with_config_flags(STORE_SETTINGS)
def rm(
    keys: Annotated[list[str], typer.Argument(help="Keys, or prefixes with --prefix.")],
    prefix: Annotated[bool, typer.Option("--prefix", help="Remove all that begin so.")] = False,
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Remove objects; fails if a key named is not there."""
    with _connect(config, flags) as client:
        if prefix:
            count = sum(client.remove_prefix(key) for key in keys)
            missing: list[str] = []
        else:
            removed = client.remove_many(keys)
            count = sum(removed)
            missing = [key for key, found in zip(keys, removed, strict=True) if not found]
    if json:
        print_json({"removed": count, "missing": missing})
    else:
        sys.stdout.write(f"removed {count}\n")
    if missing:
        raise NotFoundError("store.rm", f"no object {', '.join(map(repr, missing))}")


@app.command("stat")
@with_config_flags(STORE_SETTINGS)
def stat(config: ConfigFile = None, json: JsonFlag = False, **flags: Any) -> None:
    """Show the hosts of a store and what they hold."""
    with _connect(config, flags) as client:
        status = client.status()
    if json:
        print_json(status)
        return
    sys.stdout.write(
        f"epoch {status.epoch}: {status.num_objects} objects, {status.total_bytes} bytes; "
        f"{status.num_unreadable} unreadable, {status.num_under_replicated} with too few "
        f"replicas, {status.num_unfinished} puts unfinished\n"
    )
    columns = (
        "host", "machine", "stage", "capacity", "used", "objects", "quarantined", "ssd",
        "ssd capacity", "ssd used", "ssd objects", "ssd queued",
    )  # fmt: skip
    rows = [
        (
            row.name, row.machine, row.stage.value, row.capacity_bytes, row.used_bytes,
            row.num_objects, row.quarantined_bytes, *_disk_columns(row.disk),
        )
        for row in status.hosts
    ]  # fmt: skip
    print_table(columns, rows)
    damaged = [("master", name) for name in status.damaged]
    damaged += [(row.name, name) for row in status.hosts for name in row.damaged]
    for owner, name in damaged:
        sys.stdout.write(f"damaged on {owner}: {name}\n")
    if status.num_tombstones:
        sys.stdout.write(f"{status.num_tombstones} removals are kept for hosts that are away\n")
    if not status.is_roster_complete:
        sys.stdout.write(
            "the list of hosts was lost: removals are kept for hosts that may be missing from it "
            "(`tandem store set-floor`)\n"
        )


def _disk_columns(disk: "DiskStatus | None") -> tuple[object, ...]:
    if disk is None:
        return ("none", "", "", "", "")
    return (
        disk.state.value, disk.capacity_bytes, disk.used_bytes, disk.num_objects, disk.num_queued,
    )  # fmt: skip


@app.command("drain")
@with_config_flags(STORE_SETTINGS)
def drain(
    name: Annotated[str, typer.Argument(help="Name of the host, as `stat` shows it.")],
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for the end.")] = 600.0,
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Move everything off a host, so that it can be stopped."""
    import time

    from tandem.core.errors import DeadlineError
    from tandem.store.messages import HostStage

    with _connect(config, flags) as client:
        client.drain(name)
        end_s = time.monotonic() + wait_s
        while True:
            row = next(row for row in client.status().hosts if row.name == name)
            if row.stage is HostStage.DRAINED:
                break
            if row.stage is HostStage.LOST or time.monotonic() >= end_s:
                raise DeadlineError(
                    "store.drain",
                    f"{name} is {row.stage.value} with {row.num_objects} objects after {wait_s} s: "
                    "other hosts may lack space (`tandem store stat`)",
                )
            time.sleep(DRAIN_POLL_S)
    if json:
        print_json({"host": name, "stage": row.stage.value})
    else:
        sys.stdout.write(f"{name} is drained\n")


@app.command("retire")
@with_config_flags(STORE_SETTINGS)
def retire(
    name: Annotated[str, typer.Argument(help="Name of the host, as `stat` shows it.")],
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Give up a host that will not come back; what it holds is dropped if it does."""
    with _connect(config, flags) as client:
        client.retire(name)
    if json:
        print_json({"host": name, "stage": "retired"})
    else:
        sys.stdout.write(f"{name} is retired\n")


@app.command("set-floor")
@with_config_flags(STORE_SETTINGS)
def set_floor(
    yes: Annotated[bool, typer.Option(help="Do it, instead of telling what it drops.")] = False,
    config: ConfigFile = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Make hosts that a rebuilt list of hosts lacks drop their objects when they connect."""
    with _connect(config, flags) as client:
        told = client.set_floor(dry_run=not yes)
    if json:
        print_json(told)
        return
    named = ", ".join(told.hosts) if told.hosts else "none"
    sys.stdout.write(f"hosts that keep all they have: {named}\n")
    if yes:
        sys.stdout.write(
            f"floor set at version {told.version}: what any other host has of before is dropped "
            "when it comes\n"
        )
    elif told.is_complete:
        sys.stdout.write("the list of hosts is complete: nothing is kept for others\n")
    else:
        sys.stdout.write(
            f"{told.num_tombstones} removals are kept for hosts that may be missing here. With "
            "--yes every object that such a host still has, removed or not, is dropped when it "
            "comes: start the hosts that you miss before\n"
        )


def _start(config: Path | None, flags: dict[str, Any], process: str, log_level: str) -> Config:
    configure_logging(process, log_level)
    raise_limit()
    return load_config(config, flags).config


@contextlib.contextmanager
def _connect(config: Path | None, flags: dict[str, Any]) -> "Iterator[StoreClient]":
    from tandem.store import StoreClient

    settings = load_config(config, flags).config
    with StoreClient(settings.store, settings.rpc) as client:
        yield client


async def _join(service: "HostService") -> None:
    """Wait until a master of the store has accepted the host; if that takes long, print which
    master it waits for.
    """
    joined = service.host.is_joined
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(joined.wait(), JOIN_NOTICE_S)
    if not joined.is_set():
        urls = ", ".join(service.urls)
        sys.stderr.write(f"store host {service.host.name} waits for a master at {urls}\n")
        sys.stderr.flush()
        await joined.wait()


async def _serve(
    service: "AbstractAsyncContextManager[Any]",
    tell: Callable[[], None],
    join: Callable[[Any], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Run a service until SIGTERM or SIGINT; call ``tell`` when it serves.

    ``tell`` prints the line that scripts wait for. It is called after ``join`` has returned. Ctrl-C
    before that ends the command with KeyboardInterrupt.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_up = is_interrupted = False

    def interrupt() -> None:
        nonlocal is_interrupted
        is_interrupted = not is_up
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with service:
        loop.add_signal_handler(signal.SIGINT, interrupt)
        stopped = asyncio.create_task(stop.wait())
        if join is not None:
            joining = asyncio.create_task(join(service))
            await asyncio.wait((stopped, joining), return_when=asyncio.FIRST_COMPLETED)
            joining.cancel()
        if not stop.is_set():
            is_up = True
            tell()
            sys.stdout.flush()
        await stopped
    if is_interrupted:
        raise KeyboardInterrupt


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            "store.put", f"{file}: {error.strerror}: give a file", field="file"
        ) from None
