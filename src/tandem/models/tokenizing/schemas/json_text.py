"""Reading JSON that a client or a model has written as a text."""

import json
from typing import Any

__all__ = ["parse_json"]


def parse_json(text: str, **options: Any) -> Any:
    """Return the value that a text is in JSON; ``options`` are those of ``json.loads``.

    Raises: ValueError (it is no JSON, a number has too many digits for Python, or it is nested
        deeper than the interpreter's stack).
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
