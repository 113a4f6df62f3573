"""Parsing of Gemma 4's tool calls, whose arguments are almost JSON."""

import json

from tandem.server.outputs.call_reader import CallReader
from tandem.server.outputs.parameters import write_json_value
from tandem.server.outputs.source import Reading

__all__ = ["read_gemma_call"]

_QUOTE = '<|"|>'
_OPEN = "<|tool_call>"
_CLOSE = "<tool_call|>"
_DEEPEST = 64


def read_gemma_call(reader: CallReader) -> Reading[bool]:
    """Read ``call:NAME{key:<|"|>text<|"|>,n:1}`` and its end mark; return False if it is something
    else.
    """
    source = reader.source
    if not (yield from source.starts_with("call:")):
        return False
    source.take(len("call:"))
    name, mark = yield from source.collect_until(("{", _CLOSE))
    if mark != "{" or not name.strip():
        return False
    reader.start(name.strip())
    written, mark = yield from _collect(reader)
    text = "{" + written
    is_whole = mark is not None or not source.is_cut
    try:
        value = _Value(text, reader).read_all() if is_whole else text
    except (ValueError, IndexError):
        value = text
    # Arguments that cannot be read as Gemma's values, or that were cut off, are passed on as they
    # were written.
    reader.add(value)
    if mark is not None and mark != _CLOSE:
        source.give_back(mark)
    return True


def _collect(reader: CallReader) -> Reading[tuple[str, str | None]]:
    """Read the text before the mark that ends the call, and that mark; a mark inside quotes does
    not end the call. The mark is None if the text ended before one.
    """
    parts: list[str] = []
    while True:
        mark = yield from reader.source.read_until((_QUOTE, _CLOSE, _OPEN), parts.append)
        if mark != _QUOTE:
            return "".join(parts), mark
        parts.append(_QUOTE)
        text, mark = yield from reader.source.collect_until((_QUOTE,))
        parts.append(text)
        if mark is None:
            return "".join(parts), None
        parts.append(_QUOTE)


class _Value:
    """A converter of a call's arguments to JSON, which keeps numbers as they were written. Raises
    ValueError or IndexError if the text is no object in Gemma's form.
    """

    def __init__(self, text: str, reader: CallReader) -> None:
        self._text = text
        self._at = 0
        self._reader = reader

    def read_all(self) -> str:
        value = self._read_object(0)
        if self._text[self._at :].strip():
            raise ValueError("text after the value")
        return value

    def _read(self, depth: int, kinds: frozenset[str] | None = None) -> str | None:
        """Return the JSON of the value that follows; None if nothing is written there."""
        if depth > _DEEPEST:
            raise ValueError("nested too deep")
        self._skip()
        if self._text.startswith(_QUOTE, self._at):
            return _write(self._read_quoted())
        if self._text[self._at] == "{":
            return self._read_object(depth)
        if self._text[self._at] == "[":
            return self._read_list(depth)
        if self._text[self._at] == '"':
            return _write(self._read_json())
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in ",}]":
            self._at += 1
        return write_json_value(self._text[begin : self._at].strip(), kinds, is_json=True)

    def _read_quoted(self) -> str:
        begin = self._at + len(_QUOTE)
        end = self._text.index(_QUOTE, begin)
        self._at = end + len(_QUOTE)
        return self._text[begin:end]

    def _read_json(self) -> object:
        value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        return value

    def _read_object(self, depth: int) -> str:
        found: list[str] = []
        self._at += 1
        self._skip()
        while self._text[self._at] != "}":
            if self._text.startswith(_QUOTE, self._at):
                key: object = self._read_quoted()
                self._skip()
            elif self._text[self._at] == '"':
                key = self._read_json()
                self._skip()
            else:
                end = self._text.index(":", self._at)
                key, self._at = self._text[self._at : end].strip(), end
            if self._text[self._at] != ":":
                raise ValueError("a key without a value")
            self._at += 1
            # The tool's schema tells the types of the arguments themselves.
            kinds = None if depth else self._reader.find_kinds(str(key))
            value = self._read(depth + 1, kinds)
            if value is not None:
                found.append(f"{_write(key)}: {value}")
            self._skip_comma()
        self._at += 1
        return "{" + ", ".join(found) + "}"

    def _read_list(self, depth: int) -> str:
        found: list[str] = []
        self._at += 1
        self._skip()
        while self._text[self._at] != "]":
            value = self._read(depth + 1)
            found.append("null" if value is None else value)
            self._skip_comma()
        self._at += 1
        return "[" + ", ".join(found) + "]"

    def _skip(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1

    def _skip_comma(self) -> None:
        self._skip()
        if self._text[self._at] == ",":
            self._at += 1
            self._skip()


def _write(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
