"""Frames, sockets and addresses."""
