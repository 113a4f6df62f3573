"""Definitions that all packages share: errors, clock, configuration, model specifications,
messages.
"""
