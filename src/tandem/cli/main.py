"""The ``tandem`` command: the list of its commands, and how an error ends one."""

import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any, NamedTuple

import typer
import typer.core

from tandem import __version__
from tandem.cli.extras import describe_missing
from tandem.cli.interrupts import STATUS, end_interrupted, handle_interrupts
from tandem.core.errors import TandemError
from tandem.core.logs import LogLevel, configure_logging

__all__ = ["app", "main"]


class _Entry(NamedTuple):
    """An entry of the list of commands that the help prints."""

    path: str
    """``module:function`` of the command, or of a group's application; imported when it is
    called."""
    help: str
    """First sentence of the command's docstring, repeated here so that the list imports no command;
    a test compares them."""


COMMANDS = {
    "serve": _Entry("tandem.cli.commands.serve:serve", "Serve a model over HTTP."),
    "chat": _Entry(
        "tandem.cli.asking.chat:chat",
        "Talk to a model; every answer is followed by its rates.",
    ),
    "generate": _Entry(
        "tandem.cli.asking.generate:generate", "Write how the model continues a prompt."
    ),
    "pull": _Entry(
        "tandem.cli.keeping.pull:pull",
        "Download a model; a download that was stopped continues.",
    ),
    "list": _Entry("tandem.cli.keeping.kept:list_models", "List the models that were pulled."),
    "show": _Entry("tandem.cli.keeping.kept:show", "Describe a model by its files."),
    "rm": _Entry("tandem.cli.keeping.kept:remove", "Delete a model that was pulled."),
    "ps": _Entry("tandem.cli.keeping.running:ps", "List the models of a running server."),
    "plan": _Entry(
        "tandem.cli.commands.plan:plan",
        "Tell what serving a model is here and why; or place it on another machine (--hardware).",
    ),
    "verify": _Entry(
        "tandem.cli.commands.verify:verify",
        "Compare our operators, or else transformers' own cache, with transformers' eager code.",
    ),
    "convert": _Entry(
        "tandem.cli.commands.convert:convert",
        "Pack routed experts for the CPU (--format), or write a checkpoint in another format "
        "(--to).",
    ),
    "finetune": _Entry(
        "tandem.cli.commands.finetune:finetune",
        "Train a LoRA adapter; leave it, its log, results and loss plot in the recipe's "
        "output_dir.",
    ),
    "eval": _Entry(
        "tandem.cli.commands.evaluate:evaluate",
        "Print accuracy and perplexity of the records' answers, and exact match of greedy ones.",
    ),
    "export": _Entry(
        "tandem.cli.commands.export:export",
        "Write a checkpoint whose weights include the adapter, as safetensors.",
    ),
    "cluster": _Entry(
        "tandem.cli.clusters.app:app",
        "List and change the instances of a running server; start the processes of a cluster.",
    ),
    "explain": _Entry(
        "tandem.cli.commands.explain:explain",
        "Show where the time of a request went, and why KV was computed instead of reused.",
    ),
    "doctor": _Entry(
        "tandem.cli.commands.doctor:doctor",
        "Print what this machine offers and what Tandem makes of it, with the reasons.",
    ),
    "bench": _Entry(
        "tandem.cli.commands.bench:app",
        "Run a benchmark, ours and its rivals interleaved, or measure a server.",
    ),
    "sim": _Entry(
        "tandem.cli.simulating.app:app",
        "Simulate clusters in virtual time, with the scheduler that also serves.",
    ),
    "version": _Entry(
        "tandem.cli.commands.version:version",
        "Print the version, and those of the libraries that matter in a bug report.",
    ),
    "config": _Entry("tandem.cli.commands.config_show:app", "Look at the configuration."),
    "store": _Entry("tandem.cli.commands.store:app", "Keep objects in the memory of many hosts."),
}
"""Commands by name, in the order of the list."""

SAME = {"run": "chat", "ls": "list"}
"""Commands by another name that people know."""

