"""Flags of other programs that commands understand."""
