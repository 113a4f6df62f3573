"""Questions of a decode instance to a prefill instance, and their answers.

Both are msgpack in calls of the transfer engine, on the connection that the blocks come by.
"""

import hashlib
from array import array
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.errors import CorruptionError
from tandem.core.kv_layout import KVLayout
from tandem.engine.scheduling.request import Request

__all__ = ["KvAnswer", "KvQuestion", "Run", "decode_answer", "decode_question", "digest_prompt"]

NonNegativeInt = Annotated[int, Meta(ge=0)]
Run = tuple[NonNegativeInt, NonNegativeInt]
"""One run: the time in which a request keeps its blocks at an instance, as (number of its arrival
there, number of its preemptions). Within a run, an announced block stays valid.
"""


class KvQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question about a prefill's progress, answered at progress beyond ``seen`` or at its end."""

    request_id: str
    digest: bytes
    """``digest_prompt`` of the prompt whose KV the asker wants."""
    run: Run | None = None
    """Run of which the asker has read blocks."""
    num_known: NonNegativeInt = 0
    """Leading block ids of that run that the asker knows."""
    seen: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """``KvAnswer.num_complete`` and ``num_layers`` of the last answer."""
    verify: Annotated[tuple[NonNegativeInt, ...], Meta(max_length=1024)] = ()
    """Positions of blocks that the asker has read, below ``num_complete``: answered at once."""
    wait_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    """Seconds that the asker waits; after that the question may be dropped."""
    wants_state: bool = False
    """True to ask for the state; it is answered at once, as ``verify`` is."""
    wants_windows: bool = False
    """True to ask for the window layers' blocks; it is answered at once."""
    layout: KVLayout
    first_head: NonNegativeInt = 0
    """The first head that the asker's blocks hold, for ``verify``."""


class KvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a prefill: the blocks that may be read."""

    run: Run | None
    """Current run of the request; None if it has ended and its blocks are not held. Unverified
    blocks and blocks of another run must then be discarded.
    """
    is_held: bool = False
    """True if the prefill has ended and its blocks are held."""
    first: NonNegativeInt = 0
    """Position of the first of ``block_ids``."""
    block_ids: tuple[NonNegativeInt, ...] = ()
    num_complete: NonNegativeInt = 0
    """Leading blocks of which every layer may be read."""
    num_blocks: NonNegativeInt = 0
    """Leading blocks of which ``num_layers`` layers may be read, at least ``num_complete``."""
    num_layers: NonNegativeInt = 0
    state: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """The slot with the state after the prompt, and the CRC-32C of it; None: it was not asked for,
    or the prefill has not ended."""
    window_first: NonNegativeInt = 0
    """Position of the first of ``windows``, in blocks."""
    windows: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """The blocks of layers with a window that the token after the prompt sees, and the CRC-32C of
    each; empty: they were not asked for, or the prefill has not ended."""
    verified: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """For each position of ``verify``: which block is there now (equal ones are merged), and the
    CRC-32C of the asker's heads in it, in the order of the asker's layout."""


def digest_prompt(request: Request) -> bytes:
    """Return a 32-byte digest of a prompt's KV: over identity, salt and tokens."""
    return hashlib.sha256(
        request.prefix.root_key + array("q", request.prompt_ids).tobytes()
    ).digest()


def decode_question(payload: bytes) -> KvQuestion:
    """Decode a peer's question.

    Raises: CorruptionError.
    """
    try:
        return msgspec.msgpack.decode(payload, type=KvQuestion)
    except msgspec.DecodeError as error:
        raise CorruptionError("kv_peer.decode", f"not a question: {error}") from error


def decode_answer(payload: bytes) -> KvAnswer:
    """Decode a peer's answer.

    Raises: CorruptionError.
    """
    try:
        return msgspec.msgpack.decode(payload, type=KvAnswer)
    except msgspec.DecodeError as error:
        raise CorruptionError("kv_peer.decode", f"not an answer: {error}") from error
