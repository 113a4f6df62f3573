"""The loop of a peer's script, run by the peer's interpreter, so it imports no module of Tandem.

A script beside this module imports it from its own folder; ``processes`` describes the messages on
the pipes.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["answer_calls"]

T = TypeVar("T")


def answer_calls(make_peer: Callable[[], T]) -> T:
    """Answer calls with the peer's methods until standard input ends; return the peer."""
    # Libraries print to standard output, some while they are imported. Descriptor 1 is therefore
    # redirected to standard error, and answers are written to a copy of the original.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = make_peer()
    for line in sys.stdin:
        arguments: dict[str, Any] = json.loads(line)
        call = arguments.pop("call")
        try:
            answer = {"result": getattr(peer, call)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the edge of the process: told to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    return peer
