"""Caches of routed experts by frequency of use, replays of traces, device slots. Pure decisions."""
