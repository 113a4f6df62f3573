"""``tandem serve``: start the API server and its instances."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.cli.config import (
    SERVE_SETTINGS,
    Config,
    check_store,
    load_config,
    with_config_flags,
)
from tandem.cli.extras import require_serve
from tandem.cli.flags.launch_flags import make_launch_parameters, translate
from tandem.cli.hosting import serve_models
from tandem.cli.keeping.pull import pull_with_bar
from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.descriptors import raise_limit
from tandem.core.errors import ConfigError
from tandem.core.logs import LogFormat, LogLevel, configure_logging
from tandem.core.wire import InstanceInfo, InstanceStage, StageChanged
from tandem.models.deferred_imports import defer_imports
from tandem.models.loading.hub import resolve_folder
from tandem.server.config import configure_access_log

if TYPE_CHECKING:
    from tandem.engine.process.fork_server import ForkServer

__all__ = ["serve"]

LogLevelFlag = Annotated[LogLevel, typer.Option(help="Least severe lines to write.")]
LogFormatFlag = Annotated[
    LogFormat, typer.Option(help="How log lines are written: text (key=value) or json.")
]


@with_config_flags(SERVE_SETTINGS, make_launch_parameters())
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, hub id or `demo`.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    hf_repo: Annotated[
        str,
        typer.Option("--hf-repo", "-hf", help="Pull this model of a hub first, as `tandem pull`."),
    ] = "",
    hf_file: Annotated[
        str, typer.Option("--hf-file", "-hff", help="With -hf: GGUF file of the repository.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option(help="Say what would run and why; load nothing.")
    ] = False,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Tell the choices that were rejected, and why.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Tell every choice with its reason.")
    ] = False,
    log_level: LogLevelFlag = LogLevel.WARNING,
    log_format: LogFormatFlag = LogFormat.TEXT,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Serve a model over HTTP."""
    if hf_repo:
        if model is not None:
            what = f"MODEL is {model} and -hf is {hf_repo}: give one of them"
            raise ConfigError("cli.serve", what, field="model.path")
        place = pull_with_bar(hf_repo, "main", hf_file, quiet=json)
        model = str(place) if hf_file else hf_repo
    foreign = translate(flags, model=model)
    resolved = load_config(config, flags, model=model, foreign=foreign.settings)
    for note in foreign.notes:
        sys.stderr.write(f"tandem: {note}\n")
    settings = resolved.config
    if settings.hub.file:
        serve_models(settings, log_level, log_format, json=json)
        return
    if not settings.model.path:
        raise ConfigError(
            "cli.serve", "name a model: a folder, a hub id or `demo`", field="model.path"
        )
    check_store(settings.store)
    settings.cluster.require_pairs()
    # A wrong name is found before anything is imported, which takes seconds.
    resolve_folder(settings.model.path, revision=settings.model.revision)
    defer_imports()
    if dry_run:
        from tandem.cli.planning.serving import show_serving

        show_serving(settings, with_rejected=rejected, as_json=json)
        return
    require_serve()
    configure_logging("server", log_level, log_format)
    configure_access_log(settings.server, log_level)
    # Each streamed answer needs a file descriptor; child processes inherit the raised limit.
    raise_limit()
    announcer = _Announcer(settings, is_verbose=verbose or rejected, with_rejected=rejected)
    asyncio.run(_serve(settings, log_level, log_format, announcer, json=json))


async def _serve(
    settings: Config, log_level: str, log_format: str, announcer: "_Announcer", *, json: bool
) -> None:
    from tandem.engine.process.fork_server import ForkServer

    async with contextlib.AsyncExitStack() as opened:
        # The instances' libraries are imported first, which is most of their start; meanwhile this
        # process imports the server and checks the settings.
        fork_server = ForkServer()
        if not settings.cluster.launchers:
            await opened.enter_async_context(fork_server)
        await _serve_with(fork_server, settings, log_level, log_format, announcer, json=json)


