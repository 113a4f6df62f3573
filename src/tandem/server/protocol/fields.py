"""Types of fields, with bounds, that several requests share.

Every number has a lower and an upper bound: JSON integers have none, but must fit the engine's
messages. Bounds are those of ``core.wire`` unless said otherwise.
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
TopP = Annotated[float, Meta(ge=0.0, le=1.0)]
"""Probability of the likeliest tokens to sample from; 0: the likeliest alone."""
TopK = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
"""Number of likeliest tokens to sample from; -1 and 0: all."""
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
"""Time limit in seconds. Less than a millisecond is taken for a mistake, such as a number rounded
to 0."""
Name = Annotated[str, Meta(max_length=1024)]
"""A text that is stored, compared or logged, such as a model name, request id or salt."""

FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]

_StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = _StopText | Annotated[list[_StopText], Meta(max_length=64)]
"""Stop strings: at most 64 of 256 characters, whose automaton takes at most about 15 ms to
build."""
StopTokenIds = Annotated[list[Count], Meta(max_length=1024)]
TokenIds = list[Count]
Schema = str | dict[str, Any]
"""A JSON Schema, as an object or as text."""
Pattern = Annotated[str, Meta(min_length=1)]
"""A regular expression or a grammar; llguidance limits its complexity."""
Choices = Annotated[list[_StopText], Meta(min_length=1, max_length=4096)]
