"""Which optional packages a command needs."""

from importlib.util import find_spec

from tandem.core.errors import UnsupportedError

__all__ = ["require_extra"]


def require_extra(extra: str, *packages: str) -> None:
    """Refuse a command whose optional packages are not installed.

    Raises: UnsupportedError: names them and the extra that brings them.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        what = f"{', '.join(missing)} not installed: pip install 'tandem-llm[{extra}]'"
        raise UnsupportedError("cli.require_extra", what)
