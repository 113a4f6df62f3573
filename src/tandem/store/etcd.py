"""Leadership kept in etcd v3, by the JSON gateway that every etcd serves beside gRPC.

Two keys under a prefix: ``leader``, bound to a lease, holds address and epoch of the leader;
``epoch`` counts the terms and is never deleted. Both are written by one transaction, which fails
if there is a leader or the count has moved. (The revision of etcd itself would do as an epoch as
well, but is shared with all that lives in that etcd, and versions of objects hold the epoch in 23
bits.) Reads are linearizable, etcd's default.
"""

import base64
import binascii
import logging
import ssl
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

from tandem.core.clock import Clock
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    DeadlineError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
    UnsupportedError,
)
from tandem.store.campaign import Claim
from tandem.store.config import StoreElectionConfig
from tandem.store.election import Holder

if TYPE_CHECKING:
    import httpx

__all__ = ["EtcdBackend"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_ANSWER_BYTES = 2**20
NOT_FOUND, UNAUTHENTICATED = 5, 16
"""Codes of gRPC that mean something to us."""
DENIED = (3, 7)
"""Wrong name or password; not allowed to touch the key."""
Id = Annotated[str, Meta(pattern=r"^-?[0-9]{1,20}\Z")]
"""The gateway writes 64-bit numbers as strings, and leaves out what is zero."""


class _Granted(msgspec.Struct):
    lease: Id = msgspec.field(name="ID")
    ttl: Id = msgspec.field(name="TTL", default="0")


class _KeptAlive(msgspec.Struct):
    ttl: Id = msgspec.field(name="TTL", default="0")


class _KeepAlive(msgspec.Struct):
    result: _KeptAlive


class _KeyValue(msgspec.Struct):
    mod_revision: Id = "0"
    value: str = ""
    lease: Id = "0"


class _Range(msgspec.Struct):
    kvs: list[_KeyValue] = []


class _RangeResponse(msgspec.Struct):
    response_range: _Range = msgspec.field(default_factory=_Range)


class _Txn(msgspec.Struct):
    succeeded: bool = False
    responses: list[_RangeResponse] = []


class _Authenticated(msgspec.Struct):
    token: str


class _Fault(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Leader(msgspec.Struct, forbid_unknown_fields=False):
    address: Annotated[str, Meta(max_length=1000)]
    epoch: Annotated[int, Meta(ge=1, lt=2**62)]


class EtcdBackend:
    """An ``ElectionBackend``. An async context manager.

    Endpoints are asked in turn, beginning with the one that answered last; what may have been
    carried out by one that did not answer is recognised, since it bears our lease.

    Raises: UnsupportedError if ``httpx`` is missing; ConfigError if files of keys cannot be read.
    """

    def __init__(self, config: StoreElectionConfig, *, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._endpoints = [url.rstrip("/") for url in config.endpoints]
        self._lease = ""
        """Of our leadership, or attempt at it; empty for none."""
        self._token = ""
        prefix = config.prefix.rstrip("/")
        self._leader_key = _encode(f"{prefix}/leader")
        self._epoch_key = _encode(f"{prefix}/epoch")
        self._http = _make_client(config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def observe(self, timeout_s: float) -> Holder | None:
        """See ``ElectionBackend``."""
        pair = await self._read(self._leader_key, self._clock.now_s() + timeout_s)
        return None if pair is None else _decode_leader(pair)

    async def acquire(self, address: str, *, ttl_s: int, min_epoch: int, timeout_s: float) -> Claim:
        """See ``ElectionBackend``.

        Raises: ConflictError if somebody counted in the same moment: try again.
        """
        deadline_s = self._clock.now_s() + timeout_s
        self._lease = ""
        granted = await self._post("lease/grant", {"TTL": ttl_s}, _Granted, deadline_s)
        if int(granted.ttl) < ttl_s:
            raise UnsupportedError(
                "store.election", f"etcd granted {granted.ttl} s of {ttl_s}", field="ttl_s"
            )
        self._lease = granted.lease
        counted = await self._read(self._epoch_key, deadline_s)
        last = 0 if counted is None else _decode_epoch(counted)
        ours = Holder(address, max(last, min_epoch) + 1)
        answer = await self._post("kv/txn", self._describe_claim(ours, counted), _Txn, deadline_s)
        if answer.succeeded:
            return Claim(ours, is_ours=True)
        held = [pair for response in answer.responses for pair in response.response_range.kvs]
        if held and held[0].lease == self._lease:
            # An earlier copy of the request was carried out by an endpoint that did not answer.
            return Claim(_decode_leader(held[0]), is_ours=True)
        await self.release(deadline_s - self._clock.now_s())
        if held:
            return Claim(_decode_leader(held[0]), is_ours=False)
        raise ConflictError("store.election", "another candidate was quicker: try again")

    def _describe_claim(self, ours: Holder, counted: _KeyValue | None) -> dict[str, Any]:
        value = msgspec.json.encode(_Leader(ours.address, ours.epoch))
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
                        "value": base64.b64encode(value).decode(),
                        "lease": self._lease,
                    }
                },
                {"request_put": {"key": self._epoch_key, "value": _encode(str(ours.epoch))}},
            ],
            "failure": [{"request_range": {"key": self._leader_key}}],
        }

    async def renew(self, timeout_s: float) -> bool:
        """See ``ElectionBackend``."""
        deadline_s = self._clock.now_s() + timeout_s
        if not self._lease:
            return False
        kept = await self._post("lease/keepalive", {"ID": self._lease}, _KeepAlive, deadline_s)
        if int(kept.result.ttl) <= 0:
            return False
        # The lease may live while an operator, or a restored backup, has removed the key.
        pair = await self._read(self._leader_key, deadline_s)
        return pair is not None and pair.lease == self._lease

    async def release(self, timeout_s: float) -> None:
        """See ``ElectionBackend``."""
        lease, self._lease = self._lease, ""
        if lease:
            deadline_s = self._clock.now_s() + timeout_s
            await self._post("lease/revoke", {"ID": lease}, dict, deadline_s, absent={})

    # The gateway.

    async def _read(self, key: str, deadline_s: float) -> _KeyValue | None:
        found = await self._post("kv/range", {"key": key}, _Range, deadline_s)
        return found.kvs[0] if found.kvs else None

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[T],
        deadline_s: float,
        *,
        absent: T | None = None,
    ) -> T:
        """Ask one endpoint after the other; ``absent`` is the answer to NOT_FOUND, if given."""
        if self._config.user and not self._token:
            await self._authenticate(deadline_s)
        try:
            return await self._post_any(path, body, kind, deadline_s, absent=absent)
        except _StaleTokenError:
            # Tokens end after some minutes without use, or when etcd is restarted.
            await self._authenticate(deadline_s)
        try:
            return await self._post_any(path, body, kind, deadline_s, absent=absent)
        except _StaleTokenError as error:
            raise PermissionDeniedError(error.where, error.what) from None

    async def _authenticate(self, deadline_s: float) -> None:
        self._token = ""
        body = {"name": self._config.user, "password": self._config.password or ""}
        answer = await self._post_any("auth/authenticate", body, _Authenticated, deadline_s)
        self._token = answer.token

    async def _post_any(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[T],
        deadline_s: float,
        *,
        absent: T | None = None,
    ) -> T:
        lost: TandemError | None = None
        for i in range(len(self._endpoints)):
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                break
            # One that hangs must leave time for the others.
            timeout_s = left_s / (len(self._endpoints) - i)
            url = self._endpoints[0]
            try:
                return await self._post_one(url, path, body, kind, timeout_s, absent=absent)
            except (PeerLostError, DeadlineError) as error:
                lost = error
                self._endpoints.append(self._endpoints.pop(0))
        raise lost or DeadlineError("store.election", f"no time left to ask etcd for {path}")

    async def _post_one(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        kind: type[T],
        timeout_s: float,
        *,
        absent: T | None,
    ) -> T:
        import httpx

        headers = {"Authorization": self._token} if self._token else {}
        try:
            async with self._http.stream(
                "POST", f"{url}/v3/{path}", json=body, headers=headers, timeout=timeout_s
            ) as response:
                data = await _read_answer(response, url)
                status = response.status_code
        except httpx.TimeoutException:
            raise DeadlineError(
                "store.election", f"etcd at {url} was silent for {timeout_s:.3f} s"
            ) from None
        except (httpx.HTTPError, OSError) as error:  # The alert of a peer is a plain SSLError.
            raise PeerLostError("store.election", f"etcd at {url}: {error!r}") from None
        if status != httpx.codes.OK:
            if absent is not None and _read_fault(data).code == NOT_FOUND:
                return absent
            raise _describe_fault(url, path, status, _read_fault(data))
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise CorruptionError(
                "store.election", f"{url}/v3/{path} answered what etcd does not: {error}"
            ) from None


