"""Goal: no data file, however odd, ends in a traceback or is learned as something else.

Method: each file is read; it either gives its rows, or bad rows with their lines, or an error of
ours that names the file and, where there is one, the line.
"""

import json

import pytest

from quick import rest_slow
from tandem.core.errors import ConfigError, CorruptionError, NotFoundError
from tandem.finetune.data.records import load_dataset

GOOD = {"instruction": "q", "output": "a"}
LINE = json.dumps(GOOD).encode()
SUFFIXES = ["json", "jsonl", "csv"]


def read(folder, name, content):
    """Return (usable rows, [(line, why)]) of a file of these bytes."""
    (folder / name).write_bytes(content)
    records = load_dataset(str(folder / name), folder)
    return records.conversations, [(row.line, row.why) for row in records.bad_rows]


def make_file(suffix, *, end=b"\n"):
    if suffix == "csv":
        return end.join([b"instruction,output", b"q,a", b"q,a", b""])
    if suffix == "jsonl":
        return end.join([LINE, LINE, b""])
    return end.join([b"[", LINE + b",", LINE, b"]", b""])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_marks_and_line_ends_change_nothing(start, end, suffix, tmp_path):
    """A byte order mark at the start, and Windows's line ends."""
    rows, bad = read(tmp_path, f"rows.{suffix}", start + make_file(suffix, end=end))
    assert [[m.content for m in row.messages] for row in rows] == [["q", "a"]] * 2
    assert not bad


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_told(content, suffix, tmp_path):
    """Not as a dataset without good rows, but as what it is."""
    with pytest.raises(ConfigError, match=r"no usable row.*empty"):
        read(tmp_path, f"rows.{suffix}", content)


@pytest.mark.parametrize("suffix", rest_slow(["csv", "json"], SUFFIXES))
def test_a_row_of_ten_megabytes_is_read(suffix, tmp_path):
    """csv's own limit of a field is 128 KiB."""
    text = "word " * (2 << 20)
    if suffix == "csv":
        content = f'instruction,output\nq,"{text}"\n'.encode()
    else:
        content = json.dumps({**GOOD, "output": text}).encode()
        content = b"[" + content + b"]" if suffix == "json" else content
    (row,), bad = read(tmp_path, f"rows.{suffix}", content)
    assert row.answer == text
    assert not bad


def test_nul_bytes(tmp_path):
    """In JSON they are no characters of a string; in csv they are text."""
    broken = LINE.replace(b'"q"', b'"q\0"')
    rows, bad = read(tmp_path, "rows.jsonl", b"\n".join([LINE, broken, LINE]))
    assert len(rows) == 2
    assert bad[0][0] == 2
    with pytest.raises(CorruptionError, match=r"rows\.json, line 3"):
        read(tmp_path, "rows.json", b"[\n" + LINE + b",\n" + broken + b"]")
    with pytest.raises((ConfigError, CorruptionError), match=r"line 1"):
        read(tmp_path, "zeros.jsonl", b"\0" * 4096)
    rows, bad = read(tmp_path, "rows.csv", b"instruction,output\nq,a\0b\n")
    assert rows[0].answer == "a\0b"


@pytest.mark.parametrize("odd", ["é".encode("latin-1"), "你好".encode("gbk"), b"\xff\xfe"])
def test_mixed_encodings_have_their_line(odd, tmp_path):
    """Other lines of JSON lines are used; a file that is one text is refused."""
    broken = LINE.replace(b'"q"', b'"q' + odd + b'"')
    rows, bad = read(tmp_path, "rows.jsonl", b"\n".join([LINE, broken, LINE]))
    assert len(rows) == 2
    assert bad[0][0] == 2
    assert "UTF-8" in bad[0][1]
    with pytest.raises(CorruptionError, match=r"rows\.json, line 3: not UTF-8"):
        read(tmp_path, "rows.json", b"[\n" + LINE + b",\n" + broken + b"]")
    with pytest.raises(CorruptionError, match=r"rows\.csv, line 3: not UTF-8"):
        read(tmp_path, "rows.csv", b"instruction,output\nq,a\nq" + odd + b",a\n")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_utf_16_is_refused(suffix, tmp_path):
    """With what to do."""
    content = make_file(suffix).decode().encode("utf-16")
    with pytest.raises((ConfigError, CorruptionError), match=r"line 1.*UTF-8"):
        read(tmp_path, f"rows.{suffix}", content)


@pytest.mark.parametrize("value", [7, {"a": [1]}, [["q"]], True, 1e400])
@pytest.mark.parametrize("key", ["instruction", "input", "output", "system", "history"])
def test_values_of_another_type_are_bad_rows(key, value, tmp_path):
    """Nested JSON where text is expected, and a history that is no list of pairs."""
    rows, bad = read(tmp_path, "rows.json", json.dumps([GOOD, {**GOOD, key: value}]).encode())
    assert len(rows) == 1
    assert [line for line, _ in bad] == [1]
    assert key in bad[0][1]


@pytest.mark.parametrize("turns", [7, {"from": "human"}, [[]], [{"from": 1, "value": "x"}], ["x"]])
def test_turns_of_another_type_are_bad_rows(turns, tmp_path):
    """The same for conversations."""
    content = b"\n".join([LINE, json.dumps({"conversations": turns}).encode()])
    rows, bad = read(tmp_path, "rows.jsonl", content)
    assert (len(rows), [line for line, _ in bad]) == (1, [2])


def test_text_that_no_encoding_has(tmp_path):
    r"""Half of a surrogate pair, which JSON can spell."""
    broken = LINE.replace(b'"q"', rb'"\ud800"')
    rows, bad = read(tmp_path, "rows.jsonl", b"\n".join([LINE, broken]))
    assert len(rows) == 1
    assert bad[0] == (2, "'instruction' is not Unicode text")
    for pair in (["\ud800", "a"], ["q", "\udfff"]):
        content = json.dumps([GOOD, {**GOOD, "history": [["q", "a"], pair]}]).encode()
        assert read(tmp_path, "rows.json", content)[1] == [(1, "history is not Unicode text")]


