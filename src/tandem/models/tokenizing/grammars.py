"""The vocabulary of a checkpoint in llguidance's form, and the limits of its parser.

Server and instances derive both from the same files, so a grammar that compiles at the server
compiles at every instance.
"""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.core.errors import UnsupportedError
from tandem.models.tokenizing.schemas.json_text import parse_json
from tandem.models.tokenizing.schemas.rewrite import RefusedError, rewrite_schema
from tandem.models.tokenizing.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = [
    "Matcher",
    "TokenTable",
    "find_fault",
    "make_matcher",
    "make_token_table",
    "write_grammar",
]

_MAX_REWRITTEN = 1 << 18
"""Longest schema, in characters, that is rewritten; a longer one is passed to llguidance
unchanged.
"""

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


class _Vocabulary:
    """A tokenizer in the form that ``llguidance.LLTokenizer`` reads: its tokens' bytes and special
    ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        count = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = eos_ids[0]
        # Padding ids of the model's matrices have no token; they get empty bytes, so that no
        # grammar allows them.
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)]
        self.tokens += [b""] * (vocab_size - count)
        special = {*tokenizer.special_ids, *eos_ids}
        self.special_token_ids = sorted(i for i in special if i < vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


def make_token_table(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> TokenTable:
    """Return llguidance's table of a vocabulary.

    Args:
        tokenizer: the checkpoint's tokenizer.
        vocab_size: the model's number of logits, which masks cover.
        eos_ids: ids that end a text, at least one.
    """
    known = [i for i in eos_ids if i < vocab_size]
    vocabulary = _Vocabulary(tokenizer, vocab_size, known)
    return _load_library().LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=known)


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
        text: the grammar.

    Raises:
        ValueError: the text does not parse as this kind; for a schema without a grammar the error
            names the keyword.
    """
    return (
        _write_schema(text) if kind == "json_schema" else _load_library().grammar_from(kind, text)
    )


@lru_cache(maxsize=64)
def _write_schema(text: str) -> str:
    """Return the grammar of a schema, rewritten if it has keywords that llguidance lacks."""
    library = _load_library()
    grammar: str = library.grammar_from("json_schema", text)
    check = library.LLMatcher.validate_grammar_with_warnings
    if not check(grammar, None, limits=_find_limits())[0] or len(text) > _MAX_REWRITTEN:
        return grammar
    # The grammar library has parsed this text as JSON; what it nests deeper than Python is refused.
    schema = parse_json(text)
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

    try:
        rewritten = rewrite_schema(schema, matches).schema
    except RefusedError as error:
        raise ValueError(str(error)) from error
    return library.grammar_from("json_schema", json.dumps(rewritten, ensure_ascii=False))


@cache
def _load_bytes() -> TokenTable:
    """Return llguidance's table of a vocabulary whose tokens are the single bytes."""
    return _load_library().LLTokenizer("byte")
