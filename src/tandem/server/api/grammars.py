"""Grammars of answers: read from the fields of requests, checked, and passed to the instances.

Each grammar is compiled once here, in a process with limits of time and memory, so that its client
is told of errors. The instances compile it again, with the same vocabulary and limits. All
functions block, except ``GrammarCompiler.plan``: call them on the server's threads. With ``plan``
those threads do not wait for the processes, which would keep other clients' texts waiting.
"""

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

import tandem.server.text
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import ConfigError, DeadlineError, PeerLostError
from tandem.core.wire import InstanceInfo
from tandem.models.tokenizing.grammars import list_vocabulary
from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.text.bounded_process import BoundedProcesses
from tandem.server.text.work_threads import WorkThreads

__all__ = ["GrammarCompiler", "ResponseForm", "join_grammars", "read_grammar", "write_literal"]

_WORKER = Path(tandem.server.text.__path__[0], "grammar_worker.py")
_MAX_KNOWN_BYTES = 1 << 23
"""Bytes of results that are remembered, because clients often repeat their grammars."""
_ENTRY_BYTES = 256
"""Bytes of a remembered result beside its text."""
_MAX_CHARS = 1 << 18
"""Longest grammar, in llguidance's form. The first mask of a longer one may take a second, and each
further one tens of milliseconds."""
_KNOWN_FAILED_S = 60.0
"""Seconds for which a grammar that took too much time or memory is refused without another try. The
cause may have been the machine."""
_NUM_PROCESSES = 2
"""Grammars that are compiled at once while requests are planned."""

_T = TypeVar("_T")
_Result = tuple[bool, str]
"""True if a grammar is good, with the answer; else False, with the reason."""


class _UnknownGrammarError(Exception):
    """Ends the planning of a request that needs a result that is not there."""

    def __init__(self, question: bytes, info: InstanceInfo) -> None:
        super().__init__()
        self.question = question
        self.info = info


_given: ContextVar[dict[bytes, _Result] | None] = ContextVar("given_grammars", default=None)
"""Results for the request that is being planned, by question; None: whoever asks waits."""