def test_keys_that_are_there_twice(tmp_path):
    """Which one is meant is not guessed."""
    broken = b'{"instruction": "q", "output": "a", "output": "b"}'
    rows, bad = read(tmp_path, "rows.jsonl", b"\n".join([LINE, broken]))
    assert (len(rows), bad) == (1, [(2, "not JSON: 'output' is there twice")])
    with pytest.raises(CorruptionError, match=r"rows\.json, line 2.*'output' is there twice"):
        read(tmp_path, "rows.json", b"[" + LINE + b",\n" + broken + b"]")
    with pytest.raises(CorruptionError, match=r"rows\.csv, line 1: 'output' is there twice"):
        read(tmp_path, "rows.csv", b"instruction,output,output\nq,a,b\n")
    (tmp_path / "dataset_info.json").write_text(
        '{"rows": {"file_name": "a.json"}, "rows": {"file_name": "b.json"}}'
    )
    with pytest.raises(CorruptionError, match="'rows' is there twice"):
        load_dataset("rows", tmp_path)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_deep_nesting_is_no_crash(suffix, tmp_path):
    """Python's parser gives up with an error of its own kind."""
    deep = b"[" * 100_000
    with pytest.raises((ConfigError, CorruptionError), match=r"line 1"):
        read(tmp_path, f"rows.{suffix}", deep)
    (tmp_path / "dataset_info.json").write_bytes(deep)
    with pytest.raises(CorruptionError, match=r"dataset_info\.json"):
        load_dataset("rows", tmp_path)


def test_what_follows_the_list_is_not_lost(tmp_path):
    """Two lists in one file, as from a program that appends."""
    with pytest.raises(CorruptionError, match=r"rows\.json, line 2.*after the list"):
        read(tmp_path, "rows.json", b"[" + LINE + b"]\n[" + LINE + b"]")


def test_ragged_rows_of_csv(tmp_path):
    """Too few columns or too many; and a quote that has no end."""
    text = b"instruction,output\nq,a\nq\nq,a,b\nq,a\n"
    rows, bad = read(tmp_path, "rows.csv", text)
    assert len(rows) == 2
    assert bad == [(3, "1 columns, the head has 2"), (4, "3 columns, the head has 2")]
    with pytest.raises((ConfigError, CorruptionError), match="line 2"):
        read(tmp_path, "rows.csv", b'instruction,output\nq,"a\nq,a\n')


def test_lines_of_quoted_text(tmp_path):
    """A row of several lines is where it begins."""
    text = b'instruction,output\n"q\nq",a\nq\n\n\n"q\nq"\n'
    _, bad = read(tmp_path, "rows.csv", text)
    assert [line for line, _ in bad] == [4, 7]


def test_parquet_of_other_types(tmp_path):
    """Numbers, bytes, lists and nothing are bad rows; a broken file is an error."""
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the `finetune` extra")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    for values in ([1], [b"x"], [["x"]], [{"x": 1}], [None], [1.5]):
        parquet.write_table(pyarrow.table({"instruction": ["q"], "output": values}), path)
        with pytest.raises(ConfigError, match=r"line 1: .*'output'"):
            load_dataset(str(path), tmp_path)
    broken = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"instruction": broken, "output": ["a"]}), path)
    with pytest.raises(CorruptionError, match=r"rows\.parquet"):
        load_dataset(str(path), tmp_path)
    far = pyarrow.array([2**30], pyarrow.date32())
    parquet.write_table(pyarrow.table({"instruction": ["q"], "output": ["a"], "at": far}), path)
    with pytest.raises(CorruptionError, match=r"rows\.parquet"):
        load_dataset(str(path), tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:8] + b"\0" * 50 + whole[58:]):
        with pytest.raises((CorruptionError, ConfigError), match=r"rows\.parquet"):
            read(tmp_path, "rows.parquet", content)


@pytest.mark.parametrize("name", ["../rows.json", "a/../../rows.json", "/etc/rows.json"])
def test_paths_that_leave_the_folder_are_refused(name, tmp_path):
    """A dataset folder from elsewhere names its own files."""
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "rows.json").write_bytes(b"[" + LINE + b"]")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": name}}))
    with pytest.raises(ConfigError, match="leads out of"):
        load_dataset("rows", folder)


def test_what_is_no_file(tmp_path):
    """A folder, and a name with a NUL."""
    (tmp_path / "rows.json").mkdir()
    for name in ("rows.json", "ro\0ws.json"):
        (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": name}}))
        with pytest.raises((NotFoundError, ConfigError), match=r"rows|ro"):
            load_dataset("rows", tmp_path)


def test_counts_below_one_are_refused(tmp_path):
    """They would leave no row."""
    (tmp_path / "rows.json").write_bytes(b"[" + LINE + b"]")
    info = {"rows": {"file_name": "rows.json", "num_samples": -1}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="num_samples"):
        load_dataset("rows", tmp_path)


def test_objects_over_several_lines_are_rows(tmp_path):
    pretty = json.dumps(GOOD, indent=2).encode()
    for start in (b"", b"\xef\xbb\xbf\n "):
        rows, bad = read(tmp_path, "rows.json", start + pretty + b"\n\n" + pretty + b"\n")
        assert ([len(row.messages) for row in rows], bad) == ([2, 2], [])
    with pytest.raises(CorruptionError, match=r"rows\.json, line 5: not JSON"):
        read(tmp_path, "rows.json", pretty + b"\nx")
