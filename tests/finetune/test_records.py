"""Records of every format, and rows that are left out."""

import json

import pytest

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.finetune.data.records import Message, load_dataset

ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["Hi", "Hello"]]}
WANTED = [("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n1 2"), ("assistant", "3")]


def load_one(folder, name="rows"):
    (conversation,) = load_dataset(name, folder).conversations
    return [(m.role, m.content) for m in conversation.messages]


def describe(folder, **info):
    (folder / "dataset_info.json").write_text(json.dumps({"rows": info}))


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_alpaca_rows(tmp_path, suffix):
    """Instruction and input are one question; history comes first."""
    text = json.dumps([ALPACA] if suffix == "json" else ALPACA)
    (tmp_path / f"rows.{suffix}").write_text(text)
    describe(tmp_path, file_name=f"rows.{suffix}")
    assert load_one(tmp_path) == WANTED


def test_csv_and_parquet(tmp_path):
    """Tables have a record in each row, under the columns that the description names."""
    (tmp_path / "rows.csv").write_text('q,output\n"a, b",c\n')
    describe(tmp_path, file_name="rows.csv", columns={"prompt": "q"})
    assert load_one(tmp_path) == [("user", "a, b"), ("assistant", "c")]
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs the `finetune` extra")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"q": ["x"], "output": ["y"]}), tmp_path / "rows.parquet")
    describe(tmp_path, file_name="rows.parquet", columns={"prompt": "q"})
    assert load_one(tmp_path) == [("user", "x"), ("assistant", "y")]


def test_sharegpt_and_openai_rows(tmp_path):
    """Turns under either naming, with a system message."""
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": turns, "system": "s"}]))
    describe(tmp_path, file_name="a.json", formatting="sharegpt")
    wanted = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert load_one(tmp_path) == wanted
    named = [{"role": role, "content": text} for role, text in wanted]
    (tmp_path / "b.json").write_text(json.dumps([{"messages": named}]))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    tags |= {"assistant_tag": "assistant", "system_tag": "system"}
    columns = {"messages": "messages"}
    describe(tmp_path, file_name="b.json", formatting="sharegpt", columns=columns, tags=tags)
    assert load_one(tmp_path) == wanted
    describe(tmp_path, file_name="b.json", formatting="openai")
    assert load_one(tmp_path) == wanted
    assert load_one(tmp_path, str(tmp_path / "b.json")) == wanted


def test_bad_rows_are_counted_with_their_lines(tmp_path):
    """One bad row does not lose the others, and the reader learns where it is."""
    good = json.dumps({"instruction": "q", "output": "a"})
    lines = [good, "{broken", '{"instruction": "q"}', '{"instruction": 3, "output": "a"}', good]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    records = load_dataset(str(tmp_path / "rows.jsonl"), tmp_path)
    assert len(records.conversations) == 2
    assert [row.line for row in records.bad_rows] == [2, 3, 4]
    assert "output" in records.bad_rows[1].why
    (tmp_path / "rows.json").write_text(f"[\n{good},\n17,\n{good}\n]")
    records = load_dataset(str(tmp_path / "rows.json"), tmp_path)
    assert [(row.line, row.why) for row in records.bad_rows] == [(3, "a int, not an object")]
    assert records.conversations[1].messages[0] == Message("user", "q")


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (["human"], "do not pair"),
        (["human", "human"], "turn 2 is the user's"),
        (["gpt", "human"], "turn 1 is the assistant's"),
        (["human", "robot"], "role 'robot'"),
    ],
)
def test_turns_that_do_not_alternate_are_bad(tmp_path, turns, why):
    """A conversation that a template would garble is left out, and says why."""
    row = {"conversations": [{"from": name, "value": "x"} for name in turns]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=why):
        load_dataset(str(tmp_path / "rows.jsonl"), tmp_path)


def test_wrong_descriptions_are_named(tmp_path):
    """Each error says what to change."""
    with pytest.raises(NotFoundError, match="dataset_dir"):
        load_dataset("rows", tmp_path)
    describe(tmp_path, file_name="rows.json", ranking=True)
    with pytest.raises(UnsupportedError, match="preferences"):
        load_dataset("rows", tmp_path)
    with pytest.raises(NotFoundError, match="which has rows"):
        load_dataset("row", tmp_path)
    describe(tmp_path, file_name="rows.json", columns={"promt": "q"})
    with pytest.raises(ConfigError, match="promt"):
        load_dataset("rows", tmp_path)
    describe(tmp_path, file_name="rows.json")
    (tmp_path / "rows.json").write_text('[{"instruction": "q", "output": "a"},')
    with pytest.raises(CorruptionError, match="cut off"):
        load_dataset("rows", tmp_path)
