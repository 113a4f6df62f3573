"""Parsing of tool calls whose arguments are written one by one between marks, as in XML.

Models leave out closing marks. A mark of the structure ends an argument that has not been closed
where the text behind it shows that it is no part of the argument; see ``_EndFinder``.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.schemas.kinds import name_kind
from tandem.server.outputs.call_reader import CallReader, JsonScan
from tandem.server.outputs.source import Reading

__all__ = ["ParameterMarks", "read_parameters", "write_json_value"]


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """The marks around the name and the value of an argument.

    Args:
        open: mark before the name.
        value_opens: marks between name and value.
        value_close: mark after the value.
        close: mark after the arguments.
        call_open: mark before the name of a call.
        call_name_end: mark after that name.
        outer: further marks around calls, which no argument contains as a rule.
        text_open: the one of ``value_opens`` that marks the value as text; None if only the tool's
            schema shows that.
        is_on_lines: True if a line break after and before the marks is not part of the value.
    """

    open: str
    value_opens: tuple[str, ...]
    value_close: str
    close: str
    call_open: str
    call_name_end: str
    outer: tuple[str, ...] = ()
    text_open: str | None = None
    is_on_lines: bool = True


def read_parameters(reader: CallReader, marks: ParameterMarks) -> Reading[None]:
    """Read the arguments of the call that began last, up to ``marks.close``, and emit them as JSON.

    Text is emitted as it arrives, other values when they are complete. The JSON of a call that was
    cut off is left open.
    """
    source = reader.source
    ends = (marks.close, *marks.outer, *({marks.call_open} - {*marks.outer}))
    given: list[str] = []
    separator = "{"
    while True:
        mark = yield from source.read_until((marks.open, *ends))
        if mark != marks.open:
            break
        name, mark = yield from source.collect_until((*marks.value_opens, *ends))
        if mark not in marks.value_opens:
            break
        name = name.strip()
        head = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
        unread = [each for each in reader.list_names() if each != name and each not in given]
        find_end = _EndFinder(reader, marks, unread)
        kinds = reader.find_kinds(name)
        is_text = kinds == {"string"} if marks.text_open is None else mark == marks.text_open
        if is_text:
            is_whole = yield from _read_text(reader, marks, head, find_end)
        else:
            is_whole = yield from _read_other(reader, marks, head, find_end, kinds)
        if not is_whole:
            return
        given.append(name)
        separator = ", " if reader.has_arguments else "{"
    if mark is not None and mark != marks.close:
        source.give_back(mark)
    if mark is not None or not source.is_cut:
        reader.add("}" if reader.has_arguments else "{}")


class _EndFinder:
    """A search for the end of an argument.

    Args:
        reader: its source is positioned inside the argument.
        marks: marks of the format.
        names: names of the arguments that may follow.
    """

    def __init__(self, reader: CallReader, marks: ParameterMarks, names: Sequence[str]) -> None:
        self._source = reader.source
        self._marks = marks
        self._openings = {
            marks.open: [name + end for name in names for end in marks.value_opens],
            marks.call_open: [name + marks.call_name_end for name in reader.tools],
        }
        """Texts that follow a mark where it opens an argument or a call."""
        self._all = tuple({marks.value_close, marks.close, *marks.outer, *self._openings})
        self._pattern = re.compile("|".join(map(re.escape, self._all)))

    def read(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Read the argument and the mark that closes it, if it has one; return False if the text
        was cut off inside.
        """
        source = self._source
        while True:
            mark = yield from source.read_until(self._all, emit)
            if mark is None:
                return not source.is_cut
            if mark == self._marks.value_close:
                if not (yield from self._is_closed_again()):
                    return True
                emit(mark)
                continue
            source.give_back(mark)
            count = yield from self._count_inside()
            if not count:
                return True
            emit(source.take(count))

    def _is_closed_again(self) -> Reading[bool]:
        """Return True if text and another closing mark follow a closing mark before any other mark:
        the first one is a part of the argument, such as a file about this format.
        """
        source, position = self._source, 0
        while (found := self._pattern.search(source.text, position)) is None:
            if source.is_ended:
                return False
            position = max(position, len(source.text) - max(map(len, self._all)))
            yield
        is_close = found[0] == self._marks.value_close
        return is_close and bool(source.text[: found.start()].strip())

    def _count_inside(self) -> Reading[int]:
        """Return how many characters from a mark on belong to the argument; 0: it ends there.

        It does if the closing mark does not come before another argument of the call, another call
        or the end of the text.
        """
        source, position = self._source, 0
        while True:
            found = self._pattern.search(source.text, position)
            if found is None:
                if source.is_ended:
                    # In a text that was cut off, the closing mark may have been to come.
                    return len(source.text) if source.is_cut else 0
                position = max(position, len(source.text) - max(map(len, self._all)))
                yield
                continue
            if found[0] == self._marks.value_close:
                return found.start()
            if (yield from self._is_opening(found[0], found.end())):
                return 0
            position = found.end()

    def _is_opening(self, mark: str, position: int) -> Reading[bool]:
        """Return True if what follows a mark opens an argument or a call."""
        expected = self._openings.get(mark, ())
        while True:
            rest = self._source.text[position:]
            if any(rest.startswith(each) for each in expected):
                return True
            if self._source.is_ended or not any(each.startswith(rest) for each in expected):
                return False
            yield


