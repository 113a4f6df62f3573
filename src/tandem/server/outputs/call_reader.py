"""Parsing of tool calls whose arguments are JSON, and the state that all call parsers share."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.schemas.kinds import find_kinds, list_names
from tandem.server.outputs.deltas import ArgumentsDelta, CallStart, Delta
from tandem.server.outputs.source import Reading, TextSource

__all__ = ["CallReader", "JsonScan", "read_json_call", "read_value"]

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\["])'
)
"""Pattern of a call with its members in the usual order; its arguments can be sent as they
arrive."""


class CallReader:
    """The text from which the parsers of a format read, and the calls that they find.

    Args:
        source: text to read.
        emit: called with the deltas of calls.
        tools: JSON Schema of the parameters, by name of the tool.
    """

    def __init__(
        self,
        source: TextSource,
        emit: Callable[[Delta], None],
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.source = source
        self.tools = tools
        self.num_calls = 0
        self.left = ""
        """Text after a tool call that belongs to no call; the parser treats it as text of the
        answer.
        """
        self.has_arguments = False
        """True if the call that began last has a part of its arguments."""
        self._schema: Mapping[str, Any] = {}
        self._names: list[str] | None = None
        self._emit = emit

    def start(self, name: str, call_id: str | None = None) -> None:
        """Emit the beginning of a call. Text read so far is now certain to belong to a call, and
        not kept for treatment as text.
        """
        self.source.recall()
        self._emit(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1
        self.has_arguments = False
        self._schema, self._names = self.tools.get(name, {}), None

    def add(self, text: str) -> None:
        """Emit text as a further part of the arguments of the call that began last."""
        if text:
            self.has_arguments = True
            self._emit(ArgumentsDelta(self.num_calls - 1, text))

    def finish(self) -> None:
        """End the call that began last: it has an empty object as arguments if none have come. Does
        nothing if the text was cut off.
        """
        if not self.has_arguments and not self.source.is_cut:
            self.add("{}")

    def list_names(self) -> list[str]:
        """Return the names of the arguments that the schema of the last call's tool mentions."""
        if self._names is None:
            self._names = list_names(self._schema)
        return self._names

    def find_kinds(self, name: str) -> frozenset[str] | None:
        """Return the JSON types that an argument of the last call may have; None if its tool's
        schema does not tell.
        """
        return find_kinds(self._schema, name)


def read_json_call(
    reader: CallReader, ends: Sequence[str] = (), *, only_known: bool = False
) -> Reading[bool]:
    """Read ``{"name": ..., "arguments": {...}}``, after optional white space.

    Args:
        reader: reader whose source is positioned before the call.
        ends: marks that end a call even if its JSON object is incomplete.
        only_known: if True, refuse names of tools that were not given.

    Returns: False if the text is something else; then nothing was emitted.
    """
    source = reader.source
    yield from source.skip_space()
    if not source.text.startswith("{"):
        return False
    scan = JsonScan(ends)
    while True:
        head = _HEAD.match(source.text)
        if head is not None:
            name = _decode_string(head["name"])
            if name is None or (only_known and name not in reader.tools):
                return False
            source.take(head.end())
            reader.start(name)
            yield from read_value(reader, ends)
            yield from _skip_members(source, ends)
            reader.finish()
            return True
        end = scan.find_end(source.text)
        if end is not None:
            break
        if source.is_ended:
            return False
        yield
    return _emit_object(reader, source.text[:end], end, only_known=only_known)


def _emit_object(reader: CallReader, text: str, length: int, *, only_known: bool) -> bool:
    """Read a whole call whose JSON members are in another order than usual, and emit it; return
    False if it is no call.
    """
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (ValueError, RecursionError):
        return False
    if not call.name or (only_known and call.name not in reader.tools):
        return False
    arguments = bytes(call.parameters if call.arguments is msgspec.UNSET else call.arguments)
    reader.source.take(length)
    reader.start(call.name)
    _add_decoded(reader, arguments.decode())
    reader.finish()
    return True


class _Call(msgspec.Struct):
    """A call as a JSON object; the arguments are kept as they were written."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw = msgspec.Raw(b"null")


def _add_decoded(reader: CallReader, written: str) -> None:
    """Append a JSON value to the arguments of a call; a string is decoded first. Nothing and null
    are left out.
    """
    decoded = _decode_string(written) if written.startswith('"') else None
    text = written if decoded is None else decoded
    if text.strip() not in ("", "null"):
        reader.add(text)


def read_value(reader: CallReader, ends: Sequence[str] = ()) -> Reading[None]:
    """Read the JSON value that follows, and emit it as the arguments; a string is decoded first.

    A value that is incomplete, or an object interrupted by one of ``ends``, is emitted as it is.
    """
    source = reader.source
    yield from source.skip_space()
    if source.text.startswith('"'):
        scan = JsonScan()
        while (end := scan.find_end(source.text)) is None and not source.is_ended:
            yield
        _add_decoded(reader, source.take(len(source.text) if end is None else end))
        return
    for end in ends:
        if (yield from source.starts_with(end)):
            return
    if not source.text.startswith(("{", "[")):
        return
    scan = JsonScan(ends)
    while True:
        end = scan.find_end(source.text)
        if end is not None:
            reader.add(source.take(end))
            return
        count = len(source.text) if source.is_ended else scan.position
        reader.add(source.take(count))
        scan.position -= count
        if source.is_ended:
            return
        yield


def _skip_members(source: TextSource, ends: Sequence[str]) -> Reading[None]:
    """Skip the remaining members of a JSON object after a value that was read."""
    scan = JsonScan(ends, depth=1)
    while (end := scan.find_end(source.text)) is None and not source.is_ended:
        yield
    # If the object's end never comes, the text belongs to no call: it is left in the source and is
    # sent as ordinary text.
    if end is not None:
        source.take(end)


def _decode_string(written: str) -> str | None:
    try:
        value = parse_json(written, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class JsonScan:
    """A scanner for the end of a JSON object, array or string, which reads no character twice."""

    def __init__(self, ends: Sequence[str] = (), *, depth: int = 0) -> None:
        self.position = 0
        """Number of characters scanned."""
        self._ends = ends
        self._depth = depth
        self._is_text = False
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Return the position where the value or the first end mark ends it; None if it is not
        there yet.

        Args:
            text: text of the last call, with more appended.
        """
        while self.position < len(text):
            char = text[self.position]
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_text = False
                    if self._depth == 0:
                        return self.position + 1
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return self.position + 1
            elif any(end[0] == char for end in self._ends):
                rest = text[self.position :]
                if any(rest.startswith(end) for end in self._ends):
                    return self.position
                if any(end.startswith(rest) for end in self._ends):
                    # The text may be the beginning of an end mark, so wait for more text.
                    return None
            self.position += 1
        return None
