"""Which optional packages a command needs."""

from importlib.util import find_spec

from tandem.core.config import let_idle_threads_sleep
from tandem.core.errors import UnsupportedError

__all__ = ["require_extra"]


def require_extra(extra: str, *packages: str) -> None:
    """Prepare the process for torch; refuse a command whose packages are not installed.

    Raises: UnsupportedError: names them and the extra that brings them.
    """
    let_idle_threads_sleep()
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        what = f"{', '.join(missing)} not installed: pip install 'tandem-llm[{extra}]'"
        raise UnsupportedError("cli.require_extra", what)
