"""Boolean formulas over the schemas in a document, which describe what a value must satisfy.

A formula is a nested tuple, so that equal formulas are found in tables.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

__all__ = ["FALSE", "TRUE", "Formula", "Place", "all_of", "any_of", "at", "equal_to", "negate"]


class Place(NamedTuple):
    """A schema within a document, and the way by which it was reached.

    Attributes:
        path: keys and indexes from the root of the document.
        scope: URIs of the resources entered on the way, outermost first, for ``$dynamicRef``.
    """

    path: tuple[str | int, ...]
    scope: tuple[str, ...]


Formula: TypeAlias = tuple[Any, ...]
"""A formula: ("all", formulas), ("any", formulas), ("not", formula), ("at", place) or ("equals",
value).
"""

TRUE: Formula = ("all", ())
FALSE: Formula = ("any", ())


def at(place: Place) -> Formula:
    """Return the formula "the value satisfies the schema at this place of the document"."""
    return ("at", place)


def equal_to(value: Any) -> Formula:
    """Return the formula "the value equals this one", given as a hashable key of ``freeze``."""
    return ("equals", value)


def negate(formula: Formula) -> Formula:
    """Return the negation of a formula, simplified: a double negation is dropped, and "all" and
    "any" are exchanged over negated parts.
    """
    kind, content = formula
    match kind:
        case "not":
            return content
        case "all":
            return any_of(negate(part) for part in content)
        case "any":
            return all_of(negate(part) for part in content)
        case _:
            return ("not", formula)


def all_of(parts: Iterable[Formula]) -> Formula:
    """Return the conjunction of formulas, simplified; TRUE if there are none."""
    return _join("all", parts, TRUE, FALSE)


def any_of(parts: Iterable[Formula]) -> Formula:
    """Return the disjunction of formulas, simplified; FALSE if there are none."""
    return _join("any", parts, FALSE, TRUE)


def _join(kind: str, parts: Iterable[Formula], neutral: Formula, strongest: Formula) -> Formula:
    found: dict[Formula, None] = {}
    for part in parts:
        if part == strongest:
            return strongest
        for each in part[1] if part[0] == kind else (part,):
            found[each] = None
    if any(part[0] == "not" and part[1] in found for part in found):
        return strongest
    if not found:
        return neutral
    return next(iter(found)) if len(found) == 1 else (kind, tuple(found))
