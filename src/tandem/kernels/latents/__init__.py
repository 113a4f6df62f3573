"""Latents (compressed KV) kept in a file for sparse attention: the rows on disk, the cache of rows
in memory, and attention to the rows that a step chose.
"""
