"""The application of ``tandem cluster``, with its commands."""

import typer
import typer.core

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
    name = context.invoked_subcommand
    if name is None:
        show(url, api_key, json=json)
        return
    # What stands before the command's name is given to the command, which has the same options: a
    # `remove` must not ask another server than the one named.
    given = [
        each
        for each in context.command.get_params(context)
        if each.name in context.params
        and getattr(context.get_parameter_source(each.name), "name", "") != "DEFAULT"
    ]
    assert isinstance(context.command, typer.core.TyperGroup)
    taken = {each.name for each in context.command.commands[name].get_params(context)}
    for each in given:
        if each.name not in taken:
            what = f"`cluster {name}` asks no server and has no {each.opts[0]}"
            raise typer.BadParameter(what, ctx=context)
    context.default_map = {name: {str(each.name): context.params[str(each.name)] for each in given}}
