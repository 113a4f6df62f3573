"""The application of ``tandem sim``, with its commands."""

import typer

from tandem.cli.simulating.calibrate import calibrate
from tandem.cli.simulating.compare import compare
from tandem.cli.simulating.decide import decide
from tandem.cli.simulating.hits import hits
from tandem.cli.simulating.paper import paper
from tandem.cli.simulating.record import record
from tandem.cli.simulating.run import run
from tandem.cli.simulating.studies import advise, capacity, sweep

__all__ = ["app"]

app = typer.Typer(
    name="sim",
    help="Simulate clusters in virtual time, with the scheduler that also serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("hits")(hits)
app.command("run")(run)
app.command("sweep")(sweep)
app.command("capacity")(capacity)
app.command("advise")(advise)
app.command("paper")(paper)
app.command("record")(record)
app.command("decide")(decide)
app.command("compare")(compare)
app.command("calibrate")(calibrate)


@app.callback()
def _root() -> None:
    """Do nothing: a callback makes typer treat the application as a group of commands."""
