"""Decoders that transformers' own modules run; each sequence has its own cache object."""
