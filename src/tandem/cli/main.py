"""The ``tandem`` command line: the list of commands, and how an error ends one."""

import os
import sys

import typer

from tandem.cli.asking import chat, generate
from tandem.cli.commands import (
    bench,
    config_show,
    convert,
    doctor,
    evaluate,
    explain,
    export,
    finetune,
    plan,
    pull,
    serve,
    store,
    verify,
    version,
)
from tandem.core.errors import TandemError
from tandem.core.logs import LogLevel, configure_logging

__all__ = ["app", "main"]

app = typer.Typer(
    name="tandem",
    help="Serve and fine-tune large language models on whatever hardware there is.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("pull")(pull.pull)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("convert")(convert.convert)
app.command("finetune")(finetune.finetune)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("version")(version.version)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
config_app.command("show")(config_show.show)
app.add_typer(config_app, name="config")
app.add_typer(store.app, name="store")


def main() -> None:
    """Run a command; an error that a user can cause is one line on standard error and status 1."""
    configure_logging("tandem", LogLevel.WARNING)
    try:
        app()
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (TandemError, OSError, UnicodeError) as error:
        sys.stderr.write(f"tandem: {error}\n".encode(errors="backslashreplace").decode())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
