"""Instances as processes: their program, their supervision, and sessions with them."""
