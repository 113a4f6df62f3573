"""The client of a request: clients share the server's work by this name.

An API key is a client, and without keys an address is. Behind a proxy without keys, all are one.
"""

from contextvars import ContextVar

__all__ = ["BATCHES", "current_client"]

BATCHES = "batches"
"""The client that all requests of batches are from."""

current_client: ContextVar[str] = ContextVar("client", default="")
"""Set while a request is handled: a digest of its key, else its address."""
