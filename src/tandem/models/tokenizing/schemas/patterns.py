"""Regular expressions for strings other than given ones, of given lengths, or with a pattern."""

import re
from collections.abc import Sequence

from tandem.models.tokenizing.schemas.constraints import Sizes
from tandem.models.tokenizing.schemas.refused import RefusedError

__all__ = ["anchor_pattern", "exclude_texts", "write_sizes"]

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


def anchor_pattern(pattern: str) -> str:
    """Return a regular expression of all whole texts in which a pattern is found.

    Anchors are taken off the ends of the pattern's alternatives; others stay, and do not compile.

    Raises: RefusedError (the pattern sets options within).
    """
    begun = re.match(r"\(\?[isu]+\)", pattern)
    options = begun[0] if begun is not None else ""
    branches = [""]
    depth, is_class = 0, False
    for part in re.findall(r"(?s:\\.)|\(\?[a-zA-Z-]+\)|(?s:.)", pattern[len(options) :]):
        if part.startswith("(?") and not is_class:
            raise RefusedError("pattern", f"options within it, as {part}, cannot be expressed")
        if part == "]":
            is_class = False
        elif part == "[":
            is_class = True
        elif part in "()" and not is_class:
            depth += 1 if part == "(" else -1
        if part == "|" and not depth and not is_class:
            branches.append("")
        else:
            branches[-1] += part
    whole = "|".join(map(_anchor_branch, branches))
    return f"{options[:-1] or '(?'}:{whole})"


def _anchor_branch(branch: str) -> str:
    before = "" if branch.startswith("^") else f"{ANY}*"
    branch = branch.removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$$", branch) is None:
        return f"{before}(?:{branch}){ANY}*"
    return f"{before}(?:{branch[:-1]})"
