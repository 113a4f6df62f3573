"""Scheduling of tokens and blocks for the next step: pure, but for the loads."""
