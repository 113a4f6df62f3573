"""Routed experts that are not gated MLPs."""
