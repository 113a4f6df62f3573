"""Layout of a file of rows: the number of rows in a page of the disk, and the file's length."""

__all__ = ["PAGE_BYTES", "count_file_bytes", "count_padded_bytes", "count_page_rows"]

PAGE_BYTES = 4096
"""Bytes that a read past the page cache is a multiple of."""
MAX_PADDING = 0.2
"""Largest fraction of a page that is left empty so that no row crosses two pages."""


def count_page_rows(row_bytes: int) -> int:
    """Return how many rows a page has that no row crosses; 0 if rows follow each other."""
    page_rows = PAGE_BYTES // row_bytes
    padding = PAGE_BYTES - page_rows * row_bytes
    return page_rows if padding <= MAX_PADDING * PAGE_BYTES else 0


def count_padded_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the bytes that rows take in a file with many more, with their part of the padding."""
    page_rows = count_page_rows(row_bytes)
    return -(-num_rows * PAGE_BYTES // page_rows) if page_rows else num_rows * row_bytes


def count_file_bytes(num_rows: int, row_bytes: int) -> int:
    """Return the length of a file of rows, whole pages."""
    return -(-count_padded_bytes(num_rows, row_bytes) // PAGE_BYTES) * PAGE_BYTES
