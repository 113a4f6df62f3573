"""Codecs of stored weights: a module for each format, and ``codec`` for their common interface."""
