"""``tandem version``: print the version of Tandem and of its libraries."""

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version

from tandem import __version__
from tandem.cli.output import JsonFlag, print_json

__all__ = ["version"]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "pyzmq")


def version(json: JsonFlag = False) -> None:
    """Print the version, and those of the libraries that matter in a bug report."""
    found = {"tandem": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = package_version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if json:
        print_json(found)
        return
    sys.stdout.writelines(f"{name} {number}\n" for name, number in found.items())
