"""Optional packages that a command needs.

Every command imports this module, so that it imports the configuration only where it is used.
"""

import re
from importlib.util import find_spec

from tandem.core.errors import UnsupportedError

__all__ = ["describe_extra", "describe_missing", "require_extra", "require_serve"]

DISTRIBUTION = "tandem-llm"


def require_extra(extra: str, *packages: str) -> None:
    """Prepare the process for torch; refuse a command whose packages are not installed.

    Raises: UnsupportedError: names them and the extra that brings them.
    """
    from tandem.core.config import let_idle_threads_sleep

    let_idle_threads_sleep()
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UnsupportedError("cli.require_extra", describe_extra(", ".join(missing), extra))


def require_serve() -> None:
    """Do as ``require_extra``, for commands that start a server.

    Raises: UnsupportedError.
    """
    require_extra("serve", "torch", "transformers", "starlette", "uvicorn", "httptools", "httpx")


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return a line about a module that an extra would bring; None if none would."""
    package = (error.name or "").partition(".")[0]
    extra = _find_extra(package)
    return None if extra is None else f"[cli.import] {describe_extra(package, extra)}"


def describe_extra(packages: str, extra: str) -> str:
    """Return which packages are not installed, and what brings them."""
    return f"{packages} not installed: pip install '{DISTRIBUTION}[{extra}]'"


def _find_extra(package: str) -> str | None:
    """Return the first extra of ours whose requirements have a package, by its import's name."""
    import importlib.metadata

    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None  # The package is not installed: it runs from a source tree.
    for line in needed:
        match = re.match(r"""([\w.-]+).*;.*extra\s*==\s*["'](\w+)["']""", line)
        if match and match[1].lower().replace("-", "_").startswith(package) and package:
            return match[2]
    return None
