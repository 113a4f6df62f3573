"""The client of a request: the name by which clients get shares of the server's work.

It is the API key or, on a server without keys, the address. Behind a proxy without keys, all
requests are of one client.
"""

from contextvars import ContextVar

__all__ = ["BATCHES", "current_client"]

BATCHES = "batches"
"""Name of the client of all requests of batches."""

current_client: ContextVar[str] = ContextVar("client", default="")
"""Client of the request being handled in this context: a digest of its key, or its address."""