class GrammarCompiler:
    """Converts and compiles grammars in separate processes; remembers the results.

    Args:
        tokenizer: tokenizer of the model.
        timeout_s: time limit of a conversion or compilation, seconds.
        clock: clock of what is remembered for a time.
    """

    def __init__(
        self, tokenizer: Tokenizer, timeout_s: float = 5.0, clock: Clock | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._clock = clock if clock is not None else MonotonicClock()
        self._threads = WorkThreads(_NUM_PROCESSES)
        self._lock = threading.Lock()
        self._processes: BoundedProcesses | None = None
        self._is_closed = False
        self._known: OrderedDict[bytes, tuple[_Result, float]] = OrderedDict()
        """Results by digest of the question, each with the time until which it holds, the least
        recently used first."""
        self._known_bytes = 0

    def write(self, info: InstanceInfo, kind: str, text: str, field: str) -> str:
        """Return a grammar in llguidance's form.

        Args:
            info: facts about the model.
            kind: as of ``write_grammar``.
            text: the grammar.
            field: field of the request that has the grammar, for errors.

        Raises:
            ConfigError: the text does not parse as this kind, or takes too much time or memory.
        """
        return self._ask(kind, text, info, field)

    def check(self, grammar: str, info: InstanceInfo, field: str) -> None:
        """Check that a grammar compiles with the vocabulary of the model.

        Args:
            grammar: a result of ``write``.
            info: facts about the model.
            field: field of the request that has the grammar, for errors.

        Raises:
            ConfigError: it does not compile, or takes too much time or memory.
        """
        if len(grammar) > _MAX_CHARS:
            what = f"{field}: a grammar of {len(grammar)} characters: give up to {_MAX_CHARS}"
            raise ConfigError("server.check_grammar", what, field=field)
        self._ask("", grammar, info, field)

    async def plan(self, begin: Callable[[], Awaitable[_T]]) -> _T:
        """Run a function that plans a request on threads; return its result.

        It ends where it needs a result that is not known, and begins again when that is there. So
        it must not change anything before it has its grammars. Clients share the processes fairly;
        what a client that leaves has not begun is not done.

        Args:
            begin: begins it; called on the event loop.
        """
        given: dict[bytes, _Result] = {}
        token = _given.set(given)
        try:
            while True:
                try:
                    return await begin()
                except _UnknownGrammarError as error:
                    question, info = error.question, error.info
                given[question] = await self._threads.run(
                    self._answer, len(question), question, info
                )
        finally:
            _given.reset(token)

    def close(self) -> None:
        """End the processes; what they are working on fails."""
        with self._lock:
            self._is_closed = True
        if self._processes is not None:
            self._processes.close()
        self._threads.close()

    def _ask(self, kind: str, text: str, info: InstanceInfo, field: str) -> str:
        question = msgspec.msgpack.encode((kind, text))
        given = _given.get()
        result = None if given is None else given.get(question)
        if result is None and given is not None:
            result = self._recall(hashlib.sha256(question).digest())
            if result is None:
                raise _UnknownGrammarError(question, info)
        elif result is None:
            result = self._answer(question, info)
        is_good, answer = result
        if not is_good:
            raise ConfigError("server.check_grammar", f"{field}: {answer}", field=field)
        return answer

    def _answer(self, question: bytes, info: InstanceInfo) -> _Result:
        key = hashlib.sha256(question).digest()
        result = self._recall(key)
        if result is None:
            result, until_s = self._run(question, info)
            self._remember(key, result, until_s)
        return result

    def _run(self, question: bytes, info: InstanceInfo) -> tuple[_Result, float]:
        """Return the result of a question and the time until which it holds."""
        try:
            return self._start(info).run(question, self._timeout_s), math.inf
        except DeadlineError:
            why = (
                f"the grammar takes more than {self._timeout_s:g} s to compile "
                "(server.grammar_timeout_s): use a simpler one"
            )
        except PeerLostError as error:
            if self._is_closed:
                raise
            why = f"the grammar takes too much memory: use a simpler one ({error.what})"
        return (False, why), self._clock.now_s() + _KNOWN_FAILED_S

    def _start(self, info: InstanceInfo) -> BoundedProcesses:
        with self._lock:
            if self._is_closed:
                raise PeerLostError("server.check_grammar", "the server is stopping")
            if self._processes is None:
                made = list_vocabulary(self._tokenizer, info.vocab_size, info.eos_token_ids)
                first = msgspec.msgpack.encode(made)
                self._processes = BoundedProcesses(_WORKER, first, "server.check_grammar")
            return self._processes

    def _recall(self, key: bytes) -> _Result | None:
        with self._lock:
            result, until_s = self._known.get(key, (None, math.inf))
            if result is not None and until_s <= self._clock.now_s():
                del self._known[key]
                self._known_bytes -= len(result[1]) + _ENTRY_BYTES
                return None
            if result is not None:
                self._known.move_to_end(key)
            return result

    def _remember(self, key: bytes, result: _Result, until_s: float) -> None:
        size = len(result[1]) + _ENTRY_BYTES
        if size > _MAX_KNOWN_BYTES:
            return
        with self._lock:
            if key in self._known:
                return
            self._known[key] = result, until_s
            self._known_bytes += size
            while self._known_bytes > _MAX_KNOWN_BYTES:
                _, ((_, text), _) = self._known.popitem(last=False)
                self._known_bytes -= len(text) + _ENTRY_BYTES


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


Write = Callable[[str, str, str], str]
"""Function that converts a grammar, given its kind, its text and its field."""


def read_grammar(
    source: object, write: Write, form: ResponseForm | None = None, prefix: str = ""
) -> tuple[str, str]:
    """Return the grammar that a request asks for, and the field that has it; both empty if none.

    Args:
        source: object with some of the fields in ``_KINDS``, and perhaps ``structured_outputs``.
        write: converts it.
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
        return _write(write, kind, value, field), field
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


def _write(write: Write, kind: str, value: Any, field: str) -> str:
    if kind in ("json_schema", "choice") and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise ConfigError("server.read_grammar", f"{field} is not a text", field=field)
    return write(kind, value, field)


def join_grammars(rules: str, **parts: str) -> str:
    """Return one grammar made of rules and of the grammars that the rules refer to.

    Args:
        rules: rules in Lark, whose ``start`` refers to the parts by ``@NAME``.
        parts: grammars by name; each a result of ``GrammarCompiler.write``, or Lark.
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
