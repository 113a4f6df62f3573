"""Benchmarks of single operators."""
