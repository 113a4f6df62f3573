"""Routed experts of other shapes than gated blocks."""
