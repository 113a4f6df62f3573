"""Reads rows of data files (json, jsonl, csv, parquet) with their line numbers.

An invalid row is yielded as such; an invalid file ends the reading with an error. Nothing is
repaired: a row with a duplicate key is invalid, and text must be UTF-8.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import CorruptionError, NotFoundError, UnsupportedError

__all__ = ["NotARow", "parse_json", "read_rows"]

WHERE = "finetune.load_dataset"
MAX_FIELD_CHARS = 1 << 30
"""Most characters of a csv field; Python's default limit is 128 KiB."""
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")


@dataclass(frozen=True, slots=True)
class NotARow:
    """The item that ``read_rows`` yields for a line that is no row, with the reason."""

    why: str


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of a json, jsonl, csv or parquet file, or a ``NotARow``.

    Raises: NotFoundError (the file cannot be read); CorruptionError (the file as a whole does not
        parse); UnsupportedError (another kind of file).
    """
    readers = {
        ".json": _read_json,
        ".jsonl": _read_json_lines,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        what = f"{path}: convert it to json, jsonl, csv or parquet"
        raise UnsupportedError(WHERE, what, field="dataset")
    if not path.is_file():
        raise NotFoundError(WHERE, f"no file {path}", field="dataset")
    try:
        yield from reader(path)
    except OSError as error:
        raise NotFoundError(WHERE, f"cannot read {path}: {error}", field="dataset") from error


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises: ValueError (it is not JSON, nests too deeply, or an object has a duplicate key).
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError(f"{_find_twice([key for key, _ in pairs])!r} is there twice")
    return made


def _find_twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def _read_text(path: Path) -> str:
    """Return a file's text.

    Raises: CorruptionError (names the line that is not UTF-8).
    """
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"{path}, line {line}: not UTF-8: {error.reason}: convert the file to UTF-8"
        raise CorruptionError(WHERE, what) from error


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    start = path.read_bytes()[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith(b"["):
        # Some data sets name files of JSON lines `.json`, or write one object after the other over
        # several lines.
        with path.open("rb") as lines:
            first = next(lines).removeprefix(b"\xef\xbb\xbf")
        is_begun = start.startswith(b"{") and not first.rstrip().endswith(b"}")
        yield from (_read_json_objects if is_begun else _read_json_lines)(path)
        return
    text, line, at = _read_text(path), 1, 0
    position = _SPACE.match(text).end() + 1  # type: ignore[union-attr] - it matches nothing too
    while (end := _BETWEEN.match(text, position).end()) < len(text) and text[end] != "]":  # type: ignore[union-attr]
        line += text.count("\n", at, end)
        at = end
        try:
            row, position = _DECODER.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(WHERE, f"{path}, line {line}: not JSON: {error}") from error
        yield line, row
    line += text.count("\n", at, end)
    if end >= len(text) and text.strip():
        what = f"{path}, line {line}: the list has no end: the file is cut off"
        raise CorruptionError(WHERE, what)
    if (more := _SPACE.match(text, end + 1).end()) < len(text):  # type: ignore[union-attr]
        line += text.count("\n", end, more)
        what = f"{path}, line {line}: more after the list: write one list, or JSON lines"
        raise CorruptionError(WHERE, what)


def _read_json_objects(path: Path) -> Iterator[tuple[int, Any]]:
    text, line, at = _read_text(path), 1, 0
    position = _SPACE.match(text).end()  # type: ignore[union-attr] - it matches nothing too
    while position < len(text):
        line += text.count("\n", at, position)
        at = position
        try:
            row, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise CorruptionError(WHERE, f"{path}, line {line}: not JSON: {error}") from error
        yield line, row
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            try:
                yield number, parse_json(content.decode())
            except UnicodeDecodeError as error:
                yield number, NotARow(f"not UTF-8: {error.reason}")
            except ValueError as error:
                yield number, NotARow(f"not JSON: {error}")


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    lines = _LineCounter(_read_text(path))
    reader = csv.reader(lines, strict=True)
    names: list[str] = []
    try:
        for fields in reader:
            line = lines.begin_row()
            if not fields:
                continue
            if not names:
                names = fields
                if len(set(names)) < len(names):
                    what = f"{path}, line {line}: {_find_twice(names)!r} is there twice"
                    raise CorruptionError(WHERE, what)
            elif len(fields) != len(names):
                yield line, NotARow(f"{len(fields)} columns, the head has {len(names)}")
            else:
                yield line, dict(zip(names, fields, strict=True))
    except csv.Error as error:
        raise CorruptionError(WHERE, f"{path}, line {lines.begin_row()}: {error}") from error


class _LineCounter:
    """Counts the lines of a text as it is read, and remembers where the current row began."""

    def __init__(self, text: str) -> None:
        self._lines = io.StringIO(text, newline="")
        self._read = 0
        self._rows_end = 0

    def __iter__(self) -> "_LineCounter":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._read += 1
        return line

    def begin_row(self) -> int:
        """Return the number of the first line of the row just read; call it once per row."""
        first = self._rows_end + 1
        self._rows_end = self._read
        return first


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    # Values that Python's types cannot hold raise OverflowError or ValueError, not pyarrow's own
    # errors.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise CorruptionError(WHERE, f"{path}: not parquet that can be read: {error}") from error
    yield from enumerate(rows, 1)
