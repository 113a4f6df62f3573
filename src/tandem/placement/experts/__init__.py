"""Routed experts by how often they are chosen: caches of them, traces replayed, slots. Pure."""
