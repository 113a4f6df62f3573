"""The vocabulary of a checkpoint in llguidance's form, and the limits of its parser.

Server and instances derive both from the same files, so a grammar that compiles at the server
compiles at every instance.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tandem.core.errors import UnsupportedError
from tandem.models.tokenizing.schemas.arguments import list_arguments
from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.schemas.rewrite import RefusedError, rewrite_schema

if TYPE_CHECKING:
    import llguidance

    from tandem.models.tokenizing.tokenizer import Tokenizer

__all__ = [
    "ExactEncoder",
    "Matcher",
    "TokenTable",
    "Vocabulary",
    "find_end_ids",
    "find_fault",
    "list_vocabulary",
    "make_matcher",
    "make_token_table",
    "write_grammar",
]

_MAX_REWRITTEN = 1 << 18
"""Longest schema, in characters, that is rewritten; a longer one is passed to llguidance
unchanged.
"""

_ANCHORS = ("\n", "a ", ".")
"""Texts before which a tokenizer puts its space, instead of before the text that follows."""

TokenTable: TypeAlias = "llguidance.LLTokenizer"
Matcher: TypeAlias = "llguidance.LLMatcher"


def _load_library() -> Any:
    """Import llguidance on first use, which only requests with a grammar need."""
    try:
        import llguidance
    except ImportError as error:
        what = "structured output needs the package llguidance: install it"
        raise UnsupportedError("grammars.load", what, field="response_format") from error
    return llguidance


@cache
def _find_limits() -> Any:
    """Return llguidance's default limits of items, lexer states and fuel.

    Large lexemes are not precomputed, since that takes seconds, during which one request would
    delay all others.
    """
    return _load_library().LLParserLimits(precompute_large_lexemes=False)


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, by which its grammars are compiled."""

    tokens: list[bytes]
    """Bytes of each token; empty for ids that no grammar allows by what they look like: special
    tokens, and padding of the model's matrices."""
    special_ids: list[int]
    eos_ids: list[int]
    """Ids that end a text; a result of ``find_end_ids``."""


class _Wrapper:
    """A vocabulary in the form that ``llguidance.LLTokenizer`` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = vocabulary.special_ids
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._encode(text)


def list_vocabulary(tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """Return the tokens of a model.

    Args:
        tokenizer: the checkpoint's tokenizer.
        vocab_size: the model's number of logits, which masks cover.
        eos_ids: the model's own ids that end a text.
    """
    count = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(i) for i in range(count)] + [b""] * (vocab_size - count)
    ends = find_end_ids(eos_ids, vocab_size)
    special = sorted({i for i in (*tokenizer.special_ids, *ends) if i < vocab_size})
    return Vocabulary(tokens, special, ends)


def find_end_ids(eos_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids that end an answer that has a grammar: the model's own. If it has none, the
    last id of the vocabulary, which then stands for no text: a complete grammar must allow
    something.
    """
    return [i for i in eos_ids if 0 <= i < vocab_size] or [vocab_size - 1]


