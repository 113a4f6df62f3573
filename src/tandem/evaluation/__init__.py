"""Measuring a model on held-out records, by the engine that serves it."""
