"""Goal: a trace of another program is read right, or refused with the line that is wrong."""

import json

import pytest

from each import each
from tandem.core.errors import ConfigError
from tandem.core.loads.traces import read_rows


def write(path, *rows):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [
        row if isinstance(row, str) else json.dumps(dict(zip(names, row, strict=True)))
        for row in rows
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_ids_of_any_size_are_numbered_by_first_appearance(tmp_path):
    """Simulated tokens are made of the ids, and have 31 bits."""
    path = write(
        tmp_path / "trace", (0, 600, 1, [1 << 70, 7]), "", " \t", (0, 1024, 1, [1 << 70, 1 << 31])
    )
    assert [row.hash_ids for row in read_rows(path)] == [[0, 1], [0, 2]]


@each(
    ("rows", "expected"),
    [
        ([(5, 1, 1, [0]), (4, 1, 1, [1])], "line 2.*timestamp 4 is before 5"),
        ([(0, 1, 1, [0]), (0, 10**12, 1, [0])], "line 2"),
        ([(0, 1, 1, [0]), (0, 1, 10**12, [1])], "line 2"),
        ([(0, 512, 1, [0, 1])], "line 1.*2 hash ids for 512 tokens"),
        ([(0, 513, 1, [0])], "line 1.*1 hash ids for 513 tokens"),
        ([(0, 1024, 1, [3, 3])], "line 1.*hash id 3 follows another"),
        ([(0, 1024, 1, [3, 4]), (0, 1024, 1, [5, 4])], "line 2.*hash id 4 follows another"),
        ([(0, 1, 1, [-1])], "line 1"),
        ([], "no requests"),
        (["", "\r"], "no requests"),
        (["\x00"], "line 1"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_line(tmp_path, rows, expected):
    with pytest.raises(ConfigError, match=expected):
        list(read_rows(write(tmp_path / "trace", *rows)))
