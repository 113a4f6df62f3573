"""Decoders that transformers' own modules run, each sequence with a cache object of its own."""
