"""Questions of a decode instance to a prefill instance about its KV, and the answers.

Both are msgpack, sent as calls of the transfer engine on the connection that the blocks are read
by.
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
"""A period in which a request keeps its blocks at an instance, as (order of its arrival there,
number of its preemptions). Within one run, a block that was announced stays valid."""


class KvQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A decode instance's question about a prefill's progress. It is answered when more is computed
    than the asker has ``seen``, or when the prefill has ended.
    """

    request_id: str
    digest: bytes
    """``digest_prompt`` of the prompt whose KV is wanted."""
    run: Run | None = None
    """Run whose blocks the asker has read; None at first."""
    num_known: NonNegativeInt = 0
    """Number of leading block ids of the prefill's run ``run`` that the asker knows."""
    seen: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """``KvAnswer.num_complete`` and ``KvAnswer.num_layers`` of the last answer."""
    verify: Annotated[tuple[NonNegativeInt, ...], Meta(max_length=1024)] = ()
    """Indexes of complete blocks that the asker has read and wants checksums of; answered at
    once."""
    wait_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    """Seconds that the asker waits for the answer; after that the question may be dropped."""
    wants_state: bool = False
    """True to ask for the state at the end of the prompt; answered at once."""
    wants_windows: bool = False
    """True to ask for the window blocks at the end of the prompt; answered at once."""
    layout: KVLayout
    first_head: NonNegativeInt = 0
    """Index of the first KV head in the asker's blocks; ``verify`` sums up the asker's heads."""


class KvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer about a prefill's progress: the blocks that may be read, or what the question
    asked for.
    """

    run: Run | None
    """Present run of the request; None if it has ended and its blocks are not held. The asker must
    then discard blocks that are not verified, as it must when the run differs from that of its
    question."""
    is_held: bool = False
    """True if the prefill has ended and its blocks are held."""
    first: NonNegativeInt = 0
    """Index in the prompt of the first of ``block_ids``."""
    block_ids: tuple[NonNegativeInt, ...] = ()
    num_complete: NonNegativeInt = 0
    """Number of leading blocks of which all layers may be read."""
    num_blocks: NonNegativeInt = 0
    """Number of leading blocks of which at least ``num_layers`` layers may be read; at least
    ``num_complete``."""
    num_layers: NonNegativeInt = 0
    state: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """Slot and CRC-32C of the state at the end of the prompt; None if it was not asked for or the
    prefill has not ended."""
    window_first: NonNegativeInt = 0
    """Index in the prompt of the first of ``windows``, counted in blocks."""
    windows: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """Id and CRC-32C of each window block that the token after the prompt attends to; empty if they
    were not asked for or the prefill has not ended."""
    verified: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    """For each index in ``verify``: the id of the block that is there now (equal blocks are
    merged), and the CRC-32C of the asker's heads in it, in the asker's layout."""


def digest_prompt(request: Request) -> bytes:
    """Return a 32-byte digest of a prompt: of its KV identity, salt and tokens."""
    return hashlib.sha256(
        request.prefix.root_key + array("q", request.prompt_ids).tobytes()
    ).digest()


def decode_question(payload: bytes) -> KvQuestion:
    """Decode a question from msgpack.

    Raises: CorruptionError (the bytes are not a question).
    """
    try:
        return msgspec.msgpack.decode(payload, type=KvQuestion)
    except msgspec.DecodeError as error:
        raise CorruptionError("kv_peer.decode", f"not a question: {error}") from error


def decode_answer(payload: bytes) -> KvAnswer:
    """Decode an answer from msgpack.

    Raises: CorruptionError (the bytes are not an answer).
    """
    try:
        return msgspec.msgpack.decode(payload, type=KvAnswer)
    except msgspec.DecodeError as error:
        raise CorruptionError("kv_peer.decode", f"not an answer: {error}") from error
