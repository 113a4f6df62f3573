"""Grammars of answers: read from the fields of requests, checked, and passed to the instances.

Each grammar is compiled once here, so that its client is told of errors. The instances compile it
again, with the same vocabulary and limits. All functions block: call them on the server's threads.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from tandem.core.errors import ConfigError
from tandem.core.wire import InstanceInfo
from tandem.models.tokenizing.grammars import (
    TokenTable,
    find_fault,
    make_token_table,
    write_grammar,
)
from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.tokenizer import Tokenizer

__all__ = ["GrammarChecks", "ResponseForm", "join_grammars", "read_grammar", "write_literal"]

_MAX_KNOWN = 256
"""Number of grammars for which it is remembered whether they compile."""


class GrammarChecks:
    """The check that grammars compile with the vocabulary of the served model.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._table: TokenTable | None = None
        self._known: OrderedDict[str, str] = OrderedDict()

    def check(self, grammar: str, info: InstanceInfo, field: str) -> None:
        """Check that a grammar compiles.

        Args:
            grammar: a result of ``write_grammar``.
            info: facts about the model.
            field: field of the request that has the grammar, for errors.

        Raises:
            ConfigError: it does not compile; with llguidance's message.
        """
        with self._lock:
            if self._table is None:
                self._table = make_token_table(self._tokenizer, info.vocab_size, info.eos_token_ids)
            table, fault = self._table, self._known.get(grammar)
        if fault is None:
            fault = find_fault(table, grammar)
            with self._lock:
                self._known[grammar] = fault
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if fault:
            raise ConfigError("server.check_grammar", f"{field}: {fault[:2000]}", field=field)


class ResponseForm(Protocol):
    """The part of OpenAI's ``response_format`` that is read here."""

    type: str
    json_schema: Any


_KINDS = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "json": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Kind of grammar by field name; vLLM's names have "guided", SGLang's do not."""


def read_grammar(
    source: object, form: ResponseForm | None = None, prefix: str = ""
) -> tuple[str, str]:
    """Return the grammar that a request asks for, and the field that has it; both empty if none.

    Args:
        source: object with some of the fields in ``_KINDS``, and perhaps ``structured_outputs``.
        form: ``response_format``, if the API has it.
        prefix: path of ``source`` in the body, for errors.

    Raises:
        ConfigError: more than one grammar, or one that cannot be read.
    """
    asked: dict[str, tuple[str, Any]] = {}
    for name, kind in _KINDS.items():
        value = getattr(source, name, None)
        if value is not None and value != "":
            asked[f"{prefix}{name}"] = kind, value
    for name, value in (getattr(source, "structured_outputs", None) or {}).items():
        field = f"{prefix}structured_outputs.{name}"
        if name == "json_object" and value is True:
            asked[field] = "json_schema", {"type": "object"}
        elif value is not None and name in _KINDS:
            asked[field] = _KINDS[name], value
        elif value not in (None, False):
            raise ConfigError("server.read_grammar", f"{field} is not known", field=field)
    if form is not None and form.type != "text":
        asked["response_format"] = "json_schema", _read_form(form)
    if len(asked) > 1:
        fields = ", ".join(asked)
        raise ConfigError(
            "server.read_grammar", f"{fields} exclude each other", field=next(iter(asked))
        )
    for field, (kind, value) in asked.items():
        return _write(kind, value, field), field
    return "", ""


def _read_form(form: ResponseForm) -> Any:
    if form.type == "json_object":
        return {"type": "object"}
    if form.type == "json_schema":
        given = form.json_schema
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if schema is None:
            field = "response_format.json_schema.schema"
            raise ConfigError("server.read_grammar", f"{field} is missing", field=field)
        return schema
    raise ConfigError(
        "server.read_grammar",
        f"response_format.type is {form.type[:100]!r}: use text, json_object or json_schema",
        field="response_format",
    )


def _write(kind: str, value: Any, field: str) -> str:
    if kind in ("json_schema", "choice") and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise ConfigError("server.read_grammar", f"{field} is not a text", field=field)
    try:
        return write_grammar(kind, value)
    except ValueError as error:
        raise ConfigError("server.read_grammar", f"{field}: {error}", field=field) from error


def join_grammars(rules: str, **parts: str) -> str:
    """Return one grammar made of rules and of the grammars that the rules refer to.

    Args:
        rules: rules in Lark, whose ``start`` refers to the parts by ``@NAME``.
        parts: grammars by name; each a result of ``write_grammar``, or Lark.
    """
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": rules}]
    for name, grammar in parts.items():
        is_lark = not grammar.lstrip().startswith("{")
        inner = [{"lark_grammar": grammar}] if is_lark else parse_json(grammar)["grammars"]
        first, *others = inner
        grammars += [first | {"name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def write_literal(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as a sequence of Lark terminals, with special tokens in it written by their
    ids.

    A grammar over bytes does not match a special token, even if the text looks the same.
    """
    parts: list[str] = []
    for piece, token_id in tokenizer.split_special(text):
        parts.append(f"<[{token_id}]>" if token_id is not None else _quote(piece))
    return " ".join(parts)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
