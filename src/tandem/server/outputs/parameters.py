"""Parsing of tool calls whose arguments are written one by one between marks, as in XML."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.server.outputs.call_reader import CallReader
from tandem.server.outputs.source import Reading

__all__ = ["ParameterMarks", "read_parameters"]


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """The marks around the name and the value of an argument.

    Args:
        open: mark before the name.
        value_opens: marks between name and value.
        value_close: mark after the value.
        text_open: the one of ``value_opens`` that marks the value as text; None if only the tool's
            schema shows that.
        is_on_lines: True if a line break after and before the marks is not part of the value.
    """

    open: str
    value_opens: tuple[str, ...]
    value_close: str
    text_open: str | None = None
    is_on_lines: bool = True


def read_parameters(
    reader: CallReader, name: str, marks: ParameterMarks, close: str
) -> Reading[None]:
    """Read the arguments of a call up to ``close``, and emit them as JSON.

    The call's name has been read. Text is emitted as it arrives, other values when they are
    complete. The JSON of an incomplete call is left open.
    """
    schema = reader.tools.get(name, {})
    separator = "{"
    while True:
        mark = yield from reader.source.read_until((marks.open, close))
        if mark == close:
            reader.add("{}" if separator == "{" else "}")
            return
        if mark is None:
            return
        parameter, mark = yield from reader.source.collect_until((*marks.value_opens, close))
        if mark is None:
            return
        reader.add(f"{separator}{json.dumps(parameter.strip(), ensure_ascii=False)}: ")
        separator = ", "
        if mark == close:
            return
        kinds = _list_types(schema, parameter.strip())
        is_text = kinds == {"string"} if marks.text_open is None else mark == marks.text_open
        if is_text:
            is_whole = yield from _read_text(reader, marks)
        else:
            is_whole = yield from _read_other(reader, marks, kinds)
        if not is_whole:
            return


def _read_text(reader: CallReader, marks: ParameterMarks) -> Reading[bool]:
    reader.add('"')
    if marks.is_on_lines and (yield from reader.source.starts_with("\n")):
        reader.source.take(1)
    held = ""

    def emit(text: str) -> None:
        nonlocal held
        text = held + text
        # A trailing line break is held back: it may be the one before the closing mark, which is
        # not part of the value.
        held = "\n" if marks.is_on_lines and text.endswith("\n") else ""
        reader.add(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])

    mark = yield from reader.source.read_until((marks.value_close,), emit)
    if mark is None:
        return False
    reader.add('"')
    return True


def _read_other(reader: CallReader, marks: ParameterMarks, kinds: set[str]) -> Reading[bool]:
    written, mark = yield from reader.source.collect_until((marks.value_close,))
    if mark is None:
        # The text ended before the closing mark: the part that came is passed on as an unfinished
        # JSON string.
        reader.add(json.dumps(written, ensure_ascii=False)[:-1])
        return False
    reader.add(json.dumps(_convert(written, kinds, marks), ensure_ascii=False))
    return True


def _convert(written: str, kinds: set[str], marks: ParameterMarks) -> Any:
    """Return the value that an argument's text represents, by the types that the tool's schema
    allows.
    """
    text = written
    if marks.is_on_lines:
        text = text.removeprefix("\n").removesuffix("\n")
    try:
        value = parse_json(text.strip(), parse_constant=_refuse_constant)
    except ValueError:
        lowered = text.strip().lower()
        # Models write Python's True, False and None as well as JSON's true, false and null.
        words = {"true": True, "false": False, "none": None, "null": None}
        is_word = lowered in words and bool(kinds) and "string" not in kinds
        return words[lowered] if is_word else text
    if isinstance(value, str) or ("string" in kinds and _name_type(value) not in kinds):
        return text if "string" in kinds or not isinstance(value, str) else value
    return value


def _refuse_constant(name: str) -> Any:
    """Refuse NaN and infinities, which JSON does not have, so that they are treated as text."""
    raise ValueError(name)


def _name_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "array" if isinstance(value, list) else "object"


def _list_types(schema: Mapping[str, Any], parameter: str) -> set[str]:
    """Return the JSON types that a parameter may have; empty if its schema does not tell."""
    properties = schema.get("properties")
    own = properties.get(parameter) if isinstance(properties, Mapping) else None
    return _types_of(own, depth=0)


def _types_of(schema: Any, *, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kinds: set[str] = set()
    given = schema.get("type")
    kinds |= {given} if isinstance(given, str) else set(given or ())
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(name) or ():
            kinds |= _types_of(each, depth=depth + 1)
    values = schema.get("enum")
    if not kinds and isinstance(values, list) and values:
        kinds = {"string" if isinstance(each, str) else _name_type(each) for each in values}
    if "number" in kinds:
        kinds.add("integer")
    return kinds
