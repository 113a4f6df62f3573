"""The client of a request: the name by which clients get shares of the server's work.

A client is named by its API key or, on a server without keys, by its IP address. Without keys, all
requests that come through one proxy count as one client.
"""

from contextvars import ContextVar

__all__ = ["BATCHES", "current_client"]

BATCHES = "batches"
"""Name of the client of all requests of batches."""

current_client: ContextVar[str] = ContextVar("client", default="")
"""Client of the request being handled in this context: a digest of its key, or its address."""
