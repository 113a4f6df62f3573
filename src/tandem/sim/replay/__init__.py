"""Traces replayed against caches without time: which blocks a cache of some size would hold."""
