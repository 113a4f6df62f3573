"""Frames, sockets and addresses of the control channel."""
