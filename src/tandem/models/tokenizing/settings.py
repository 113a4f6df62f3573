"""The files beside a checkpoint's ``tokenizer.json``: special tokens by role, and chat templates.

What transformers reads, in its precedence: ``tokenizer_config.json``; ``special_tokens_map.json``
if the former does not list the added tokens; ``chat_template.jinja`` and the folder
``additional_chat_templates``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.errors import ConfigError

__all__ = ["DEFAULT_TEMPLATE", "TOOL_TEMPLATE", "TokenizerSettings", "find_end_id", "read_settings"]

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""Names of chat templates: for conversations, and for those with tools."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The content of the files beside ``tokenizer.json``."""

    raw: dict[str, Any]
    """Content of ``tokenizer_config.json``; empty if there is none."""
    special_tokens: dict[str, str]
    """Texts of special tokens by role, such as ``{"eos_token": "</s>"}``."""
    templates: dict[str, str]
    """Chat templates by name; ``DEFAULT_TEMPLATE`` is the one of a checkpoint with one."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files beside a folder's ``tokenizer.json``.

    Raises:
        ConfigError: a file is not a JSON object, or cannot be read.
    """
    raw = _read_json(folder / "tokenizer_config.json")
    named = dict(raw)
    if "added_tokens_decoder" not in raw:
        named |= _read_json(folder / "special_tokens_map.json")
    special = {name: _token_text(value) for name, value in named.items() if _is_token(name)}
    return TokenizerSettings(
        raw,
        {name: text for name, text in special.items() if text},
        _read_templates(folder, raw.get("chat_template")),
    )


def find_end_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's end token; None if the folder's files name none.

    Raises:
        ConfigError: as for ``read_settings``.
    """
    settings = read_settings(folder)
    end = settings.special_tokens.get("eos_token")
    if end is None:
        return None
    listed = settings.raw.get("added_tokens_decoder")
    if isinstance(listed, dict):
        ids = [key for key, token in listed.items() if _token_text(token) == end]
        return int(ids[0]) if ids and ids[0].isdecimal() else None
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        # Skips the vocabulary, which is nearly all of the file.
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError("tokenizer.load", f"{path} cannot be read: {error}") from error
    return next((token.id for token in file.added_tokens if token.content == end), None)


def _read_templates(folder: Path, stated: object) -> dict[str, str]:
    entries: list[Any] = stated if isinstance(stated, list) else []
    if isinstance(stated, str):
        entries = [{"name": DEFAULT_TEMPLATE, "template": stated}]
    found = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    paths = {path.stem: path for path in files}
    if (folder / "chat_template.jinja").exists():
        paths[DEFAULT_TEMPLATE] = folder / "chat_template.jinja"
    try:
        return found | {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except (OSError, ValueError) as error:
        what = f"a chat template of {folder} cannot be read: {error}"
        raise ConfigError("tokenizer.load", what) from error


def _is_token(name: str) -> bool:
    return name.endswith("_token") and not name.startswith("add_")


def _token_text(value: object) -> str:
    """Return a special token's text, which files store as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tokenizer.load", f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("tokenizer.load", f"{path} is not a JSON object")
    return document
