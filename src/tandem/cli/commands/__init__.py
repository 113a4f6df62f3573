"""Commands that need no running server, one module each."""
