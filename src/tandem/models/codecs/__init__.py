"""Codecs of stored weights: a file for each format, ``codec`` for what all promise."""
