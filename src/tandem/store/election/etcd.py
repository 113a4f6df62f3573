"""Leadership in etcd v3, by the JSON gateway that every etcd serves beside gRPC.

There are two keys under a prefix. ``leader``, bound to a lease, has address and epoch of the
leader; ``epoch`` counts the terms and is never deleted. One transaction writes both, and fails if
there is a leader or the count has changed. (etcd's own revision could be an epoch too, but all
users of that etcd share it, and an object's version has only 23 bits for the epoch.) Reads are
linearizable, etcd's default.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.core.clock import Clock
from tandem.core.errors import ConflictError, CorruptionError, UnsupportedError
from tandem.store.config import StoreElectionConfig
from tandem.store.election.campaign import Claim
from tandem.store.election.election import Holder
from tandem.store.election.etcd_gateway import (
    EtcdGateway,
    Id,
    KeyValue,
    Txn,
    decode_value,
    encode,
    encode_bytes,
)

__all__ = ["LEADER_KEY", "EtcdBackend", "encode_leader"]

LEADER_KEY = "leader"
"""Name of the leader's key under the store's prefix."""


class _Granted(msgspec.Struct):
    lease: Id = msgspec.field(name="ID")
    ttl: Id = msgspec.field(name="TTL", default="0")


class _KeptAlive(msgspec.Struct):
    ttl: Id = msgspec.field(name="TTL", default="0")


class _KeepAlive(msgspec.Struct):
    result: _KeptAlive


class _Leader(msgspec.Struct, forbid_unknown_fields=False):
    address: Annotated[str, Meta(max_length=1000)]
    epoch: Annotated[int, Meta(ge=1, lt=2**62)]


class EtcdBackend(EtcdGateway):
    """An ``ElectionBackend`` on etcd. An async context manager.

    If an endpoint executed a claim without answering, the claim is recognised by this process's
    lease.

    Raises: as ``EtcdGateway``.
    """

    def __init__(self, config: StoreElectionConfig, *, clock: Clock) -> None:
        super().__init__(config, clock=clock)
        self._lease = ""
        """The etcd lease id of this process's term or claim; empty without one."""
        self._leader_key = self.key(LEADER_KEY)
        self._epoch_key = self.key("epoch")

    async def observe(self, timeout_s: float) -> Holder | None:
        """Return the leader from its key in etcd; None if there is none."""
        pair = await self.read(self._leader_key, self.deadline_s(timeout_s))
        return None if pair is None else _decode_leader(pair)

    async def acquire(self, address: str, *, ttl_s: int, min_epoch: int, timeout_s: float) -> Claim:
        """Claim the leadership for ``ttl_s`` in one transaction: under a new lease of etcd, with a
        new epoch (number of the term).

        Raises: ConflictError if another candidate raised the epoch at the same moment: try again.
        """
        deadline_s = self.deadline_s(timeout_s)
        self._lease = ""
        granted = await self.post("lease/grant", {"TTL": ttl_s}, _Granted, deadline_s)
        if int(granted.ttl) < ttl_s:
            raise UnsupportedError(
                "store.election", f"etcd granted {granted.ttl} s of {ttl_s}", field="ttl_s"
            )
        self._lease = granted.lease
        counted = await self.read(self._epoch_key, deadline_s)
        last = 0 if counted is None else _decode_epoch(counted)
        ours = Holder(address, max(last, min_epoch) + 1)
        answer = await self.post("kv/txn", self._describe_claim(ours, counted), Txn, deadline_s)
        if answer.succeeded:
            return Claim(ours, is_ours=True)
        held = [pair for response in answer.responses for pair in response.response_range.kvs]
        if held and held[0].lease == self._lease:
            # The leader's key has this process's lease: an endpoint that did not answer has
            # executed an earlier copy of the claim.
            return Claim(_decode_leader(held[0]), is_ours=True)
        await self.release(deadline_s - self._clock.now_s())
        if held:
            return Claim(_decode_leader(held[0]), is_ours=False)
        raise ConflictError("store.election", "another candidate was quicker: try again")

    def _describe_claim(self, ours: Holder, counted: KeyValue | None) -> dict[str, Any]:
        return {
            "compare": [
                {"key": self._leader_key, "target": "CREATE", "create_revision": "0"},
                {
                    "key": self._epoch_key,
                    "target": "MOD",
                    "mod_revision": "0" if counted is None else counted.mod_revision,
                },
            ],
            "success": [
                {
                    "request_put": {
                        "key": self._leader_key,
                        "value": encode_leader(ours),
                        "lease": self._lease,
                    }
                },
                {"request_put": {"key": self._epoch_key, "value": encode(str(ours.epoch))}},
            ],
            "failure": [{"request_range": {"key": self._leader_key}}],
        }

    async def renew(self, timeout_s: float) -> bool:
        """Renew the lease, and return False if the leader's key is no longer bound to it."""
        deadline_s = self.deadline_s(timeout_s)
        if not self._lease:
            return False
        kept = await self.post("lease/keepalive", {"ID": self._lease}, _KeepAlive, deadline_s)
        if int(kept.result.ttl) <= 0:
            return False
        # Check the key too: the lease may be alive although an operator or a restored backup has
        # removed the key.
        pair = await self.read(self._leader_key, deadline_s)
        return pair is not None and pair.lease == self._lease

    async def release(self, timeout_s: float) -> None:
        """Revoke the lease, which removes the leader's key."""
        lease, self._lease = self._lease, ""
        if lease:
            deadline_s = self.deadline_s(timeout_s)
            await self.post("lease/revoke", {"ID": lease}, dict, deadline_s, absent={})


def encode_leader(holder: Holder) -> str:
    """Return the value that etcd's key of the leader has in a term (time of one leader). Each term
    has a different value.
    """
    return encode_bytes(msgspec.json.encode(_Leader(holder.address, holder.epoch)))


def _decode_leader(pair: KeyValue) -> Holder:
    value = decode_value(pair)
    try:
        leader = msgspec.json.decode(value, type=_Leader)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            "store.election", f"the leader's key holds {value[:80]!r}: {error}"
        ) from None
    return Holder(leader.address, leader.epoch)


def _decode_epoch(pair: KeyValue) -> int:
    value = decode_value(pair)
    if not value.isdigit() or len(value) > 18:
        raise CorruptionError("store.election", f"the epoch's key holds {value[:80]!r}, no number")
    return int(value)
