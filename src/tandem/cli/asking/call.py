"""One call of a running server by a command; the answer is decoded to a struct."""

from typing import Any, TypeVar

import msgspec

from tandem.cli.asking.local_server import trim_url
from tandem.core.errors import ConfigError, PeerLostError

__all__ = ["call_server"]

_T = TypeVar("_T")


def call_server(
    url: str,
    path: str,
    kind: type[_T],
    *,
    body: Any = None,
    api_key: str | None = None,
    timeout_s: float = 30.0,
) -> _T:
    """Send a GET, or a POST if there is a body, and return the decoded answer.

    Args:
        url: address of the server, with or without ``/v1``.
        path: path of the endpoint.
        kind: type of the answer.
        body: object that is sent as JSON; None: a GET is sent.
        api_key: API key of the caller; None: none.
        timeout_s: seconds without any byte of an answer after which the call fails.

    Raises: PeerLostError (no answer, or not from a server of this version); ConfigError (the server
        refuses the request).
    """
    import httpx

    place = trim_url(url) + path
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(timeout=timeout_s, trust_env=False, headers=headers) as client:
            if body is None:
                reply = client.get(place)
            else:
                headers = {"Content-Type": "application/json"}
                reply = client.post(place, content=msgspec.json.encode(body), headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        what = f"no answer from {url}: {error}: does a server run there?"
        raise PeerLostError("cli.call", what) from error
    if reply.status_code != 200:
        what = f"{url} answers {reply.status_code}: {reply.text[:500]}"
        raise ConfigError("cli.call", what)
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except msgspec.MsgspecError as error:
        what = f"{url} is no server of this version: {error}"
        raise PeerLostError("cli.call", what) from error
