"""Conversion of integer codes to another integer format that holds the same weights.

Outputs that share a panel, such as the rows of several experts' gates, have one format. If a
checkpoint stores its parts in several formats, they are kept in the smallest format that holds all
of them exactly: groups are halved by repeating their scale, 4-bit codes become 8-bit codes, and a
symmetric group gets a minimum of its scale times the lowest code. Formats of a file's blocks are
joined with others as their plain formats: fp16 scales for each group, and codes instead of table
indices.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from tandem.kernels.weights.formats import WEIGHT_FORMATS, QuantizedMatrix, WeightFormat

__all__ = ["can_represent", "group_formats", "join_formats", "make_plain", "recode"]


PLAIN_FORMATS = {
    "int4g32zp": "int4g32",
    "int4g64zp": "int4g64",
    "int4g128zp": "int4g128",
    "nvfp4": "int8g16",
    "q2k": "int8g16min",
    "q3k": "int8g16",
    "q4k": "int4g32",
    "q5k": "int5g32",
    "q6k": "int8g16",
    "iq4nl": "int8g32",
    "iq4xs": "int8g32",
    "iq2xxs": "int8g32",
    "iq2xs": "int8g16",
    "iq2s": "int8g16",
    "iq3xxs": "int8g32",
    "iq3s": "int8g32",
}
"""Plain format of each format with superblocks, tables or zero points, by name. Scales of
superblocks and minima of zero points are products, which the plain format rounds to fp16.
"""


def make_plain(weight_format: WeightFormat) -> WeightFormat:
    """Return the format, without superblocks, code tables or zero points, to which weights of this
    format are converted where they are joined with others (see ``PLAIN_FORMATS``); a format that
    has none of these itself.
    """
    return WEIGHT_FORMATS[PLAIN_FORMATS.get(weight_format.name, weight_format.name)]


def can_represent(wide: WeightFormat, narrow: WeightFormat) -> bool:
    """Return True if ``recode`` can convert a matrix in the format ``narrow`` to ``wide``."""
    if wide == narrow:
        return True
    if wide.is_stored_only or narrow.has_factor:
        return False
    narrow = make_plain(narrow)
    return (
        wide.is_integer
        and narrow.is_integer
        and wide.bits >= narrow.bits
        and wide.has_minimum >= narrow.has_minimum
        and wide.group_size > 0
        and narrow.group_size > 0
        and narrow.group_size % wide.group_size == 0
    )


def group_formats(
    formats: Sequence[WeightFormat | None],
) -> list[tuple[WeightFormat, list[int]]] | None:
    """Group consecutive parts of a matrix that have the same format; return each group's format and
    the indices of its parts, or None if a part has no format.
    """
    groups: list[tuple[WeightFormat, list[int]]] = []
    for i, held in enumerate(formats):
        if held is None:
            return None
        if not groups or groups[-1][0] != held:
            groups.append((held, []))
        groups[-1][1].append(i)
    return groups


def join_formats(formats: Sequence[WeightFormat | None]) -> WeightFormat | None:
    """Return the smallest format that holds all given formats exactly; None if there is none."""
    joined = formats[0] if formats else None
    for other in formats[1:]:
        if joined is None or other is None:
            return None
        joined = _join(joined, other)
    return joined


def _join(a: WeightFormat, b: WeightFormat) -> WeightFormat | None:
    if a == b:
        return a
    if not (a.is_integer and b.is_integer and a.group_size and b.group_size):
        return None
    if a.has_factor or b.has_factor:
        # Only formats with a tensor factor can hold scales that are products of a scale and a
        # factor, so the two formats have no common one.
        return None
    a, b = make_plain(a), make_plain(b)
    size, has_minimum = gcd(a.group_size, b.group_size), a.has_minimum or b.has_minimum
    candidates = [
        wide
        for wide in WEIGHT_FORMATS.values()
        if wide.is_integer
        and not wide.is_stored_only
        and wide.group_size == size
        and wide.has_minimum == has_minimum
        and wide.bits >= max(a.bits, b.bits)
    ]
    return min(candidates, key=lambda wide: wide.bits, default=None)


def recode(matrix: QuantizedMatrix, wide: WeightFormat) -> QuantizedMatrix:
    """Return the same weights in another format.

    A minimum beyond fp16 becomes infinite, which packing refuses; a minimum from a zero point is
    rounded.

    REQUIRES: ``can_represent(wide, matrix.weight_format)``; neither format is for stored blocks
        only.
    """
    narrow = matrix.weight_format
    assert can_represent(wide, narrow), f"{wide.name} does not hold {narrow.name}"
    if wide == narrow:
        return matrix
    if narrow.has_zeros and matrix.minima is not None:
        with np.errstate(over="ignore"):
            minima = (matrix.scales * -matrix.minima.astype(np.float32)).astype(np.float16)
        matrix = replace(matrix, weight_format=make_plain(narrow), minima=minima)
        return recode(matrix, wide)
    times = narrow.group_size // wide.group_size
    codes, scales, minima = matrix.codes, matrix.scales, matrix.minima
    centre = 2 ** (narrow.bits - 1)
    if not wide.has_minimum:
        codes = codes + np.uint8(2 ** (wide.bits - 1) - centre)
    elif minima is None:
        with np.errstate(over="ignore"):
            minima = (scales * np.float32(-centre)).astype(np.float16)
    return QuantizedMatrix(
        wide,
        codes,
        np.repeat(scales, times, axis=1),
        None if minima is None else np.repeat(minima, times, axis=1),
    )