class _StaleTokenError(PermissionDeniedError):
    pass


async def _read_answer(response: "httpx.Response", url: str) -> bytes:
    data = bytearray()
    async for piece in response.aiter_bytes():
        data += piece
        if len(data) > MAX_ANSWER_BYTES:
            raise CorruptionError(
                "store.election", f"{url} answers with more than {MAX_ANSWER_BYTES} bytes"
            )
    return bytes(data)


def _read_fault(data: bytes) -> _Fault:
    try:
        return msgspec.json.decode(data, type=_Fault)
    except msgspec.MsgspecError:
        return _Fault(message=data[:200].decode(errors="replace"))


def _describe_fault(url: str, path: str, status: int, fault: _Fault) -> TandemError:
    what = f"{url}/v3/{path} answered {status}: {fault.message or 'nothing'}"
    if fault.code == UNAUTHENTICATED or "invalid auth token" in fault.message:
        return _StaleTokenError("store.election", what)
    if fault.code in DENIED or "authentication" in fault.message:
        return PermissionDeniedError("store.election", what)
    return PeerLostError("store.election", what)


def _make_client(config: StoreElectionConfig) -> "httpx.AsyncClient":
    try:
        import httpx
    except ImportError:
        raise UnsupportedError(
            "store.election", "httpx is missing: pip install 'tandem-llm[etcd]'"
        ) from None
    try:
        tls = ssl.create_default_context(cafile=config.ca_file or None)
        if config.cert_file:
            tls.load_cert_chain(config.cert_file, config.key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "store.election", f"certificates cannot be loaded: {error}", field="store.election"
        ) from None
    # A proxy of the environment is meant for the world outside.
    return httpx.AsyncClient(verify=tls, trust_env=False, follow_redirects=False)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode_value(pair: _KeyValue) -> bytes:
    try:
        return base64.b64decode(pair.value, validate=True)
    except binascii.Error:
        raise CorruptionError("store.election", f"etcd answered {pair.value[:80]!r}") from None


def _decode_leader(pair: _KeyValue) -> Holder:
    value = _decode_value(pair)
    try:
        leader = msgspec.json.decode(value, type=_Leader)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            "store.election", f"the leader's key holds {value[:80]!r}: {error}"
        ) from None
    return Holder(leader.address, leader.epoch)


def _decode_epoch(pair: _KeyValue) -> int:
    value = _decode_value(pair)
    if not value.isdigit() or len(value) > 18:
        raise CorruptionError("store.election", f"the epoch's key holds {value[:80]!r}, no number")
    return int(value)
