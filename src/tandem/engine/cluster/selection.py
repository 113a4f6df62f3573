"""Which instances a request goes to. Pure: views of the instances in, a route out.

``Policy`` is the seam for other policies; ``make_policy`` makes those that ``cluster.policy``
names. ``LeastLoadedPolicy`` takes the instance with the fewest prompt tokens to compute before and
for the request, so a cached prefix counts as what it saves.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.core.wire import GROWTH_BLOCKS, AddRequest
from tandem.engine.cluster.machine import Alone, InstanceRef, NoRoute, Pair, Place

__all__ = ["InstanceView", "LeastLoadedPolicy", "Policy", "PrefixAffinity", "Route", "make_policy"]

Route = Pair | Alone | NoRoute

AFFINITY_TOKENS = 64
"""Tokens between two remembered points of a prompt."""
MAX_AFFINITY_KEYS = 1 << 16
"""Remembered points, some 100 bytes each."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance that serves, as the policy sees it.

    Attributes:
        ref: its present run.
        role: of the instance; in an emergency each role serves a request alone.
        sources: names of the prefill instances whose blocks it can read.
        num_blocks: of its KV.
        block_size: tokens.
        max_model_len: tokens.
        queued_tokens: that it has to compute before their requests decode.
        num_decoding: requests that decode there, or will.
        used_blocks: that its requests need now, or will read.
        largest_blocks: of the longest of them at its full length.
    """

    ref: InstanceRef
    role: Literal["unified", "prefill", "decode"]
    sources: frozenset[str] = frozenset()
    num_blocks: int = 0
    block_size: int = 1
    max_model_len: int = 1
    queued_tokens: int = 0
    num_decoding: int = 0
    used_blocks: int = 0
    largest_blocks: int = 0


class Policy(Protocol):
    """Chooses instances. Pure."""

    def choose(
        self, place: Place, request: AddRequest, views: Sequence[InstanceView]
    ) -> Route | None:
        """Return where a request goes; None: wait until another instance serves.

        Args:
            place: what is asked for, and which runs of instances are not to be tried again.
            request: as the client sent it.
            views: instances that serve now.
        """
        ...


class PrefixAffinity:
    """Which instance was last sent a prompt that begins alike; a bounded LRU map."""

    def __init__(self, max_keys: int = MAX_AFFINITY_KEYS) -> None:
        self._names: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._max_keys = max_keys

    def match(self, kind: str, request: AddRequest) -> tuple[str | None, int]:
        """Return the instance that saw the longest prefix of a prompt, and its tokens."""
        found: tuple[str | None, int] = (None, 0)
        for num_tokens, key in _list_keys(request):
            name = self._names.get((kind, key))
            if name is None:
                break
            found = (name, num_tokens)
        return found

    def note(self, kind: str, request: AddRequest, name: str) -> None:
        """Remember that an instance was sent a prompt."""
        for _, key in _list_keys(request):
            self._names[kind, key] = name
            self._names.move_to_end((kind, key))
        while len(self._names) > self._max_keys:
            self._names.popitem(last=False)


class LeastLoadedPolicy:
    """The least loaded prefill and decode instance, where a prefix seen before counts as done."""

    def __init__(self, affinity: PrefixAffinity | None = None) -> None:
        self._affinity = PrefixAffinity() if affinity is None else affinity

    def choose(
        self, place: Place, request: AddRequest, views: Sequence[InstanceView]
    ) -> Route | None:
        """Return where a request goes; see ``Policy.choose``."""
        usable = [view for view in views if view.ref not in place.avoid]
        if place.is_held:
            return self._choose_for_held(place, request, usable)
        pairs = [
            (prefill, decode)
            for prefill in usable
            for decode in usable
            if prefill.role == "prefill"
            and decode.role == "decode"
            and prefill.ref.name in decode.sources
        ]
        if pairs and place.needs_decode:
            return self._choose_pair(place, request, pairs)
        if not usable:
            return NoRoute() if views else None
        return self._choose_alone(place, request, usable)

    def _choose_for_held(
        self, place: Place, request: AddRequest, usable: Sequence[InstanceView]
    ) -> Route:
        assert place.prefill is not None, "blocks are held by nobody"
        name = place.prefill.name
        readers = [view for view in usable if view.role == "decode" and name in view.sources]
        if not readers:
            return NoRoute()
        return Pair(None, self._choose_decode(request, readers).ref)

    def _choose_pair(
        self,
        place: Place,
        request: AddRequest,
        pairs: Iterable[tuple[InstanceView, InstanceView]],
    ) -> Pair:
        by_prefill: dict[InstanceView, list[InstanceView]] = {}
        for prefill, decode in pairs:
            by_prefill.setdefault(prefill, []).append(decode)
        prefill = self._choose_prefill(request, list(by_prefill))
        decode = self._choose_decode(request, by_prefill[prefill])
        self._affinity.note("prefill", request, prefill.ref.name)
        # Blocks that are read early take room before their prompt is computed. Without room for
        # all of them, requests would wait for each other: one for room here, one for blocks there.
        is_early = place.is_resumed or has_room(decode, request)
        return Pair(prefill.ref, decode.ref if is_early else None)

    def _choose_prefill(self, request: AddRequest, views: Sequence[InstanceView]) -> InstanceView:
        name, num_seen = self._affinity.match("prefill", request)
        prompt_len = len(request.prompt_ids)

        def cost(view: InstanceView) -> tuple[int, int, str]:
            seen = num_seen if view.ref.name == name else 0
            return (view.queued_tokens + prompt_len - seen, view.num_decoding, view.ref.name)

        return min(views, key=cost)

    def _choose_decode(self, request: AddRequest, views: Sequence[InstanceView]) -> InstanceView:
        name, num_seen = self._affinity.match("decode", request)

        def cost(view: InstanceView) -> tuple[int, int, str]:
            # A block that is there already need not be read, nor take more room.
            seen = num_seen // view.block_size if view.ref.name == name else 0
            return (view.num_decoding, view.used_blocks - seen, view.ref.name)

        chosen = min(views, key=cost)
        self._affinity.note("decode", request, chosen.ref.name)
        return chosen

    def _choose_alone(
        self, place: Place, request: AddRequest, usable: Sequence[InstanceView]
    ) -> Alone:
        # Its blocks may still be in the cache where its prompt was computed last.
        if place.is_resumed and any(view.ref == place.prefill for view in usable):
            assert place.prefill is not None
            return Alone(place.prefill)
        for role in ("unified", "prefill", "decode"):
            of_role = [view for view in usable if view.role == role]
            if of_role:
                chosen = self._choose_prefill(request, of_role)
                self._affinity.note("prefill", request, chosen.ref.name)
                return Alone(chosen.ref)
        raise AssertionError("no instance is usable")


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "prefix": LeastLoadedPolicy,
    # It remembers nothing, so no prefix counts as done.
    "load": lambda: LeastLoadedPolicy(PrefixAffinity(max_keys=0)),
}
"""What ``cluster.policy`` may name."""


def make_policy(name: str) -> Policy:
    """Return a new policy by its name, one of ``POLICIES``."""
    return POLICIES[name]()


def has_room(view: InstanceView, request: AddRequest) -> bool:
    """Whether a decode instance has room to read the blocks of a prompt besides all it has.

    Conservative: blocks that requests share are counted for each, and the longest request must be
    able to reach its full length, as the scheduler demands before it loads.
    """
    size = view.block_size
    needed = -(-len(request.prompt_ids) // size) + GROWTH_BLOCKS
    total = min(len(request.prompt_ids) + request.sampling.max_tokens, view.max_model_len)
    largest = max(view.largest_blocks, -(-total // size))
    return view.used_blocks + needed + largest <= view.num_blocks


def _list_keys(request: AddRequest) -> Iterable[tuple[int, bytes]]:
    """Yield the remembered points of a prompt: tokens up to there, and their digest."""
    digest = hashlib.sha256(f"{request.adapter}\0{request.cache_salt}".encode())
    tokens = array("q", request.prompt_ids)
    for end in range(AFFINITY_TOKENS, len(tokens) + 1, AFFINITY_TOKENS):
        digest.update(tokens[end - AFFINITY_TOKENS : end].tobytes())
        yield end, digest.copy().digest()[:16]
