"""Loads of a server: traces of requests, their records, and the figures of a run."""
