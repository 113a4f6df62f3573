"""Sizes in bytes as people write them, such as 16GiB."""

__all__ = ["SIZE_PATTERN", "parse_size"]

UNIT_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE_PATTERN = r"^(\d+(\.\d+)? ?(B|KiB|MiB|GiB|TiB))?$"
"""Of a setting that is a size; it may be empty."""


def parse_size(text: str) -> int:
    """Return a size that ``SIZE_PATTERN`` matches in bytes; 0 if it is empty."""
    number = text.rstrip("BKMGTi ")
    return int(float(number) * UNIT_BYTES[text[len(number) :].strip()]) if number else 0
