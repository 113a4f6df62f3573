"""The page that compares predicted speeds with published ones (``tandem plan --published``)."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

import msgspec

from tandem.core.config import parse_yaml
from tandem.placement.catalog import PublishedRow, find_hardware, find_model, read_published
from tandem.placement.costs import Efficiencies
from tandem.placement.fitting import Figure, median_error, predict_rows, read_efficiencies
from tandem.placement.training import list_training

__all__ = ["LARGE_ERROR", "explain_figure", "explain_row", "render_predictions"]

LARGE_ERROR = 0.25
"""Relative error of a prediction from which on the page explains it."""

INTRODUCTION = """\
# Predicted speeds beside published ones

Made by `tandem plan --published`; a test makes it again. Every row is a measurement that others
published, with its source in `src/tandem/placement/data/published.yaml`. None was measured here.
The cost model (`src/tandem/placement/costs.py`) is a roofline per operator class. Three rows, named
before anything was fitted, fix five efficiencies; no other number belongs to a row.
"""


@cache
def _read_outliers() -> dict[str, str]:
    file = resources.files("tandem.placement") / "data" / "outliers.yaml"
    return msgspec.convert(parse_yaml(file.read_text("utf-8")), dict[str, str])


def explain_figure(figure: Figure) -> str:
    """Return the recorded reason why a prediction is far from the published speed; empty if none is
    recorded.
    """
    return explain_row(f"{figure.row} {figure.phase}")


def explain_row(name: str) -> str:
    """Return the recorded reason why a prediction is far from its published figure, by "row phase";
    empty if none is recorded.
    """
    for pattern, reason in _read_outliers().items():
        if fnmatchcase(name, pattern):
            return reason
    return ""


def render_predictions() -> str:
    """Return the page of predicted and published speeds in Markdown."""
    published, eff = read_published(), read_efficiencies("published")
    figures = predict_rows(eff)
    rows = {row.id: row for row in published.rows}
    lines = [INTRODUCTION, _sum_up(figures), "", *_tell_efficiencies(eff), ""]
    lines += [f"Fitted to {', '.join(published.fitted)}. {published.fitted_because}", ""]
    lines += ["| row | model | machine | users | phase | published | predicted | error |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    lines += [_tell_figure(figure, rows[figure.row]) for figure in figures]
    lines += ["", f"## More than {LARGE_ERROR:.0%} off", ""]
    lines += _tell_outliers(figures)
    lines += ["", *_tell_training(eff)]
    lines += ["", "## Left out", "", "Published, but without a fact that a prediction needs:", ""]
    lines += [f"- {what}: {why}." for what, why in published.left_out.items()]
    return "\n".join(lines) + "\n"


def _sum_up(figures: Sequence[Figure]) -> str:
    predicted = [figure for figure in figures if not figure.is_fitted]
    phases = [
        f"{phase} {median_error([f for f in predicted if f.phase == phase]):.0%} "
        f"(n = {sum(f.phase == phase for f in predicted)})"
        for phase in ("decode", "prefill")
    ]
    large = sum(abs(figure.error) > LARGE_ERROR for figure in predicted)
    return (
        f"Median error of the {len(predicted)} figures that were not fitted: "
        f"**{median_error(predicted):.0%}**; {', '.join(phases)}; {large} are more than "
        f"{LARGE_ERROR:.0%} off."
    )


def _tell_training(eff: Efficiencies) -> list[str]:
    """Return the lines of the page's section that compares predicted with published fine-tuning
    runs.
    """
    figures = list_training(eff)
    rows = {row.id: row for row in read_published().training}
    lines = [
        "## Fine-tuning",
        "",
        "LoRA of rank 8 on all matrices but the routed experts, which stay in DRAM, in bf16, by "
        "`tandem finetune RECIPE --dry-run --hardware NAME`. Nothing is fitted to these rows: "
        "efficiencies are those above.",
        "",
        "| row | model | machine | tokens of a batch | what | published | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        row = rows[figure.row]
        cells = (figure.row, find_model(row.model).title, find_hardware(row.machine).title)
        rates = (f"{figure.published:g}", f"{figure.predicted:.3g}", f"{figure.error:+.0%}")
        lines.append(f"| {' | '.join((*cells, str(row.tokens), figure.what, *rates))} |")
    lines.append("")
    for figure in figures:
        if abs(figure.error) > LARGE_ERROR:
            what = f"{figure.row} {figure.what}"
            lines.append(f"- {what} ({figure.error:+.0%}): {explain_row(what)}")
    return lines


def _tell_efficiencies(eff: Efficiencies) -> list[str]:
    return [
        "| efficiency | value |",
        "|---|---|",
        f"| fitted: share of DRAM's bandwidth while experts are read | {eff.cpu_bandwidth:.3f} |",
        f"| fitted: share of AVX-512's peak in prefill | {eff.cpu_avx:.3f} |",
        f"| fitted: share of AMX's peak in prefill | {eff.cpu_amx:.3f} |",
        f"| fitted: weights staged for a GPU, share of DRAM's bandwidth | {eff.staging:.3f} |",
        f"| fitted: hand-over between GPU and CPU, us a layer | {eff.handover_us:.0f} |",
        f"| given: share of the GPU's bandwidth | {eff.gpu_bandwidth:.2f} |",
        f"| given: share of the GPU's peak | {eff.gpu_compute:.2f} |",
        f"| given: share of a link | {eff.link:.2f} |",
    ]


def _tell_figure(figure: Figure, row: PublishedRow) -> str:
    machine = find_hardware(row.machine)
    processor, gpu = machine.processor, machine.accelerator
    assert processor is not None
    assert gpu is not None
    where = f"{row.sockets} x {processor.title}, {row.accelerators} x {gpu.title}"
    what = f"{find_model(row.model).title}, {row.expert_format}"
    error = "fitted" if figure.is_fitted else f"{figure.error:+.0%}"
    cells = (figure.row, what, where, row.users, figure.phase)
    rates = (f"{figure.published:g}", f"{figure.predicted:.3g}", error)
    return f"| {' | '.join(map(str, (*cells, *rates)))} |"


def _tell_outliers(figures: Sequence[Figure]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for figure in figures:
        if abs(figure.error) > LARGE_ERROR and not figure.is_fitted:
            what = f"{figure.row} {figure.phase} ({figure.error:+.0%})"
            groups.setdefault(explain_figure(figure), []).append(what)
    return [f"- {', '.join(names)}: {reason}" for reason, names in groups.items()]
