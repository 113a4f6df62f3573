"""Training records: reads files in LLaMA-Factory's formats as conversations.

``dataset_info.json`` in a dataset folder names the files with their columns and tags. An invalid
row is left out and recorded with its line; an invalid file or description is an error. Nothing is
downloaded.
"""

import os.path
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.finetune.data.data_files import NotARow, parse_json, read_rows

__all__ = [
    "BadRow",
    "Conversation",
    "Message",
    "Pair",
    "Records",
    "load_dataset",
    "load_pairs",
    "load_texts",
]

WHERE = "finetune.load_dataset"
INFO_NAME = "dataset_info.json"
Role = Literal["system", "user", "assistant"]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation: who says it (the role), and the text."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that begin with one of the user or the system and end with an answer."""

    messages: tuple[Message, ...]

    @property
    def answer(self) -> str:
        """Text of the last message."""
        return self.messages[-1].content


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference: two conversations that differ only in the last answer, of which one was
    chosen.
    """

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row of a dataset that was left out, with its place in the file and the reason."""

    path: str
    line: int
    """Line number of the row, from 1; in parquet the number of the row."""
    why: str


@dataclass(slots=True)
class Records:
    """The result of reading a dataset: its valid rows in order, and the invalid ones."""

    conversations: list[Conversation] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of a dataset's columns, by what they hold; the fields and defaults are
    LLaMA-Factory's.
    """

    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str | None = None
    messages: str = ""
    system: str | None = None
    tools: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None


class Tags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of a dataset's messages: the keys of role and text, and the names of the roles. The
    fields and defaults are LLaMA-Factory's.
    """

    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of LLaMA-Factory's ``dataset_info.json``: the file of a dataset, its format, and
    the names of its columns.
    """

    file_name: str = ""
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    num_samples: Annotated[int, Meta(ge=1)] | None = None
    ranking: bool = False
    columns: dict[str, str] = {}
    tags: dict[str, str] = {}
    split: str = "train"
    subset: str | None = None
    folder: str | None = None
    hf_hub_url: str = ""
    ms_hub_url: str = ""
    om_hub_url: str = ""
    script_url: str = ""
    cloud_file_name: str = ""


def load_dataset(name: str, folder: Path, max_samples: int | None = None) -> Records:
    """Load a dataset by its name in ``folder/dataset_info.json``, or a file by its path.

    Args:
       name: a key of ``dataset_info.json``, or a file of alpaca rows or of rows with ``messages``
           or ``conversations``.
       folder: folder of ``dataset_info.json`` and the files it names.
       max_samples: most rows to read, from the beginning; None reads all.

    Raises:
       NotFoundError: no such dataset or file.
       ConfigError: the description is invalid, or no row is valid; the message gives the reason.
       CorruptionError: the file does not parse.
       UnsupportedError: the dataset is on a hub, or does not consist of text.
    """
    records, rows = _convert_rows(name, folder, max_samples, _convert_row, is_ranking=False)
    records.conversations = rows
    return records


def load_pairs(name: str, folder: Path, max_samples: int | None = None) -> Records:
    """Load a dataset of preferences, which has ``ranking`` in its description; see
    ``load_dataset``.

    A row has a chosen and a rejected answer: texts in alpaca's format, messages in the others.
    """
    records, rows = _convert_rows(name, folder, max_samples, _convert_pair, is_ranking=True)
    records.pairs = rows
    return records


def load_texts(name: str, folder: Path, max_samples: int | None = None) -> Records:
    """Load a dataset of plain texts, whose rows need no answer; see ``load_dataset``.

    The text is the prompt in alpaca's format, and the first message in the others. A file given by
    its path may have the column ``text``.
    """
    records, rows = _convert_rows(name, folder, max_samples, _convert_text, is_ranking=False)
    records.texts = rows
    return records


def _find_info(name: str, folder: Path, *, is_ranking: bool) -> DatasetInfo:
    path = folder / INFO_NAME
    try:
        table = parse_json(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        what = f"cannot read {path}: {error}: set dataset_dir to the folder that holds it"
        raise NotFoundError(WHERE, what, field="dataset_dir") from error
    except ValueError as error:
        raise CorruptionError(WHERE, f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict) or name not in table:
        known = ", ".join(sorted(table)) if isinstance(table, dict) else "nothing"
        what = f"dataset {name!r} is not in {path}, which has {known}"
        raise NotFoundError(WHERE, what, field="dataset")
    try:
        info = msgspec.convert(table[name], DatasetInfo)
        msgspec.convert(info.columns, Columns)
        msgspec.convert(info.tags, Tags)
    except msgspec.ValidationError as error:
        raise ConfigError(WHERE, f"{path}: {name}: {error}", field="dataset") from error
    if info.ranking and not is_ranking:
        what = f"dataset {name!r} holds preferences: choose one of answers, or stage: dpo"
        raise UnsupportedError(WHERE, what, field="dataset")
    if is_ranking and not info.ranking:
        what = f"dataset {name!r} holds no preferences: set ranking: true in {path}, or stage: sft"
        raise UnsupportedError(WHERE, what, field="dataset")
    if not info.file_name:
        what = f"dataset {name!r} names no file_name: download it and name the file"
        raise UnsupportedError(WHERE, what, field="dataset")
    # Symbolic links are followed, since the folder's owner made them; the file name in
    # dataset_info.json may come from anybody, so it must not leave the folder.
    inner = os.path.normpath(info.file_name)
    if os.path.isabs(inner) or inner.split(os.sep)[0] == "..":
        what = f"dataset {name!r}: file_name {info.file_name!r} leads out of {folder}"
        raise ConfigError(WHERE, f"{what}: give the file's path as dataset", field="dataset")
    return info


def _convert_rows(
    name: str,
    folder: Path,
    max_samples: int | None,
    convert: Callable[[Any, DatasetInfo | None], Row],
    *,
    is_ranking: bool,
) -> tuple[Records, list[Row]]:
    path, info = Path(name), None
    if not (path.suffix and path.is_file()):
        info = _find_info(name, folder, is_ranking=is_ranking)
        path = folder / info.file_name
    records, rows = Records(), []
    limits = [n for n in (max_samples, info and info.num_samples) if n is not None]
    for line, row in read_rows(path):
        if limits and len(rows) >= min(limits):
            break
        try:
            rows.append(convert(row, info))
        except _BadRowError as error:
            records.bad_rows.append(BadRow(path.name, line, str(error)))
    if not rows:
        first = (
            f"; line {records.bad_rows[0].line}: {records.bad_rows[0].why}"
            if records.bad_rows
            else ": the file is empty"
        )
        raise ConfigError(WHERE, f"dataset {name!r} has no usable row{first}", field="dataset")
    return records, rows


class _BadRowError(Exception):
    """Raised within this module for a row that will be left out; its text is the reason."""


def _convert_row(row: Any, info: DatasetInfo | None) -> Conversation:
    row, info = _check_row(row, info)
    if info.formatting == "alpaca":
        columns = msgspec.convert(info.columns, Columns)
        messages = _read_alpaca(row, columns)
        messages.append(Message("assistant", _text(row, columns.response, is_needed=True)))
    else:
        messages = _read_turns(row, info)
    _check_turns(messages)
    return Conversation(tuple(messages))


def _convert_pair(row: Any, info: DatasetInfo | None) -> Pair:
    row, info = _check_row(row, info)
    columns = msgspec.convert(info.columns, Columns)
    if info.formatting == "alpaca":
        messages = _read_alpaca(row, columns)
    else:
        messages = _read_turns(row, info)
    made: list[Conversation] = []
    for key in (columns.chosen or "chosen", columns.rejected or "rejected"):
        if info.formatting == "alpaca":
            answer = Message("assistant", _text(row, key, is_needed=True))
        elif isinstance(row.get(key), dict):
            answer = _read_turn(row[key], _find_tags(info))
        else:
            raise _BadRowError(f"{key!r} is no turn" if row.get(key) else f"no {key!r}")
        turns = [*messages, answer]
        _check_turns(turns)
        made.append(Conversation(tuple(turns)))
    chosen, rejected = made
    if chosen.answer.strip() == rejected.answer.strip():
        raise _BadRowError("chosen and rejected are equal")
    return Pair(chosen, rejected)


def _convert_text(row: Any, info: DatasetInfo | None) -> str:
    row, found = _check_row(row, info)
    if info is None and "text" in row:
        found = DatasetInfo(columns={"prompt": "text"})
    if found.formatting == "alpaca":
        columns = msgspec.convert(found.columns, Columns)
        parts = [_text(row, columns.prompt, is_needed=True), _text(row, columns.query)]
        text = "\n".join(part for part in parts if part)
    else:
        turns = [m for m in _read_turns(row, found) if m.role != "system"]
        text = turns[0].content if turns else ""
    if not text.strip():
        raise _BadRowError("no text")
    return text


def _check_row(row: Any, info: DatasetInfo | None) -> tuple[dict[str, Any], DatasetInfo]:
    if isinstance(row, NotARow):
        raise _BadRowError(row.why)
    if not isinstance(row, dict):
        raise _BadRowError(f"a {type(row).__name__}, not an object")
    return row, _guess_info(row) if info is None else info


def _guess_info(row: dict[str, Any]) -> DatasetInfo:
    if "messages" in row:
        return DatasetInfo(formatting="openai")
    return DatasetInfo(formatting="sharegpt" if "conversations" in row else "alpaca")


def _text(row: dict[str, Any], key: str | None, *, is_needed: bool = False) -> str:
    value = None if key is None else row.get(key)
    if value is None:
        if is_needed:
            raise _BadRowError(f"no {key!r}")
        return ""
    if not isinstance(value, str):
        raise _BadRowError(f"{key!r} is a {type(value).__name__}, not text")
    if not _is_unicode(value):
        raise _BadRowError(f"{key!r} is not Unicode text")
    return value


def _is_unicode(text: str) -> bool:
    """Return False if a text has an unpaired surrogate, which JSON can represent and
    UTF-8 cannot.
    """
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _read_alpaca(row: dict[str, Any], columns: Columns) -> list[Message]:
    messages: list[Message] = []
    if system := _text(row, columns.system or "system"):
        messages.append(Message("system", system))
    history = row.get(columns.history or "history") or []
    for pair in history if isinstance(history, list) else [history]:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise _BadRowError("history is not a list of [question, answer]")
        if not all(_is_unicode(text) for text in pair):
            raise _BadRowError("history is not Unicode text")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    parts = [_text(row, columns.prompt, is_needed=True), _text(row, columns.query)]
    messages.append(Message("user", "\n".join(part for part in parts if part)))
    return messages


def _read_turns(row: dict[str, Any], info: DatasetInfo) -> list[Message]:
    columns, tags = msgspec.convert(info.columns, Columns), _find_tags(info)
    key = columns.messages or ("messages" if info.formatting == "openai" else "conversations")
    turns = row.get(key)
    if not isinstance(turns, list):
        raise _BadRowError(f"no list {key!r}")
    if columns.tools is not None and row.get(columns.tools):
        raise _BadRowError("it offers tools, which are not learned")
    messages: list[Message] = []
    if system := _text(row, columns.system or "system"):
        messages.append(Message("system", system))
    return messages + [_read_turn(turn, tags) for turn in turns]


def _find_tags(info: DatasetInfo) -> Tags:
    if info.formatting != "openai":
        return msgspec.convert(info.tags, Tags)
    openai = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    openai |= {"assistant_tag": "assistant", "observation_tag": "tool"}
    return msgspec.convert({**openai, **info.tags}, Tags)


def _read_turn(turn: Any, tags: Tags) -> Message:
    if not isinstance(turn, dict):
        raise _BadRowError(f"a turn is a {type(turn).__name__}, not an object")
    roles: dict[str, Role] = {
        tags.user_tag: "user",
        tags.assistant_tag: "assistant",
        tags.system_tag: "system",
    }
    name = _text(turn, tags.role_tag, is_needed=True)
    if name not in roles:
        raise _BadRowError(f"role {name!r}: turns are {', '.join(roles)}")
    return Message(roles[name], _text(turn, tags.content_tag, is_needed=True))


def _check_turns(messages: list[Message]) -> None:
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns or len(turns) % 2:
        raise _BadRowError(f"{len(turns)} turns: questions and answers do not pair")
    for i, message in enumerate(turns):
        if message.role != ("assistant" if i % 2 else "user"):
            raise _BadRowError(f"turn {i + 1} is the {message.role}'s")
        if not message.content.strip():
            raise _BadRowError(f"turn {i + 1} is empty")
