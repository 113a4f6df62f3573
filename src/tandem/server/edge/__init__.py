"""HTTP itself: connections, hosts, API keys, errors, event streams, the access log."""
