"""Simulated devices for tests: CPU operators behind the ``Device`` protocol."""
