"""A JSON Schema as an equivalent one without the keywords that llguidance lacks.

The values that the result allows are those of the schema, or fewer, never others; ``narrowed``
names the keywords of which it allows fewer. Formats that a grammar knows are enforced, others are
remarks, as all of them are to the draft.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.models.tokenizing.schemas.solver import Solver
from tandem.models.tokenizing.schemas.writer import Writer

__all__ = ["RefusedError", "Rewritten", "rewrite_schema"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Rewritten(NamedTuple):
    """A schema in other words."""

    schema: Any
    narrowed: tuple[str, ...]
    """Keywords of which fewer values are allowed than the schema says."""


def rewrite_schema(schema: Any, matches: Callable[[str, str], bool]) -> Rewritten:
    """Return an equivalent schema.

    Args:
        schema: of draft 2020-12.
        matches: tells whether a pattern is found in a text, in bounded time; raises ValueError for
            one that is no pattern.

    Raises: RefusedError: it has no equivalent here; the text begins with the keyword.
    """
    options = {}
    if isinstance(schema, dict) and "x-guidance" in schema:
        # "x-guidance" holds options of llguidance, which do not restrict values.
        options = {"x-guidance": schema["x-guidance"]}
    if isinstance(schema, dict) and schema.get("$schema", DIALECT).rstrip("#") != DIALECT:
        raise RefusedError("$schema", f"{schema['$schema']!r} is not draft 2020-12")
    try:
        solver = Solver(schema, matches)
        writer = Writer(solver)
        written = writer.write()
    except RecursionError:
        raise RefusedError("$defs", "schemas nest too deeply") from None
    if isinstance(written, dict):
        written = written | options
    return Rewritten(written, tuple(dict.fromkeys([*solver.dropped, *writer.narrowed])))
