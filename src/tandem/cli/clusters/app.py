"""The application of ``tandem cluster``, with its commands."""

import typer

from tandem.cli.clusters.describing import render, up
from tandem.cli.clusters.instances import (
    ApiKeyFlag,
    UrlFlag,
    add,
    drain,
    remove,
    restart,
    role,
    show,
    undrain,
)
from tandem.cli.clusters.keys import keys
from tandem.cli.clusters.launch import launch
from tandem.cli.output import JsonFlag

__all__ = ["app"]

app = typer.Typer(
    name="cluster",
    help="List and change the instances of a running server; start the processes of a cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(show)
app.command("role")(role)
app.command("drain")(drain)
app.command("undrain")(undrain)
app.command("restart")(restart)
app.command("add")(add)
app.command("remove")(remove)
app.command("up")(up)
app.command("render")(render)
app.command("launch")(launch)
app.command("keys")(keys)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    url: UrlFlag = "http://127.0.0.1:8000",
    api_key: ApiKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """List and change the instances of a running server; start the processes of a cluster."""
    if context.invoked_subcommand is None:
        show(url, api_key, json=json)