MEANT = {
    **dict.fromkeys(("train", "tune", "fine-tune", "lora", "sft", "dpo"), "finetune"),
    **dict.fromkeys(("quantize", "quantise", "quant"), "convert"),
    "merge": "export",
    **dict.fromkeys(("start", "server", "api", "api-server", "launch"), "serve"),
    **dict.fromkeys(("download", "get", "fetch"), "pull"),
    **dict.fromkeys(("models", "tags"), "list"),
    **dict.fromkeys(("delete", "remove", "del"), "rm"),
    **dict.fromkeys(("cli", "ask", "prompt", "talk"), "chat"),
    **dict.fromkeys(("complete", "completion", "run-batch"), "generate"),
    **dict.fromkeys(("benchmark", "llama-bench", "perf"), "bench"),
    **dict.fromkeys(("perplexity", "evaluate", "score", "lm-eval"), "eval"),
    **dict.fromkeys(("env", "check", "info", "collect-env"), "doctor"),
    **dict.fromkeys(("settings", "configure"), "config"),
    **dict.fromkeys(("simulate", "simulator"), "sim"),
    **dict.fromkeys(("trace", "timeline", "why"), "explain"),
    "stop": "ps",
}
"""The command that is meant by a word of another program."""

UsageError: Any = typer.BadParameter.__mro__[1]
"""Base class of the parser's errors in typer, which are click's or those of a copy of click."""


class _Loaded(MutableMapping[str, Any]):
    """A mapping of the commands by name that imports and makes each one when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _, attribute = COMMANDS[name].path.partition(":")
            found = getattr(importlib.import_module(module), attribute)
            if not isinstance(found, typer.Typer):
                single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                single.command(name)(found)
                found = single
            self._made[name] = typer.main.get_command(found)
            self._made[name].name = name
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Commands(typer.core.TyperGroup):
    """A group of commands that imports a command when it is called, not when it is listed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Loaded()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands' names, in the order in which the help lists them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in for a command, with its name and help only, for the list."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        return typer.core.TyperCommand(cmd_name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the command that is called, after importing it.

        ``help`` is ``--help`` of the command that follows it.
        """
        first = str(args[0])
        if first == "help":
            if len(args) == 1:
                sys.stdout.write(ctx.get_help() + "\n")
                ctx.exit()
            asked = str(args[1])
            args = [SAME.get(asked, asked), *args[2:], "--help"]
        elif first not in COMMANDS and (meant := SAME.get(first) or MEANT.get(first)) is not None:
            if first in MEANT:
                what = f"No such command {first!r}. Did you mean {meant!r}?"
                raise UsageError(what, ctx)
            args = [meant, *args[1:]]
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None or listed.name is None:
            return name, None, rest
        return name, self.commands[listed.name], rest


app = typer.Typer(
    name="tandem",
    cls=_Commands,
    help="Serve and fine-tune large language models on whatever hardware there is.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Flags may be written with underscores too, as settings are in files and in the
        # environment.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        sys.stdout.write(f"tandem {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Do nothing: a callback makes typer treat the application as a group of commands."""
    del version


def main() -> None:
    """Run a command. An error that a user can cause gives one line on standard error and status
    1.
    """
    configure_logging("tandem", LogLevel.WARNING)
    try:
        with handle_interrupts():
            status = app(prog_name="tandem", standalone_mode=False)
        # Typer turns an interrupt into an exit with this status.
        if status == STATUS:
            end_interrupted()
        if status:
            sys.exit(status)
    except UsageError as error:
        _show_usage_error(error)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of the pipe (`head`, say) has closed it. Standard output is pointed at
        # /dev/null, since Python's flush at exit would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ModuleNotFoundError as error:
        what = describe_missing(error)
        if what is None:
            raise
        sys.stderr.write(f"tandem: {what}\n")
        sys.exit(1)
    except (TandemError, OSError, UnicodeError) as error:
        line = f"tandem: {error}{_name_flag(error)}\n"
        sys.stderr.write(line.encode(errors="backslashreplace").decode())
        sys.exit(1)
    except KeyboardInterrupt:
        end_interrupted()


def _name_flag(error: Exception) -> str:
    """Return a suffix that names the flag of the wrong setting, if the message does not name it."""
    field = error.field if isinstance(error, TandemError) else None
    if field is None or "." not in field:
        return ""
    from tandem.cli.config import find_flag

    flag = find_flag(field)
    return "" if flag is None or flag in str(error) else f" ({flag})"


def _show_usage_error(error: Any) -> None:
    """Print the parser's error in one line, or the help if there were no arguments."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(error.format_message() + "\n")
        return
    path = "tandem" if context is None else context.command_path
    what = " ".join(error.format_message().split())
    sys.stderr.write(f"tandem: {what.rstrip('.')}: see `{path} --help`\n")


if __name__ == "__main__":
    main()
