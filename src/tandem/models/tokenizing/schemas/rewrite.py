"""Conversion of a JSON Schema to an equivalent one without the keywords that llguidance lacks.

The result allows the schema's values, or fewer, never others; ``narrowed`` lists the keywords for
which it allows fewer. Formats that a grammar knows are enforced; others are annotations, as the
draft treats all formats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.models.tokenizing.schemas.solver import Solver
from tandem.models.tokenizing.schemas.writer import Writer

__all__ = ["RefusedError", "Rewritten", "rewrite_schema"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Rewritten(NamedTuple):
    """A schema rewritten for llguidance, and the keywords for which it allows fewer values."""

    schema: Any
    narrowed: tuple[str, ...]
    """Keywords for which fewer values are allowed than in the original schema."""


def rewrite_schema(schema: Any, matches: Callable[[str, str], bool]) -> Rewritten:
    """Return an equivalent schema that llguidance supports.

    Args:
        schema: a schema of draft 2020-12.
        matches: returns True if a pattern is found in a text, in bounded time; raises ValueError
            for an invalid pattern.

    Raises: RefusedError (there is no equivalent; the text begins with the keyword).
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
