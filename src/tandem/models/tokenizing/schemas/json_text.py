"""Reading JSON that a client or a model has written as a text."""

import json
from typing import Any

__all__ = ["parse_begun_object", "parse_json"]


def parse_json(text: str, **options: Any) -> Any:
    """Return the value that a text is in JSON; ``options`` are those of ``json.loads``.

    Raises: ValueError (it is no JSON, a number has too many digits for Python, or it is nested
        deeper than the interpreter's stack).
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def parse_begun_object(text: str) -> dict[str, Any]:
    """Return the object that a text is in JSON; of one that breaks off, as at a limit of tokens,
    what has arrived whole. A text that is no object gives an empty one.

    A string that breaks off is left out with its name, and so are words and numbers at the end,
    which may go on.
    """
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if value is None:
        try:
            value = parse_json(_close(text))
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _close(text: str) -> str:
    """Return the beginning of a text that ends with its last whole value, with the brackets that
    close what is open there.
    """
    closers: list[str] = []
    end = 0
    is_text = is_escaped = is_name = False
    for position, char in enumerate(text):
        if is_text:
            is_text = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            if not is_text and not is_name:
                end = position + 1
        elif char == '"':
            is_text = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            is_name = char == "{"
            end = position + 1
        elif char in "}]":
            if not closers:
                break
            closers.pop()
            end = position + 1
        elif char == ",":
            is_name = closers[-1:] == ["}"]
            end = position
        elif char == ":":
            is_name = False
    # A bracket is the end of a value itself, so the open ones are those that were open at `end`.
    return text[:end] + "".join(reversed(closers))