async def _serve_with(
    fork_server: "ForkServer",
    settings: Config,
    log_level: str,
    log_format: str,
    announcer: "_Announcer",
    *,
    json: bool,
) -> None:
    from tandem.cli.composition import check_model, compose
    from tandem.server.run import RunningServer, open_listener, run_server

    # Cheap checks (the model's files, the port) come before processes are started and weights are
    # read.
    model = check_model(settings)
    listener = open_listener(settings.server)
    with listener, show_loading(quiet=json) as on_stage:
        composing = compose(
            settings,
            model,
            fork_server,
            log_level=log_level,
            log_format=log_format,
            on_stage=on_stage,
        )
        async with composing as (engine, app):
            started: asyncio.Future[RunningServer] = asyncio.get_running_loop().create_future()
            serving = asyncio.create_task(
                run_server(settings.server, app, started.set_result, listener)
            )
            announcing = asyncio.create_task(announcer.announce(engine, started, json=json))
            try:
                await asyncio.wait((serving, announcing), return_when=asyncio.FIRST_COMPLETED)
                if announcing.done() and announcing.exception() is not None:
                    # The model cannot be served: the server stops, so that its port does not accept
                    # requests in vain.
                    (await started).stop()
                await serving
                if announcing.done():
                    announcing.result()
                elif (await started).is_interrupted:
                    # Ctrl-C came before the model was ready: the command ends as interrupted.
                    raise KeyboardInterrupt
            finally:
                # Ctrl-C before ``run_server`` has its signal handlers cancels this task alone: both
                # tasks are cancelled with it.
                for task in (announcing, serving):
                    task.cancel()
                await asyncio.gather(announcing, serving, return_exceptions=True)


class _Announcer:
    """Prints the choices that were made, and the server's address, once it serves.

    Args:
        settings: settings of the server.
        is_verbose: True to print every choice with its reason.
        with_rejected: True to print rejected choices too.
    """

    def __init__(self, settings: Config, *, is_verbose: bool, with_rejected: bool) -> None:
        self._settings = settings
        self._is_verbose = is_verbose
        self._with_rejected = with_rejected

    async def announce(self, cluster: Any, started: Any, *, json: bool) -> None:
        """Wait until the model serves, and print; scripts wait for the last line."""
        info: InstanceInfo = await cluster.wait_ready()
        running = await started
        names = [each.name for each in cluster.instances]
        if json:
            print_json({"url": running.url, "instance": info, "instances": names})
            sys.stdout.flush()
            return
        from tandem.cli.planning.choices import print_choices, print_summary

        if self._is_verbose:
            if len(names) > 1:
                sys.stdout.write(f"{', '.join(names)}, each:\n")
            print_choices(info.plan, info.rejected if self._with_rejected else [])
            sys.stdout.write(f"Loaded in {info.load_seconds:.1f} s; --rejected tells more\n")
        else:
            print_summary(info.model, info.plan, names)
        sys.stdout.write(f"Serving {info.model} at {running.url}\n")
        sys.stdout.flush()
        server = self._settings.server
        key = ("--api-key", "KEY") if server.api_key or server.api_key_file else ()
        why = "" if key else "or open that address in a browser"
        print_next("tandem", "chat", "--url", running.url, *key, why=why)


@contextlib.contextmanager
def show_loading(*, quiet: bool) -> Iterator[Any]:
    """Give a callback that draws a progress bar on standard error while weights load."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=console, transient=True)
    task = bars.add_task("loading", total=None, visible=not quiet)

    is_drawn = False

    def show(stage: StageChanged) -> None:
        nonlocal is_drawn
        if quiet or not console.is_terminal:
            return
        if stage.stage is InstanceStage.LOADING:
            is_drawn = True
            bars.start()
            total = stage.total or None
            # The first and the last report are drawn at once: a fast load ends before the progress
            # bar's next refresh.
            is_first_or_last = total != bars.tasks[0].total or stage.done == total
            bars.update(
                task,
                description=stage.detail,
                completed=stage.done,
                total=total,
                refresh=is_first_or_last,
            )
        else:
            bars.stop()

    try:
        yield show
    finally:
        if is_drawn:  # Without a drawn bar, stopping would print an empty line.
            bars.stop()
