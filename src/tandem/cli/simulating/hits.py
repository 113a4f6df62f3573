"""``tandem sim hits``: print the hit ratios of a trace for several cache sizes."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table, show_work
from tandem.core.errors import ConfigError
from tandem.core.loads.traces import BLOCK_TOKENS, read_rows

__all__ = ["hits"]

BLOCKS = [100_000, 50_000, 30_000, 10_000, 5_859, 1_000]
"""Cache sizes in blocks: those of the Mooncake paper's table, and the 3 million tokens of its
nodes."""


class _Line(msgspec.Struct, kw_only=True):
    blocks: int | None
    tokens: int | None
    lru: float
    """Hit ratio of a plain LRU cache."""
    index: float
    """Hit ratio of an instance's prefix index."""
    lru_mean: float
    """Mean over the requests of each one's own hit ratio, with LRU."""


def hits(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's format.")],
    blocks: Annotated[
        list[int] | None, typer.Option(help="Blocks of the cache; may be repeated.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Replay a trace without time: the share of its blocks that a cache would hold."""
    from tandem.sim.replay.hits import IndexCache, PlainLru, count_hits, count_unique

    sizes = blocks or BLOCKS
    if min(sizes) < 1:
        raise ConfigError("sim.hits", f"--blocks {min(sizes)}: give at least 1")
    with show_work(f"reading {trace}"):
        rows = list(read_rows(trace))
        num_unique = count_unique(rows)
    if not num_unique:
        raise ConfigError("sim.hits", f"{trace} has no requests")
    lines: list[_Line] = []
    total = 1 + len(sizes)
    for size in (None, *sorted(sizes, reverse=True)):
        with show_work(f"a cache of {size or num_unique:,} blocks, {len(lines) + 1} of {total}"):
            plain = count_hits(rows, PlainLru(size))
            index = count_hits(rows, IndexCache(size or num_unique))
        lines.append(
            _Line(
                blocks=size,
                tokens=None if size is None else size * BLOCK_TOKENS,
                lru=plain.ratio,
                index=index.ratio,
                lru_mean=plain.mean_ratio,
            )
        )
    if json:
        print_json(lines)
        return
    table = [
        (
            "all" if line.blocks is None else f"{line.blocks:,}",
            "" if line.tokens is None else f"{line.tokens:,}",
            f"{line.lru:.1%}",
            f"{line.index:.1%}",
            f"{line.lru_mean:.1%}",
        )
        for line in lines
    ]
    columns = ("blocks", "tokens", "plain LRU", "prefix index", "LRU, mean of requests")
    print_table(columns, table, f"{len(rows):,} requests, {num_unique:,} different blocks")
