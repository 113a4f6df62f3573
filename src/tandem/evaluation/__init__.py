"""Measures a model on held-out records with the engine that serves it."""
