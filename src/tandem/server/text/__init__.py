"""Conversion between text and tokens: chat templates, stop strings, and threads for such work."""
