"""``tandem cluster keys``: make the secret by which a cluster's processes authenticate each
other.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.errors import ConflictError

__all__ = ["keys"]


def keys(
    file: Annotated[
        Path, typer.Argument(help="File to make; copy it to each machine, readable by one user.")
    ] = Path("cluster.secret"),
    json: JsonFlag = False,
) -> None:
    """Make the secret of a cluster: a file of mode 0600, for cluster.secret_file."""
    from tandem.rpc import generate_secret, write_secret

    try:
        write_secret(file, generate_secret())
    except FileExistsError:
        what = f"{file} exists, and processes may use it: give another name"
        raise ConflictError("cluster.keys", what, field="file") from None
    if json:
        print_json({"file": str(file)})
    else:
        sys.stdout.write(f"{file}: the secret of a cluster; --cluster.secret-file {file}\n")
        words = ("MODEL", "--launcher.listen", "tcp://HOST:PORT", "--cluster.secret-file", file)
        print_next("tandem", "cluster", "launch", *words)
