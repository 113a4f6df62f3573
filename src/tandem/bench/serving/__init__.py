"""Benchmarks of models, the engine and clusters."""
