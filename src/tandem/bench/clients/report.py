"""The figures of a run as text, with the labels of SGLang's benchmark client, and as a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.core.loads.records import Distribution, LoadReport, RequestRecord

__all__ = ["draw_run", "render_report"]

WIDTH = 50


def render_report(report: LoadReport) -> str:
    """Return the figures of a load run as a block of text, for a person."""
    return "\n".join(_list_lines(report))


def _list_lines(report: LoadReport) -> Iterator[str]:
    rate = "inf" if report.request_rate is None else report.request_rate
    most = "not set" if report.max_concurrency is None else report.max_concurrency
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _line("Backend:", report.backend)
    yield _line("Traffic request rate:", rate)
    yield _line("Max request concurrency:", most)
    yield _line("Successful requests:", report.completed)
    if report.failed:
        yield _line("Failed requests:", report.failed)
    yield _line("Benchmark duration (s):", report.duration)
    yield _line("Total input tokens:", report.total_input_tokens)
    yield _line("Total generated tokens:", report.total_output_tokens)
    yield _line("Request throughput (req/s):", report.request_throughput)
    yield _line("Input token throughput (tok/s):", report.input_throughput)
    yield _line("Output token throughput (tok/s):", report.output_throughput)
    yield _line("Peak output token throughput (tok/s):", report.peak_output_throughput)
    yield _line("Peak concurrent requests:", report.max_concurrent_requests)
    yield _line("Total token throughput (tok/s):", report.total_throughput)
    yield _line("Concurrency:", report.concurrency)
    if report.goodput is not None and report.attained is not None:
        yield _line("Request goodput (req/s):", report.goodput)
        yield _line("SLO attainment (%):", 100 * report.attained)
    sections = (
        ("End-to-End Latency", "E2E Latency", report.e2e_latency_ms),
        ("Time to First Token", "TTFT", report.ttft_ms),
        ("Time per Output Token (excl. 1st token)", "TPOT", report.tpot_ms),
        ("Inter-Token Latency", "ITL", report.itl_ms),
    )
    for title, name, figures in sections:
        if figures is not None:
            yield f"{title:-^{WIDTH}}"
            yield from _list_figures(name, figures)
    if report.total_cached_tokens:
        yield f"{'Cache Hit Details':-^{WIDTH}}"
        yield _line("Cached tokens:", report.total_cached_tokens)
        share = 100 * report.total_cached_tokens / max(report.total_input_tokens, 1)
        yield _line("Cache hit rate (%):", share)
    yield "=" * WIDTH
    for text, count in report.errors.items():
        yield f"{count} x {text}"


def _list_figures(name: str, figures: Distribution) -> Iterator[str]:
    yield _line(f"Mean {name} (ms):", figures.mean)
    yield _line(f"Median {name} (ms):", figures.median)
    yield _line(f"P90 {name} (ms):", figures.p90)
    yield _line(f"P95 {name} (ms):", figures.p95)
    yield _line(f"P99 {name} (ms):", figures.p99)
    yield _line(f"Max {name} (ms):", figures.max)


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()


def draw_run(records: Sequence[RequestRecord], path: Path) -> None:
    """Draw the distributions of TTFT and TPOT and the tokens of each second, as PNG or SVG.

    Raises: ModuleNotFoundError (no matplotlib).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    good = [record for record in records if not record.error and record.event_times_s]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, title, values in (
        (left, "time to first token (ms)", [1000 * r.ttft_s for r in good]),
        (middle, "time per output token (ms)", [1000 * r.tpot_s for r in good]),
    ):
        axes.hist(values, bins=40)
        axes.set_xlabel(title)
        axes.set_ylabel("requests")
    seconds: dict[int, float] = {}
    for record in good:
        share = record.output_tokens / len(record.event_times_s)
        for moment in record.event_times_s:
            seconds[int(moment)] = seconds.get(int(moment), 0.0) + share
    right.plot(sorted(seconds), [seconds[s] for s in sorted(seconds)])
    right.set_xlabel("second of the run")
    right.set_ylabel("output tokens")
    figure.savefig(path)
