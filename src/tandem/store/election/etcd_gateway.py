"""Requests to etcd v3, by the JSON gateway that every etcd serves beside gRPC."""

import base64
import binascii
import ssl
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

from tandem.core.clock import Clock
from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
    UnsupportedError,
)
from tandem.store.config import StoreElectionConfig

if TYPE_CHECKING:
    import httpx

__all__ = [
    "EtcdGateway",
    "Id",
    "KeyValue",
    "Range",
    "Txn",
    "decode_value",
    "encode",
    "encode_bytes",
]

T = TypeVar("T")

MAX_ANSWER_BYTES = 2**20
OK = 200
"""HTTP status of a successful answer."""
NOT_FOUND, UNAUTHENTICATED = 5, 16
"""gRPC codes that this module handles."""
DENIED = (3, 7)
"""gRPC codes for a wrong name or password, and for missing permission on a key."""
Id = Annotated[str, Meta(pattern=r"^-?[0-9]{1,20}\Z")]
"""A 64-bit number, which the gateway writes as a string, and omits if it is zero."""


class KeyValue(msgspec.Struct):
    """One key-value pair, as etcd returns it."""

    key: str = ""
    mod_revision: Id = "0"
    value: str = ""
    lease: Id = "0"


class Range(msgspec.Struct):
    """The answer to a range request."""

    kvs: list[KeyValue] = []
    more: bool = False


class _RangeResponse(msgspec.Struct):
    response_range: Range = msgspec.field(default_factory=Range)


class Txn(msgspec.Struct):
    """etcd's answer to a transaction."""

    succeeded: bool = False
    responses: list[_RangeResponse] = []


class _Authenticated(msgspec.Struct):
    token: str


class _Fault(msgspec.Struct):
    code: int = 0
    message: str = ""


class EtcdGateway:
    """A client of etcd's JSON gateway. An async context manager; requests may run concurrently.

    Endpoints are tried in turn, beginning with the one that answered last.

    Raises: UnsupportedError if ``httpx`` is missing; ConfigError if key files cannot be read.
    """

    def __init__(self, config: StoreElectionConfig, *, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._endpoints = [url.rstrip("/") for url in config.endpoints]
        self._token = ""
        self._http = _make_client(config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def key(self, name: str) -> str:
        """Return the encoded key of a name under the store's prefix."""
        return encode(f"{self._config.prefix.rstrip('/')}/{name}")

    def deadline_s(self, timeout_s: float) -> float:
        """Return the deadline of a request that begins now, on the gateway's clock."""
        return self._clock.now_s() + timeout_s

    async def read(self, key: str, deadline_s: float) -> KeyValue | None:
        """Return the pair of an encoded key; None if the key is missing."""
        found = await self.post("kv/range", {"key": key}, Range, deadline_s)
        return found.kvs[0] if found.kvs else None

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[T],
        deadline_s: float,
        *,
        absent: T | None = None,
    ) -> T:
        """Send a request to one endpoint after the other until one answers. ``absent``, if given,
        is returned for NOT_FOUND.
        """
        if self._config.user and not self._token:
            await self._authenticate(deadline_s)
        try:
            return await self._post_any(path, body, kind, deadline_s, absent=absent)
        except _StaleTokenError:
            # Authenticate again: tokens end after some minutes without use, or when etcd restarts.
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
            # Divide the time left, so that an endpoint that hangs leaves time for the others.
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
        except (httpx.HTTPError, OSError) as error:  # A peer's TLS alert is a plain SSLError.
            raise PeerLostError("store.election", f"etcd at {url}: {error!r}") from None
        if status != OK:
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
    # Ignore the environment's proxy, which is meant for outside hosts.
    return httpx.AsyncClient(verify=tls, trust_env=False, follow_redirects=False)


def encode(text: str) -> str:
    """Return text in the base64 encoding that the gateway expects."""
    return encode_bytes(text.encode())


def encode_bytes(data: bytes) -> str:
    """Return bytes in the base64 encoding that the gateway expects."""
    return base64.b64encode(data).decode()


def decode_value(pair: KeyValue) -> bytes:
    """Return the decoded value of a key. Raises: CorruptionError (it is not in base64)."""
    try:
        return base64.b64decode(pair.value, validate=True)
    except binascii.Error:
        raise CorruptionError("store.election", f"etcd answered {pair.value[:80]!r}") from None
