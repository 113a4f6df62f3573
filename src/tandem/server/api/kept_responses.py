"""The memory of responses that later requests go on from.

Each client has a bounded number of bytes. Conversations are forgotten as wholes, since a response
is of no use without those before it: the least recently used one where the bytes are over, and each
that nobody used for a time. Calls may come from any thread; time is an argument.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.core.errors import NotFoundError

__all__ = ["KeptResponse", "KeptResponses"]

_OVERHEAD_BYTES = 1024
"""About what a response takes beside its texts."""


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A response and what it adds to its conversation.

    Args:
        id: told to the client.
        parent: the response that it went on from, which may have been deleted; None: none.
        document: encoded, as GET returns it.
        messages: encoded; those of the request and those of the answer.
        is_background: whether its client does not wait for it.
        is_running: it still changes, and cannot be gone on from.
    """

    id: str
    parent: "KeptResponse | None"
    document: bytes
    messages: bytes
    is_background: bool = False
    is_running: bool = False
    conversation: "_Conversation" = field(init=False)
    num_children: int = field(init=False, default=0)
    is_deleted: bool = field(init=False, default=False)

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return len(self.document) + len(self.messages) + _OVERHEAD_BYTES

    def list_messages(self) -> list[bytes]:
        """Return the encoded messages of the conversation up to here, in their order."""
        parts: list[bytes] = []
        each: KeptResponse | None = self
        while each is not None:
            parts.append(each.messages)
            each = each.parent
        return parts[::-1]


class _Conversation:
    """Responses that go back to one."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        """Ids of those that were not deleted."""
        self.size_bytes = 0
        self.used_s = 0.0


class _Shelf:
    """The conversations of one client."""

    def __init__(self) -> None:
        self.responses: dict[str, KeptResponse] = {}
        self.conversations: OrderedDict[_Conversation, None] = OrderedDict()
        """The least recently used one first."""
        self.size_bytes = 0

    def drop(self, conversation: _Conversation) -> None:
        for each in conversation.ids:
            del self.responses[each]
        self.size_bytes -= conversation.size_bytes
        del self.conversations[conversation]

    def resize(self, conversation: _Conversation, change: int) -> None:
        conversation.size_bytes += change
        self.size_bytes += change


class KeptResponses:
    """Responses by client and id.

    Args:
        max_bytes: of one client; 0 keeps nothing.
        max_idle_s: after which a conversation that nobody uses is forgotten.
    """

    def __init__(self, max_bytes: int, max_idle_s: float) -> None:
        self.max_bytes = max_bytes
        self._max_idle_s = max_idle_s
        self._shelves: dict[bytes, _Shelf] = {}
        self._lock = threading.Lock()

    def find(self, owner: bytes, response_id: str, now_s: float, field: str = "") -> KeptResponse:
        """Return a response, whose conversation is the most recently used one now.

        Args:
            owner: digest of the client's key.
            response_id: as it was told.
            now_s: the time.
            field: of the request that names it, for errors.

        Raises:
            NotFoundError: it was never kept, is forgotten, or another client's.
        """
        with self._lock:
            shelf = self._open(owner, now_s)
            found = None if shelf is None else shelf.responses.get(response_id)
            if shelf is None or found is None:
                what = (
                    f"response {response_id[:100]!r} is not kept here: it was never stored, was "
                    "deleted or is forgotten"
                )
                raise NotFoundError("server.find_response", what, field=field or None)
            self._touch(shelf, found.conversation, now_s)
            return found

    def add(self, owner: bytes, response: KeptResponse, now_s: float) -> None:
        """Keep a response, unless its conversation is forgotten; others may be for its sake."""
        with self._lock:
            self._open(owner, now_s)
            shelf = self._shelves.setdefault(owner, _Shelf())
            parent = response.parent
            conversation = _Conversation() if parent is None else parent.conversation
            if parent is not None and conversation not in shelf.conversations:
                # Forgotten while the response was generated, which is of no use without it.
                return
            if parent is not None:
                parent.num_children += 1
            response.conversation = conversation
            conversation.ids.add(response.id)
            shelf.responses[response.id] = response
            shelf.resize(conversation, response.size_bytes)
            self._touch(shelf, conversation, now_s)
            self._shrink(shelf)

    def update(
        self, owner: bytes, response: KeptResponse, document: bytes, messages: bytes
    ) -> None:
        """Replace what is kept of a response, which has ended."""
        with self._lock:
            if response.is_deleted:
                return
            before = response.size_bytes
            response.document, response.messages = document, messages
            response.is_running = False
            shelf = self._shelves.get(owner)
            if shelf is not None and response.conversation in shelf.conversations:
                shelf.resize(response.conversation, response.size_bytes - before)
                self._shrink(shelf)

    def remove(self, owner: bytes, response_id: str, now_s: float) -> None:
        """Forget a response; those that go on from it keep their conversation.

        Raises:
            NotFoundError: see ``find``.
        """
        response: KeptResponse | None = self.find(owner, response_id, now_s)
        with self._lock:
            shelf = self._shelves[owner]
            if shelf.responses.pop(response_id, None) is None:
                return
            conversation = response.conversation
            conversation.ids.discard(response_id)
            response.is_deleted = True
            if not conversation.ids:
                shelf.drop(conversation)
                return
            while response is not None and response.is_deleted and not response.num_children:
                shelf.resize(conversation, -response.size_bytes)
                response = response.parent
                if response is not None:
                    response.num_children -= 1

    def measure(self, owner: bytes) -> int:
        """Return about how many bytes a client's responses take."""
        with self._lock:
            shelf = self._shelves.get(owner)
            return 0 if shelf is None else shelf.size_bytes

    def _open(self, owner: bytes, now_s: float) -> _Shelf | None:
        """Return what a client has, without what is too old."""
        for shelf in self._shelves.values():
            while shelf.conversations:
                oldest = next(iter(shelf.conversations))
                if now_s - oldest.used_s <= self._max_idle_s:
                    break
                shelf.drop(oldest)
        return self._shelves.get(owner)

    def _touch(self, shelf: _Shelf, conversation: _Conversation, now_s: float) -> None:
        conversation.used_s = now_s
        shelf.conversations[conversation] = None
        shelf.conversations.move_to_end(conversation)

    def _shrink(self, shelf: _Shelf) -> None:
        while shelf.conversations and shelf.size_bytes > self.max_bytes:
            shelf.drop(next(iter(shelf.conversations)))
