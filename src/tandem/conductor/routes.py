"""The question where to run a request, and the possible answers, as its state machine uses them."""

from dataclasses import dataclass, field

__all__ = ["Alone", "InstanceRef", "NoRoute", "Pair", "Place", "Route"]


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """One run of an instance: its process between two restarts."""

    name: str
    incarnation: int
    """Number of the run; each restart of the instance has a new one."""
    identity: str = field(default="", compare=False)
    """``InstanceInfo.kv_identity`` of this run; empty while the instance does not serve."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer to a ``Place``: one instance prefills, another decodes.

    Attributes:
        prefill: None if the blocks of an ended prefill are held already.
        decode: None: it is chosen when the prefill has ended.
    """

    prefill: InstanceRef | None
    decode: InstanceRef | None


@dataclass(frozen=True, slots=True)
class Alone:
    """An answer to a ``Place``: one instance serves the whole request."""

    instance: InstanceRef


@dataclass(frozen=True, slots=True)
class NoRoute:
    """An answer to a ``Place``: none of the running instances can be tried any more.

    Attributes:
        is_foreign: True if all of them serve another model than the one whose tokens were sent.
    """

    is_foreign: bool = False


Route = Pair | Alone | NoRoute


@dataclass(frozen=True, slots=True)
class Place:
    """A question where to run a request, answered with ``Pair``, ``Alone`` or ``NoRoute``.

    Attributes:
        is_held: True if blocks of an ended prefill are held. Then the answer is ``Pair(None,
            decode)`` or ``NoRoute``, at once; otherwise it may wait until an instance comes back.
        avoid: runs of instances that refused or lost this request.
        prefill: run that holds its blocks or last computed its prompt; None: none.
        needs_decode: False if nothing is to be generated after the first token.
        is_resumed: True if tokens were sent already; a ``Pair`` then names both instances.
        identity: KV identity (``InstanceInfo.kv_identity``) of the model that computed those
            tokens. Only instances with the same one are usable; None: no tokens were sent, so all
            are.
    """

    is_held: bool
    avoid: frozenset[InstanceRef]
    prefill: InstanceRef | None
    needs_decode: bool
    is_resumed: bool
    identity: str | None = None
