"""Shared nouns: errors, units, clock, configuration, specifications, messages, metrics."""
