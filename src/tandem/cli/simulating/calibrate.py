"""``tandem sim calibrate``: write the step costs that a running server has learned to a file."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.asking.call import call_server
from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.errors import PeerLostError
from tandem.core.instance_status import InstanceStatus
from tandem.core.wire import InstanceInfo

__all__ = ["ToldServer", "calibrate"]


class ToldServer(msgspec.Struct, kw_only=True):
    """The part of a server's ``/server_info`` from which a calibration is written."""

    instances: list[InstanceStatus]
    instance: InstanceInfo | None


def calibrate(
    output: Annotated[Path, typer.Argument(help="File of the calibration, YAML.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the server.")] = None,
    json: JsonFlag = False,
) -> None:
    """Write what a server has learnt of its steps, for tandem sim run --calibration.

    The costs are those of its last few hundred steps: take them under the load that is of interest.
    """
    from tandem.sim.cluster.calibration import learn_instances, write_calibration

    told = call_server(url, "/server_info", ToldServer, api_key=api_key)
    if told.instance is None:
        raise PeerLostError("sim.calibrate", f"no instance of {url} serves")
    found = learn_instances(told.instances, told.instance)
    write_calibration(output, found)
    if json:
        print_json(found)
        return
    for each in found.instances:
        costs = each.costs
        sys.stdout.write(
            f"{each.name} ({each.role}): {costs.step_s * 1e3:.3g} ms a step, "
            f"{costs.prefill_token_s * 1e6:.3g} us a token of a prompt, "
            f"{costs.decode_s * 1e6:.3g} us a decode; error {costs.error:.0%} "
            f"over {each.num_steps:,} steps\n"
        )
    print_next("tandem", "sim", "run", "SCENARIO", "--calibration", output)
