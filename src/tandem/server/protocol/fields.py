"""Field types with bounds that several requests share.

Every number is bounded on both sides: JSON integers have no limit of their own, and what reaches
the engine must fit its message. Bounds are the engine's own (``core.wire``) unless said otherwise.
"""

from typing import Annotated, Any

from msgspec import Meta

from tandem.core.wire import MIN_REPETITION_PENALTY

__all__ = [
    "Choices",
    "Count",
    "FrequencyPenalty",
    "FunctionName",
    "LogitBias",
    "LogprobCount",
    "MinP",
    "Name",
    "NumChoices",
    "Pattern",
    "Priority",
    "RepetitionPenalty",
    "Schema",
    "Seed",
    "Stop",
    "StopTokenIds",
    "Temperature",
    "Timeout",
    "TokenIds",
    "TopK",
    "TopP",
]

MAX_COUNT = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""-1 and 0 are all tokens."""
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10.0)]
FrequencyPenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
LogitBias = Annotated[
    dict[Annotated[int, Meta(ge=0, le=MAX_COUNT)], Annotated[float, Meta(ge=-100.0, le=100.0)]],
    Meta(
        max_length=4096, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}
    ),
]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
NumChoices = Annotated[int, Meta(ge=1, le=2**16)]
LogprobCount = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)]
Timeout = Annotated[float, Meta(ge=0.001, le=7 * 86400.0)]
"""Seconds. Less than a millisecond is a mistake, often of a number that was rounded to 0."""
Name = Annotated[str, Meta(max_length=1024)]
"""Model names, request ids, salts: text that is kept, compared or logged."""

FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]

_StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = _StopText | Annotated[list[_StopText], Meta(max_length=64)]
"""At most 64 strings of 256 characters: the automaton is built in some 15 ms at worst."""
StopTokenIds = Annotated[list[Count], Meta(max_length=1024)]
TokenIds = list[Count]
Schema = str | dict[str, Any]
"""JSON Schema, plain or as text."""
Pattern = Annotated[str, Meta(min_length=1)]
"""A regular expression or a grammar; llguidance bounds what it takes."""
Choices = Annotated[list[_StopText], Meta(min_length=1, max_length=4096)]