class ExactEncoder:
    """Encodes texts to tokens with exactly their bytes, as the next part of an answer.

    A tokenizer may put a space before each text (SentencePiece, ``Metaspace``, ``Prepend``), and
    takes the name of a special token in a text for that token. A grammar that leaves no choice of
    the next bytes allows neither.

    Args:
        tokenizer: the checkpoint's tokenizer.
        vocabulary: a result of ``list_vocabulary`` for it.
    """

    def __init__(self, tokenizer: "Tokenizer", vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        special = {*vocabulary.special_ids}
        count = min(tokenizer.vocab_size, len(vocabulary.tokens))
        self._text_ids = frozenset(i for i in range(count) if i not in special)
        """Ids of the tokens that a grammar over bytes allows."""

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text; where the tokenizer cannot begin with them, the longest that
        fit, one after the other. What no token fits is left out.
        """
        wanted = text.encode()
        for anchor in ("", *_ANCHORS):
            ids = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            found = self._find_end(ids, wanted)
            if found is not None:
                return found
        return self._match(wanted)

    def _find_end(self, ids: list[int], wanted: bytes) -> list[int] | None:
        """Return the last of the tokens, those that have the wanted bytes; None if none have."""
        size = 0
        for start in range(len(ids), -1, -1):
            if size >= len(wanted):
                own = b"".join(map(self._tokenizer.token_bytes, ids[start:]))
                return (
                    ids[start:]
                    if own == wanted and self._text_ids.issuperset(ids[start:])
                    else None
                )
            if start:
                size += len(self._tokenizer.token_bytes(ids[start - 1]))
        return None

    def _match(self, wanted: bytes) -> list[int]:
        ids: list[int] = []
        begin, longest = 0, max(map(len, self._ids_by_bytes))
        while begin < len(wanted):
            for end in range(min(begin + longest, len(wanted)), begin, -1):
                token_id = self._ids_by_bytes.get(wanted[begin:end])
                if token_id is not None:
                    ids.append(token_id)
                    break
            else:
                return ids
            begin = end
        return ids

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        token_bytes = self._tokenizer.token_bytes
        return {token_bytes(i): i for i in sorted(self._text_ids, reverse=True)}


def make_token_table(vocabulary: Vocabulary, tokenizer: "Tokenizer | None" = None) -> TokenTable:
    """Return llguidance's table of a vocabulary.

    Args:
        vocabulary: the tokens.
        tokenizer: encodes texts that a grammar leaves no choice of; None: the table only compiles
            grammars, and masks where a text is forced are of no use.
    """
    no_ids: list[int] = []
    encode = (lambda _: no_ids) if tokenizer is None else ExactEncoder(tokenizer, vocabulary)
    wrapper = _Wrapper(vocabulary, encode)
    size = len(vocabulary.tokens)
    return _load_library().LLTokenizer(wrapper, n_vocab=size, eos_token=vocabulary.eos_ids)


def find_fault(table: TokenTable, grammar: str) -> str:
    """Return the reason why a grammar does not compile; empty if it does."""
    matcher = _load_library().LLMatcher
    is_wrong, messages = matcher.validate_grammar_with_warnings(
        grammar, table, limits=_find_limits()
    )
    return messages[0] if is_wrong else ""


def make_matcher(table: TokenTable, grammar: str) -> Matcher:
    """Compile a grammar; releases the GIL. An invalid grammar gives a matcher in an error state."""
    return _load_library().LLMatcher(table, grammar, log_level=0, limits=_find_limits())


def write_grammar(kind: str, text: str) -> str:
    """Convert a grammar to llguidance's form; ``find_fault`` tells if it is valid.

    Args:
        kind: "json_schema", "regex", "choice" (a JSON list of texts) or "grammar" (Lark or GBNF).
            Of "arguments", the schema of a tool's arguments, the result is no grammar but a JSON
            list of ``Arguments``.
        text: the grammar.

    Raises:
        ValueError: the text does not parse as this kind; for a schema without a grammar the error
            names the keyword.
    """
    if kind == "arguments":
        try:
            found = list_arguments(parse_json(text), _make_matches())
        except RefusedError as error:
            raise ValueError(str(error)) from error
        return msgspec.json.encode(found).decode()
    if kind == "json_schema":
        return _write_schema(text)
    return _load_library().grammar_from(kind, text)


def _write_schema(text: str) -> str:
    """Return the grammar of a schema, rewritten if it has keywords that llguidance lacks."""
    library = _load_library()
    grammar: str = library.grammar_from("json_schema", text)
    check = library.LLMatcher.validate_grammar_with_warnings
    if not check(grammar, None, limits=_find_limits())[0] or len(text) > _MAX_REWRITTEN:
        return grammar
    # The grammar library has parsed this text as JSON; what it nests deeper than Python is refused.
    schema = parse_json(text)
    try:
        rewritten = rewrite_schema(schema, _make_matches()).schema
    except RefusedError as error:
        raise ValueError(str(error)) from error
    return library.grammar_from("json_schema", json.dumps(rewritten, ensure_ascii=False))


def _make_matches() -> Callable[[str, str], bool]:
    """Return a function that tells if a pattern is found in a text; see ``rewrite_schema``."""
    library = _load_library()
    matchers: dict[str, Matcher] = {}

    def matches(pattern: str, found_in: str) -> bool:
        if pattern not in matchers:
            plain = json.dumps({"type": "string", "pattern": pattern})
            whole: str = library.grammar_from("json_schema", plain)
            matchers[pattern] = make_matcher(_load_bytes(), whole)
        matcher = matchers[pattern]
        matcher.reset()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        ids = _load_bytes().tokenize_str(json.dumps(found_in, ensure_ascii=False))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return matches


@cache
def _load_bytes() -> TokenTable:
    """Return llguidance's table of a vocabulary whose tokens are the single bytes."""
    return _load_library().LLTokenizer("byte")
