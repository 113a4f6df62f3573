"""Traces replayed against caches without time, to count which blocks a cache of some size holds."""
