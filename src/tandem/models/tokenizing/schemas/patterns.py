"""Regular expressions for strings other than given ones, or of given lengths."""

from collections.abc import Sequence

from tandem.models.tokenizing.schemas.constraints import Sizes
from tandem.models.tokenizing.schemas.refused import RefusedError

__all__ = ["exclude_texts", "write_sizes"]

MAX_CHARACTERS = 1000
ANY = "(?s:.)"


def exclude_texts(texts: Sequence[str]) -> str:
    """Return a pattern of all strings except the given ones.

    Raises: RefusedError (they are too long).
    """
    if sum(map(len, texts)) > MAX_CHARACTERS or max(map(len, texts)) > MAX_CHARACTERS // 10:
        raise RefusedError("enum", "strings that are not allowed are too long")
    return f"^{_exclude(sorted(set(texts)))}$"


def _exclude(texts: list[str]) -> str:
    """Return a regular expression that matches every string except the given ones."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    parts = [] if "" in texts else [""]
    known = "".join(map(_quote, following))
    parts.append(f"[^{known}]{ANY}*" if known else f"{ANY}+")
    parts += [_quote(first) + _exclude(rest) for first, rest in following.items()]
    return f"(?:{'|'.join(parts)})"


def _quote(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def write_sizes(sizes: Sizes) -> str:
    """Return a pattern of all strings whose length is within the bounds."""
    high = "" if sizes.high is None else sizes.high
    return f"^{ANY}{{{sizes.low},{high}}}$"