def _read_text(
    reader: CallReader, marks: ParameterMarks, head: str, find_end: _EndFinder
) -> Reading[bool]:
    reader.add(head + '"')
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

    is_whole = yield from find_end.read(emit)
    if is_whole:
        reader.add('"')
    return is_whole


def _read_other(
    reader: CallReader,
    marks: ParameterMarks,
    head: str,
    find_end: _EndFinder,
    kinds: frozenset[str] | None,
) -> Reading[bool]:
    parts: list[str] = []
    if kinds is None or kinds & {"array", "object"}:
        count = yield from _count_json(reader, marks.value_close)
        parts.append(reader.source.take(count))
    is_whole = yield from find_end.read(parts.append)
    written = "".join(parts)
    if not is_whole:
        # The text was cut off before the closing mark: the part that came is passed on as an
        # unfinished JSON string.
        reader.add(head + json.dumps(written, ensure_ascii=False)[:-1])
        return False
    if marks.is_on_lines:
        written = written.removeprefix("\n").removesuffix("\n")
    value = write_json_value(written, kinds, is_json=marks.text_open is not None)
    if value is not None:
        reader.add(head + value)
    return True


def _count_json(reader: CallReader, close: str) -> Reading[int]:
    """Return the length of the JSON object or array that follows and has the closing mark behind
    it, whatever marks are in it; 0 if there is none.
    """
    source, position = reader.source, 0
    while not (text := source.text[position:].lstrip()) and not source.is_ended:
        position = len(source.text)
        yield
    if not text.startswith(("{", "[")):
        return 0
    position = len(source.text) - len(text)
    scan = JsonScan()
    while (end := scan.find_end(source.text[position:])) is None:
        if source.is_ended:
            return 0
        yield
    position += end
    while True:
        rest = source.text[position:].lstrip()
        if rest.startswith(close):
            return position
        if source.is_ended or not close.startswith(rest):
            return 0
        yield


def write_json_value(
    written: str, kinds: frozenset[str] | None, *, is_json: bool = False
) -> str | None:
    """Return the JSON of the value that an argument's text stands for.

    JSON is passed on as it was written: a number keeps its digits.

    Args:
        written: the text between the marks.
        kinds: types that the tool's schema allows; None: it does not tell.
        is_json: True if the format writes strings here in quotes.

    Returns: None if the text is empty and the argument is no text: it has no value.
    """
    text = written.strip()
    if not text and kinds is not None and "string" not in kinds:
        return "null" if "null" in kinds else None
    try:
        value = parse_json(
            text, parse_constant=_refuse_constant, parse_int=lambda _: 0, parse_float=lambda _: 0.5
        )
    except ValueError:
        # Models write Python's True, False and None as well as JSON's true, false and null.
        words = {"true": "true", "false": "false", "none": "null", "null": "null"}
        if kinds is not None and "string" not in kinds and text.lower() in words:
            return words[text.lower()]
        if kinds is not None and "string" not in kinds and kinds & {"array", "object"}:
            return _convert_literal(text) or json.dumps(written, ensure_ascii=False)
        return json.dumps(written, ensure_ascii=False)
    kind = name_kind(value)
    is_text = kind == "string" and not is_json
    if kinds is not None and "string" in kinds and (is_text or kind not in kinds):
        return json.dumps(written, ensure_ascii=False)
    return text


def _refuse_constant(name: str) -> object:
    """Refuse NaN and infinities, which JSON does not have, so that they are treated as text."""
    raise ValueError(name)


def _convert_literal(text: str) -> str | None:
    """Return the JSON of a list or a dict that is written as Python writes it, as models do; None
    if the text is neither, or holds what JSON does not have.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        is_container = isinstance(value, (list, tuple, dict))
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if is_container else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
