"""One module for each command that asks no server."""
