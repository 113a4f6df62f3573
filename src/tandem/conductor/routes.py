"""The question to a policy and its answers, as the request's state machine speaks them."""

from dataclasses import dataclass, field

__all__ = ["Alone", "InstanceRef", "NoRoute", "Pair", "Place", "Route"]


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """One run of an instance."""

    name: str
    incarnation: int
    """Number of the run; each restart of the instance gives a new one."""
    identity: str = field(default="", compare=False)
    """``InstanceInfo.kv_identity`` of this run; empty while it does not serve."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The policy's answer: prefill here, decode there; or, while blocks are held, decode there.

    Attributes:
        prefill: None while blocks are held already.
        decode: None: chosen when the prefill is over.
    """

    prefill: InstanceRef | None
    decode: InstanceRef | None


@dataclass(frozen=True, slots=True)
class Alone:
    """The policy's answer: one instance serves the whole request."""

    instance: InstanceRef


@dataclass(frozen=True, slots=True)
class NoRoute:
    """The policy's answer: no running instance may still be tried.

    Attributes:
        is_foreign: because all serve another model than the one whose tokens were sent.
    """

    is_foreign: bool = False


Route = Pair | Alone | NoRoute


@dataclass(frozen=True, slots=True)
class Place:
    """A question to the policy, answered with ``Pair``, ``Alone`` or ``NoRoute``.

    Attributes:
        is_held: blocks are held: only ``Pair(None, decode)`` or ``NoRoute``, and at once. Else the
            answer may wait until an instance comes back.
        avoid: runs of instances that refused or lost this request.
        prefill: where its blocks are held, or its prompt was last computed; None: nowhere.
        needs_decode: False: there is nothing to generate after the first token.
        is_resumed: tokens were sent already: a ``Pair`` names both instances.
        identity: of the model that computed those tokens (``InstanceInfo.kv_identity``): only
            instances with the same one may go on; None: nothing was sent, all may serve.
    """

    is_held: bool
    avoid: frozenset[InstanceRef]
    prefill: InstanceRef | None
    needs_decode: bool
    is_resumed: bool
    identity: str | None = None
