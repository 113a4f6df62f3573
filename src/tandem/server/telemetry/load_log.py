"""The load log: a line every few seconds about the instances' work, while there is any."""

import asyncio
import logging
from typing import NoReturn

from tandem.core.instance_status import InstanceStats
from tandem.server.context import ServerContext

__all__ = ["LoadReport", "log_load"]

_logger = logging.getLogger(__name__)


class LoadReport:
    """Rates between two readings of an instance's counters. Pure: time is an argument."""

    def __init__(self) -> None:
        self._last: tuple[float, InstanceStats] | None = None

    def describe(self, stats: InstanceStats | None, now_s: float) -> str | None:
        """Return the next line of the load log: rates since the last reading; None if there was no
        work.

        Args:
            stats: counters; None while the instance is down, after which they restart at 0.
            now_s: time at which they were read, monotonic seconds.
        """
        last, self._last = self._last, None if stats is None else (now_s, stats)
        if stats is None or last is None:
            return None
        last_s, before = last
        prompt = stats.prompt_tokens - before.prompt_tokens
        generated = stats.generated_tokens - before.generated_tokens
        seconds = now_s - last_s
        if prompt < 0 or generated < 0 or seconds <= 0:
            # A counter decreased, so these counters belong to another instance; skip this interval.
            return None
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        text = (
            f"event=load running={stats.num_running} waiting={stats.num_waiting} "
            f"prompt_tokens_per_s={prompt / seconds:.1f} "
            f"generated_tokens_per_s={generated / seconds:.1f} kv_cache_usage={used:.3f}"
        )
        queries = stats.prefix_query_tokens - before.prefix_query_tokens
        if queries > 0:
            hits = stats.prefix_hit_tokens - before.prefix_hit_tokens
            text += f" prefix_hit_rate={hits / queries:.3f}"
        return text


async def log_load(context: ServerContext, every_s: float) -> NoReturn:
    """Log a line every ``every_s`` seconds under load, until cancelled."""
    report = LoadReport()
    report.describe(await context.read_stats(), context.clock.now_s())
    while True:
        await asyncio.sleep(every_s)
        text = report.describe(await context.read_stats(), context.clock.now_s())
        if text is not None:
            _logger.info(text)
