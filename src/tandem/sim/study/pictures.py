"""Pictures of runs and sweeps as PNG files, and an HTML page with pictures and figures."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.core.loads.records import RequestRecord
from tandem.sim.cluster.run import Run

__all__ = ["draw_curves", "draw_load", "write_page"]

BINS = 60
GOODPUT = "requests a second within the objectives"


def _make_figure(columns: int) -> tuple[Any, Any]:
    """Return a figure and its axes.

    Raises: ModuleNotFoundError (no matplotlib).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, axes


def draw_load(run: Run, path: Path) -> None:
    """Draw a run: TTFT, TBT, load over time, and cache hits by tier for each instance.

    Raises: ModuleNotFoundError (no matplotlib).
    """
    figure, (ttft, tbt, load, hits) = _make_figure(4)
    good = [record for record in run.records if not record.error and record.event_times_s]
    for axes, label, values in (
        (ttft, "time to first token (s)", [record.ttft_s for record in good]),
        (tbt, "time between tokens, longest tenth (ms)", [1e3 * record.tbt_s for record in good]),
    ):
        axes.hist(values, bins=BINS)
        axes.set_xlabel(label)
        axes.set_ylabel("requests")
    times, waiting, decoding = _count_over_time(good)
    load.plot(times, waiting, label="before the first token")
    load.plot(times, decoding, label="decoding")
    load.set_xlabel("second of the run")
    load.set_ylabel("requests")
    load.legend()
    shown = [each for each in run.report.instances if each.prompt_tokens]
    names = [each.name for each in shown]
    stored = [each.store_hit_tokens / each.prompt_tokens for each in shown]
    device = [(e.hit_tokens - e.store_hit_tokens) / e.prompt_tokens for e in shown]
    hits.bar(names, device, label="device")
    hits.bar(names, stored, bottom=device, label="store")
    hits.set_ylabel("share of prompt tokens")
    hits.legend()
    figure.savefig(path)


def _count_over_time(
    records: Sequence[RequestRecord],
) -> tuple[list[float], list[int], list[int]]:
    """Return times, and the numbers of requests that are waiting for their first token and decoding
    at each.
    """
    changes = [(record.sent_s, 1, 0) for record in records]
    changes += [(record.event_times_s[0], -1, 1) for record in records]
    changes += [(record.done_s, 0, -1) for record in records]
    times: list[float] = []
    counts: tuple[list[int], list[int]] = ([], [])
    waiting = decoding = 0
    for moment, first, second in sorted(changes):
        waiting += first
        decoding += second
        times.append(moment)
        counts[0].append(waiting)
        counts[1].append(decoding)
    return times, *counts


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, label: str = GOODPUT
) -> None:
    """Draw a figure against the request rate, one curve per name.

    Raises: ModuleNotFoundError (no matplotlib).
    """
    figure, (axes,) = _make_figure(1)
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xlabel("requests a second")
    axes.set_ylabel(label)
    axes.legend()
    figure.savefig(path)


def write_page(
    path: Path,
    title: str,
    tables: Mapping[str, Sequence[Sequence[object]]],
    pictures: Sequence[Path],
) -> None:
    """Write an HTML page that needs no other file.

    Args:
       path: path of the page.
       title: title of the page.
       tables: rows by heading; the first row has the names of the columns.
       pictures: PNG files to embed.
    """
    page = io.StringIO()
    page.write(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>")
    page.write("<style>body{font:14px sans-serif;margin:2em;max-width:90em}img{max-width:100%}")
    page.write("td,th{padding:.2em .8em;text-align:right}table{border-collapse:collapse}</style>")
    page.write(f"<h1>{html.escape(title)}</h1>")
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        page.write(f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{data}">')
    for heading, rows in tables.items():
        page.write(f"<h2>{html.escape(heading)}</h2><table>")
        for number, row in enumerate(rows):
            tag = "td" if number else "th"
            cells = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
            page.write(f"<tr>{cells}</tr>")
        page.write("</table>")
    path.write_text(page.getvalue(), "utf-8")
