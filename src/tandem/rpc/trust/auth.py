"""Authentication of a control channel: two kinds of trust in the other side.

``local``: a Unix socket in a folder that only this user can enter, with the peer's uid reported by
the kernel. ``cluster``: TCP with the cluster's secret, by ZeroMQ CURVE (Curve25519, encrypted,
replay-proof) with keys derived from the secret. TCP always needs a secret, since loopback is open
to every local user.

Only ``Auth`` holds secrets; no ``repr``, log line, error or argument list has them.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

from tandem.core.errors import ConfigError, NotFoundError, PermissionDeniedError
from tandem.rpc.trust.runtime_dir import check_runtime_dir, make_runtime_dir
from tandem.rpc.wire.endpoint import Endpoint, parse_endpoint

__all__ = [
    "Auth",
    "derive_key_bytes",
    "generate_secret",
    "read_secret",
    "write_secret",
]

MIN_SECRET_BYTES = 16
"""Least length of a secret, 128 bits: HKDF does not slow guessing down, so a secret must not be
guessable.
"""
MAX_SECRET_BYTES = 4096
KEY_BYTES = 32
ZAP_DOMAIN = "tandem"


class Auth:
    """The credentials of one side, and its check of the other side. Made by one of the class
    methods.

    Immutable; may be shared by any number of servers and clients.
    """

    def __init__(
        self,
        *,
        server_secret_key: bytes = b"",
        server_public_key: bytes = b"",
        client_secret_key: bytes = b"",
    ) -> None:
        """Hold the keys, each Z85 text of 40 bytes, or empty if this side does not use it."""
        self.server_public_key = server_public_key
        self._server_secret_key = server_secret_key
        self._client_secret_key = client_secret_key

    @classmethod
    def local(cls) -> Self:
        """Trust the peers that can enter the folder of a Unix socket."""
        return cls()

    @classmethod
    def cluster(cls, secret: str | bytes) -> Self:
        """Trust the peers that know the cluster's secret; see ``generate_secret``.

        Raises: ConfigError if the secret is too short.
        """
        material = secret.encode() if isinstance(secret, str) else secret
        if not MIN_SECRET_BYTES <= len(material) <= MAX_SECRET_BYTES:
            raise ConfigError(
                "rpc.auth",
                f"secret of {len(material)} bytes, need {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
                "take one from generate_secret()",
                field="secret",
            )
        server_key = _derive_key(material, "server")
        return cls(
            server_secret_key=server_key,
            server_public_key=zmq.curve_public(server_key),
            client_secret_key=_derive_key(material, "client"),
        )

    @classmethod
    def for_endpoint(cls, url: str, secret: str | bytes | None = None) -> Self:
        """Choose the kind of trust that fits an address.

        A Unix socket is ``local`` and needs no secret; TCP is ``cluster`` and needs one.

        Raises: PermissionDeniedError for TCP without a secret; ConfigError for a bad address.
        """
        endpoint = parse_endpoint(url)
        if endpoint.is_local_socket:
            return cls.local()
        if secret is None:
            raise _refuse_open_tcp(endpoint)
        return cls.cluster(secret)

    def __repr__(self) -> str:
        return f"Auth({'cluster' if self.uses_curve else 'local'})"

    @property
    def uses_curve(self) -> bool:
        """True if connections are encrypted and their keys checked."""
        return bool(self.server_public_key)

    def admits(self, client_public_key: bytes) -> bool:
        """Return True if a client that has proved this key (Z85) may connect."""
        return hmac.compare_digest(client_public_key, zmq.curve_public(self._client_secret_key))

    def check_bind(self, endpoint: Endpoint) -> None:
        """Check that a server may bind ``endpoint``. Creates the folder of a Unix socket.

        Raises: PermissionDeniedError for TCP without a secret, or a folder that others can enter.
        """
        self._check_fits(endpoint)
        if endpoint.path is not None and (
            make_runtime_dir(endpoint.path.parent) != endpoint.path.parent
        ):
            raise ConfigError(
                "rpc.bind",
                f"{endpoint.path.parent} leaves too little room for a socket name: take the "
                "folder from make_runtime_dir()",
                field="endpoint",
            )

    def check_connect(self, endpoint: Endpoint) -> None:
        """Check that a client may connect to ``endpoint``.

        Raises: PermissionDeniedError as ``check_bind``; NotFoundError if the folder of the Unix
            socket does not exist; ConfigError if the port is missing.
        """
        self._check_fits(endpoint)
        if endpoint.path is not None:
            check_runtime_dir(endpoint.path.parent)
        elif endpoint.port == 0:
            raise ConfigError(
                "rpc.connect", f"{endpoint.url!r} names no port to connect to", field="endpoint"
            )

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Set the authentication options of a listening socket, before it binds."""
        if self.uses_curve:
            socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._server_secret_key)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            # The kernel reports the peer's uid (SO_PEERCRED); ZeroMQ closes connections of any
            # other uid.
            socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Set the authentication options of a connecting socket, before it connects."""
        if self.uses_curve:
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._client_secret_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._client_secret_key))
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public_key)

    def _check_fits(self, endpoint: Endpoint) -> None:
        if not endpoint.is_local_socket and not self.uses_curve:
            raise _refuse_open_tcp(endpoint)
        if endpoint.is_local_socket and self.uses_curve:
            raise ConfigError(
                "rpc.auth",
                f"{endpoint.url!r} is a Unix socket, protected by its folder: use Auth.local()",
                field="auth",
            )


def generate_secret() -> str:
    """Return a new printable secret of 256 random bits."""
    return secrets.token_urlsafe(KEY_BYTES)


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to a new file of mode 0600.

    Raises: FileExistsError instead of replacing a file that other processes may have open.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")


def read_secret(path: Path) -> str:
    """Read a secret from a file that only this user can read.

    Raises: NotFoundError if it does not exist; PermissionDeniedError unless it is regular, owned by
        this user and of mode 0600 or less; ConfigError if it is no text or too long.
    """
    try:
        return _read_private(path, MAX_SECRET_BYTES).decode().strip()
    except UnicodeDecodeError:
        raise ConfigError("rpc.auth", f"{path} is not UTF-8 text", field="secret") from None


def derive_key_bytes(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Return the first 32 bytes of HKDF-SHA256, which are one block (RFC 5869 section 2)."""
    pseudo_random_key = hmac.digest(salt, secret, "sha256")
    return hmac.digest(pseudo_random_key, info + b"\x01", "sha256")


