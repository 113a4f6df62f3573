"""HTTP itself: connections, hosts, keys, errors, event streams, the access log."""
