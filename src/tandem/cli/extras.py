"""The check for optional packages that a command needs.

Every command imports this module, so this module imports the configuration only when needed.
"""

import re
from importlib.util import find_spec

from tandem.core.errors import UnsupportedError

__all__ = ["describe_extra", "describe_missing", "require_extra", "require_serve"]

DISTRIBUTION = "tandem-llm"


def require_extra(extra: str, *packages: str) -> None:
    """Prepare the process for torch, and check that a command's packages are installed.

    Raises: UnsupportedError (names the missing packages and the extra that installs them).
    """
    from tandem.core.config import let_idle_threads_sleep

    let_idle_threads_sleep()
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UnsupportedError("cli.require_extra", describe_extra(", ".join(missing), extra))


def require_serve() -> None:
    """Check that the packages of a server are installed; see ``require_extra``.

    Raises: UnsupportedError (one is missing; the text names it).
    """
    require_extra("serve", "torch", "transformers", "starlette", "uvicorn", "httptools", "httpx")


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return a line about a missing module that an extra of ours would install; None if none
    would.
    """
    package = (error.name or "").partition(".")[0]
    extra = _find_extra(package)
    return None if extra is None else f"[cli.import] {describe_extra(package, extra)}"


def describe_extra(packages: str, extra: str) -> str:
    """Return a line that names missing packages and the extra of ours that installs them."""
    return f"{packages} not installed: pip install '{DISTRIBUTION}[{extra}]'"


def _find_extra(package: str) -> str | None:
    """Return the first of our extras that installs a package with this import name; None if none
    does.
    """
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