def _derive_key(secret: bytes, side: str) -> bytes:
    """Return a Curve25519 secret key in Z85, derived from the secret by HKDF-SHA256.

    Any 32 bytes make a key, since X25519 clamps them (RFC 7748 section 5).
    """
    label = f"tandem rpc v1 cluster {side}".encode()
    return z85.encode(derive_key_bytes(secret, salt=b"tandem rpc", info=label))


def _read_private(path: Path, max_bytes: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError("rpc.auth", f"{path} does not exist") from None
    except OSError as error:
        raise PermissionDeniedError("rpc.auth", f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionDeniedError("rpc.auth", f"{path} is not a regular file of ours")
        if mode & 0o077:
            raise PermissionDeniedError(
                "rpc.auth", f"{path} has mode {mode:04o}: others have access, chmod it to 0600"
            )
        data = os.read(descriptor, max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise ConfigError("rpc.auth", f"{path} is larger than {max_bytes} bytes")
    return data


def _refuse_open_tcp(endpoint: Endpoint) -> PermissionDeniedError:
    reach = (
        "loopback is open to every local user"
        if endpoint.is_loopback
        else ("it is open to the network")
    )
    return PermissionDeniedError(
        "rpc.auth",
        f"{endpoint.url!r} without a secret: {reach}; set a secret or use a Unix socket",
        field="endpoint",
    )
