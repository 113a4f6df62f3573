"""Entry points that take other programs' command lines."""
