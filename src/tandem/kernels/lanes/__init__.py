"""Routed experts of the host that a device computes after their weights are copied to it."""
