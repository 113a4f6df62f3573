"""Recordings of traffic: the requests that have ended since each recorder last asked.

Prompts are kept as token ids until the recorder asks for rows, which then get hashes. A recorder
that does not ask in time is dropped, with the requests waiting for it. Everything runs on the event
loop, except ``Recording.make_rows``, which may run on a thread.
"""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.core.errors import CapacityError, NotFoundError
from tandem.core.loads.recording import TraceHasher
from tandem.core.loads.traces import TraceRow

__all__ = ["EndedRequest", "Recording", "TrafficLog"]

MAX_RECORDINGS = 4
IDLE_S = 120.0
"""Seconds without a request for rows after which a recording ends."""
MAX_WAITING_TOKENS = 1 << 22
"""Largest number of prompt tokens that wait for the recorder; further requests count as lost."""
_SECRET_BYTES = 32


class EndedRequest(NamedTuple):
    """The data of an ended generation that a recording (a trace of clients' requests) needs."""

    arrived_s: float
    prompt_ids: Sequence[int]
    output_length: int
    realm: str
    """LoRA adapter and cache salt of the request; prompts of different realms share no KV."""


@dataclass(eq=False)
class Recording:
    """One recording of the requests that clients send, from which a trace is made."""

    begin_s: float
    asked_s: float
    hasher: TraceHasher
    waiting: deque[EndedRequest] = field(default_factory=deque[EndedRequest])
    num_waiting_tokens: int = 0
    num_lost: int = 0

    def put(self, ended: EndedRequest) -> None:
        """Add an ended request, if it arrived after the recording began."""
        if ended.arrived_s < self.begin_s:
            return
        num_tokens = self.num_waiting_tokens + len(ended.prompt_ids)
        if num_tokens > MAX_WAITING_TOKENS:
            self.num_lost += 1
            return
        self.num_waiting_tokens = num_tokens
        self.waiting.append(ended)

    def take(self) -> list[EndedRequest]:
        """Return the ended requests that were not taken yet, and remove them."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.num_waiting_tokens = 0
        return taken

    def make_rows(self, ended: Sequence[EndedRequest]) -> list[TraceRow]:
        """Return the rows of the trace for ended requests; call it on one thread at a time."""
        return [
            self.hasher.make_row(
                each.arrived_s - self.begin_s, each.prompt_ids, each.output_length, each.realm
            )
            for each in ended
        ]


class TrafficLog:
    """The recordings of clients' requests that are in progress at a server."""

    def __init__(self) -> None:
        self._recordings: dict[str, Recording] = {}

    @property
    def is_recorded(self) -> bool:
        """True if any recording is in progress, so that ended requests must be noted."""
        return bool(self._recordings)

    def start(self, now_s: float, block_tokens: int) -> str:
        """Begin a recording; return its name.

        Raises: CapacityError (too many recordings are in progress).
        """
        self._forget_idle(now_s)
        if len(self._recordings) >= MAX_RECORDINGS:
            what = f"{MAX_RECORDINGS} recordings are under way: end one, or wait until it is idle"
            raise CapacityError("server.record", what)
        name = secrets.token_hex(8)
        hasher = TraceHasher(secrets.token_bytes(_SECRET_BYTES), block_tokens)
        self._recordings[name] = Recording(now_s, now_s, hasher)
        return name

    def find(self, name: str, now_s: float) -> Recording:
        """Return a recording by its name, and restart its idle time.

        Raises: NotFoundError (there is none, or it was idle too long).
        """
        self._forget_idle(now_s)
        recording = self._recordings.get(name)
        if recording is None:
            what = f"no recording {name[:32]!r} is under way: start one"
            raise NotFoundError("server.record", what, field="recording")
        recording.asked_s = now_s
        return recording

    def stop(self, name: str) -> None:
        """End a recording; an unknown name is ignored."""
        self._recordings.pop(name, None)

    def note_end(self, ended: EndedRequest, now_s: float) -> None:
        """Add an ended request to every recording in progress."""
        self._forget_idle(now_s)
        for recording in self._recordings.values():
            recording.put(ended)

    def _forget_idle(self, now_s: float) -> None:
        for name, recording in list(self._recordings.items()):
            if now_s - recording.asked_s > IDLE_S:
                del self._recordings[name]
