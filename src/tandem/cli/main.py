"""The ``tandem`` command line: the list of commands, and how an error ends one."""

import sys

import typer

from tandem.cli import (
    bench,
    chat,
    config_show,
    convert,
    doctor,
    generate,
    plan,
    pull,
    serve,
    store,
    version,
)
from tandem.core.errors import TandemError

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
app.command("convert")(convert.convert)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("version")(version.version)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
config_app.command("show")(config_show.show)
app.add_typer(config_app, name="config")
app.add_typer(store.app, name="store")


def main() -> None:
    """Run a command; an error of ours is one line on standard error and exit status 1."""
    try:
        app()
    except TandemError as error:
        sys.stderr.write(f"tandem: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
