"""The memory of stored responses, from which later requests can go on.

The bytes of each client and of all clients together are limited. A response is useless without
those before it, so whole conversations are dropped: a client over its limit loses its least
recently used one; if all together are over the limit, the client with the most bytes loses one; and
a conversation that was unused for some time is dropped. Calls may come from any thread; time is an
argument.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.core.errors import NotFoundError

__all__ = ["KeptResponse", "KeptResponses"]

_OVERHEAD_BYTES = 1024
"""Estimated memory of a kept response beside its texts, in bytes."""


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A stored response, and the messages that it adds to its conversation.

    Args:
        id: id that the client was told.
        parent: response after which it went on, which may have been deleted; None: none.
        document: encoded response, as GET returns it.
        messages: encoded messages of the request and of the answer.
        is_background: True if its client does not wait for it.
        is_running: True while it still changes; no request can go on from it then.
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
        """Estimated bytes that the response takes in memory."""
        return len(self.document) + len(self.messages) + _OVERHEAD_BYTES

    def list_messages(self) -> list[bytes]:
        """Return the encoded messages of the conversation up to this response, in order."""
        parts: list[bytes] = []
        each: KeptResponse | None = self
        while each is not None:
            parts.append(each.messages)
            each = each.parent
        return parts[::-1]


class _Conversation:
    """All stored responses that descend from the same first response."""

    def __init__(self, owner: bytes) -> None:
        self.owner = owner
        self.ids: set[str] = set()
        """Ids of the conversation's responses that were not deleted."""
        self.size_bytes = 0
        self.used_s = 0.0


class _Shelf:
    """The stored responses of one client, by id and by conversation."""

    def __init__(self) -> None:
        self.responses: dict[str, KeptResponse] = {}
        self.conversations: OrderedDict[_Conversation, None] = OrderedDict()
        """Conversations of the client in the order of their last use, least recently used first."""
        self.size_bytes = 0


class KeptResponses:
    """The stored responses by client and id.

    Args:
        max_bytes: limit of bytes for each client; 0: nothing is stored.
        max_idle_s: seconds after its last use at which a conversation is dropped.
        max_total_bytes: limit of bytes for all clients together; None: no limit.
    """

    def __init__(
        self, max_bytes: int, max_idle_s: float, *, max_total_bytes: int | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self._max_idle_s = max_idle_s
        self._max_total_bytes = max_total_bytes
        self._shelves: dict[bytes, _Shelf] = {}
        """Conversations by client, for clients that have any."""
        self._conversations: OrderedDict[_Conversation, None] = OrderedDict()
        """Conversations of all clients in order of use, least recently used first."""
        self._num_bytes = 0
        self._lock = threading.Lock()

    def find(self, owner: bytes, response_id: str, now_s: float, field: str = "") -> KeptResponse:
        """Return a stored response, and mark its conversation as the most recently used.

        Args:
            owner: digest of the client's key.
            response_id: id that the client was told.
            now_s: monotonic seconds.
            field: field of the request that has the id, for errors.

        Raises:
            NotFoundError: it was never stored, was dropped, or is another client's.
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
        """Store a response; others may be dropped to make room.

        Does nothing if the conversation that it goes on from has been dropped meanwhile.
        """
        with self._lock:
            self._open(owner, now_s)
            parent = response.parent
            conversation = _Conversation(owner) if parent is None else parent.conversation
            if parent is not None and conversation not in self._conversations:
                # The conversation was dropped while its next response was generated: the response
                # is dropped too, since it cannot be continued without the earlier ones.
                return
            shelf = self._shelves.setdefault(owner, _Shelf())
            if parent is not None:
                parent.num_children += 1
            response.conversation = conversation
            conversation.ids.add(response.id)
            shelf.responses[response.id] = response
            self._resize(conversation, response.size_bytes)
            self._touch(shelf, conversation, now_s)
            self._shrink(shelf)

    def update(
        self, owner: bytes, response: KeptResponse, document: bytes, messages: bytes
    ) -> None:
        """Replace the content of a stored response that has ended."""
        with self._lock:
            if response.is_deleted:
                return
            before = response.size_bytes
            response.document, response.messages = document, messages
            response.is_running = False
            if response.conversation in self._conversations:
                self._resize(response.conversation, response.size_bytes - before)
                self._shrink(self._shelves[owner])

    def remove(self, owner: bytes, response_id: str, now_s: float) -> None:
        """Delete a response; later responses of its conversation keep its messages.

        Raises:
            NotFoundError: see ``find``.
        """
        response: KeptResponse | None = self.find(owner, response_id, now_s)
        with self._lock:
            shelf = self._shelves.get(owner)
            if shelf is None or shelf.responses.pop(response_id, None) is None:
                return
            conversation = response.conversation
            conversation.ids.discard(response_id)
            response.is_deleted = True
            if not conversation.ids:
                self._drop(conversation)
                return
            while response is not None and response.is_deleted and not response.num_children:
                self._resize(conversation, -response.size_bytes)
                response = response.parent
                if response is not None:
                    response.num_children -= 1

    def measure(self, owner: bytes) -> int:
        """Return the estimated bytes of a client's responses."""
        with self._lock:
            shelf = self._shelves.get(owner)
            return 0 if shelf is None else shelf.size_bytes

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all clients' responses."""
        return self._num_bytes

    @property
    def num_clients(self) -> int:
        """Number of clients with stored responses."""
        return len(self._shelves)

    def _open(self, owner: bytes, now_s: float) -> _Shelf | None:
        """Drop conversations of all clients that were unused too long; return what is stored of
        this client, or None.
        """
        while self._conversations:
            oldest = next(iter(self._conversations))
            if now_s - oldest.used_s <= self._max_idle_s:
                break
            self._drop(oldest)
        return self._shelves.get(owner)

    def _touch(self, shelf: _Shelf, conversation: _Conversation, now_s: float) -> None:
        conversation.used_s = now_s
        for order in (shelf.conversations, self._conversations):
            order[conversation] = None
            order.move_to_end(conversation)

    def _resize(self, conversation: _Conversation, change: int) -> None:
        conversation.size_bytes += change
        self._shelves[conversation.owner].size_bytes += change
        self._num_bytes += change

    def _drop(self, conversation: _Conversation) -> None:
        shelf = self._shelves[conversation.owner]
        for each in conversation.ids:
            del shelf.responses[each]
        self._resize(conversation, -conversation.size_bytes)
        del shelf.conversations[conversation], self._conversations[conversation]
        if not shelf.conversations:
            del self._shelves[conversation.owner]

    def _shrink(self, shelf: _Shelf) -> None:
        while shelf.conversations and shelf.size_bytes > self.max_bytes:
            self._drop(next(iter(shelf.conversations)))
        while self._max_total_bytes is not None and self._num_bytes > self._max_total_bytes:
            largest = max(self._shelves.values(), key=lambda each: each.size_bytes)
            self._drop(next(iter(largest.conversations)))
