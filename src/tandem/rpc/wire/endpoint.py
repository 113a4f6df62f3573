"""Addresses of endpoints: parsing, and whether an address stays on this machine."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ConfigError, PermissionDeniedError

__all__ = ["MAX_SOCKET_PATH_BYTES", "Endpoint", "parse_endpoint"]

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket: ``sun_path`` of Linux has 108 bytes, including the closing
zero.
"""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address: a Unix socket (``path``) or TCP (``host``, ``port``)."""

    url: str
    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local_socket(self) -> bool:
        """True if this is a Unix socket."""
        return self.path is not None

    @property
    def is_loopback(self) -> bool:
        """True if TCP stays on this machine. A host name other than localhost counts as remote."""
        if self.is_local_socket:
            return False
        if self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return address.is_loopback if mapped is None else mapped.is_loopback


def parse_endpoint(url: str) -> Endpoint:
    """Parse ``ipc:///absolute/path`` or ``tcp://host:port``.

    For a server, port 0 asks for any free port and host ``*`` means every interface.

    Raises: ConfigError for anything else; PermissionDeniedError for abstract and wildcard Unix
        sockets, which no folder protects.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or not rest:
        raise _refuse(url, "give ipc:///absolute/path or tcp://host:port")
    if scheme == "ipc":
        return _parse_ipc(url, rest)
    if scheme == "tcp":
        return _parse_tcp(url, rest)
    raise _refuse(url, f"scheme {scheme!r} is not served: use ipc or tcp")


def _parse_ipc(url: str, rest: str) -> Endpoint:
    if rest[0] in "@*":
        raise PermissionDeniedError(
            "rpc.endpoint",
            f"{url!r}: abstract and wildcard sockets have no folder to protect them: give a path",
            field="endpoint",
        )
    if not rest.startswith("/"):
        raise _refuse(url, "a socket path must be absolute")
    if "\0" in rest:
        raise _refuse(url, "a socket path cannot hold a zero byte")
    size_bytes = len(rest.encode())
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise _refuse(
            url,
            f"socket path of {size_bytes} bytes, limit {MAX_SOCKET_PATH_BYTES}: take a folder "
            "from make_runtime_dir()",
        )
    return Endpoint(url, path=Path(rest))


def _parse_tcp(url: str, rest: str) -> Endpoint:
    host, separator, port_text = rest.rpartition(":")
    if not separator or not host:
        raise _refuse(url, "give tcp://host:port")
    port_text = "0" if port_text == "*" else port_text
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) < 2**16):
        raise _refuse(url, f"port {port_text!r} is not a number from 0 to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return Endpoint(url, host=host, port=int(port_text))


def _refuse(url: str, what: str) -> ConfigError:
    return ConfigError("rpc.endpoint", f"{url!r}: {what}", field="endpoint")
