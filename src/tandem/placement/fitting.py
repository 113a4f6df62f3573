"""The efficiencies of the cost model, and predictions of all published rows.

There are two sets. Published speeds are of other programs' kernels: three chosen rows of them fix
five efficiencies, with which the others are predicted. What is planned runs on our own kernels,
whose shares of a machine's rates are the medians of our own measurements.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

from tandem.core.config import parse_yaml
from tandem.core.errors import InternalError
from tandem.placement.catalog import PublishedRow, find_hardware, find_model, read_published
from tandem.placement.costs import (
    Efficiencies,
    FormatShares,
    Placement,
    decode_time,
    prefill_time,
)
from tandem.placement.hardware import Isa
from tandem.placement.shape import read_shape

__all__ = [
    "Figure",
    "fit",
    "fit_own",
    "median_error",
    "predict_row",
    "predict_rows",
    "read_efficiencies",
]

FITTED = ("cpu_bandwidth", "cpu_avx", "cpu_amx", "staging", "handover_us")
START = (0.5, 0.1, 0.1, 0.1, 100.0)
ROUNDS = 200


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A published speed of a machine and a model, and what the cost model predicts for it, in
    tokens per second.
    """

    row: str
    phase: str
    published: float
    predicted: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """Error of the prediction relative to the published speed."""
        return self.predicted / self.published - 1


class _MeasuredRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of a machine's rates that our kernels of one weight format have reached."""

    format: str
    isa: Isa
    bandwidth: float | None = None
    compute: float | None = None
    source: str


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows: tuple[_MeasuredRow, ...]
    handover_us: float
    handover_source: str


def _read_data(name: str) -> Any:
    file = resources.files("tandem.placement") / "data" / name
    return parse_yaml(file.read_text("utf-8"))


@cache
def read_efficiencies(of: Literal["ours", "published"] = "ours") -> Efficiencies:
    """Return efficiencies from the package's data; a test makes them again.

    Args:
        of: ``ours`` for plans; ``published`` for speeds that other programs reached.
    """
    return msgspec.convert(_read_data("efficiencies.yaml")[of], Efficiencies)


def fit_own() -> Efficiencies:
    """Return the efficiencies of our own kernels, medians of what was measured of them. What was
    not measured, AMX on prompts and copies for streaming, is that of the published rows.
    """
    measured = msgspec.convert(_read_data("measured.yaml"), _Measured)
    rows = measured.rows
    compute = statistics.median(row.compute for row in rows if row.compute is not None)

    def find_shares(name: str) -> FormatShares:
        own = [row for row in rows if row.format == name]
        reached = [row.compute for row in own if row.compute is not None]
        return FormatShares(
            bandwidth=statistics.median(r.bandwidth for r in own if r.bandwidth is not None),
            compute=statistics.median(reached) if reached else compute,
        )

    formats = {name: find_shares(name) for name in dict.fromkeys(row.format for row in rows)}
    formats["int4"] = formats["int4g32"]
    return msgspec.structs.replace(
        read_efficiencies("published"),
        cpu_bandwidth=statistics.median(r.bandwidth for r in rows if r.bandwidth is not None),
        cpu_avx=compute,
        handover_us=measured.handover_us,
        formats=formats,
    )


def predict_row(row: PublishedRow, eff: Efficiencies, *, is_fitted: bool = False) -> list[Figure]:
    """Predict the speeds of one published measurement (a row): prefill, decode or both."""
    spec = find_hardware(row.machine)
    shape = read_shape(find_model(row.model).config, row.model)
    if row.experts_per_token:
        shape = shape.with_top_k(row.experts_per_token)
    place = Placement(
        expert_format=row.expert_format,
        dense_format=row.dense_format,
        accelerators=row.accelerators,
        sockets=row.sockets,
        gpu_experts=row.gpu_experts,
        prefill=row.prefill,
        isa=row.kernels,
        chunk_tokens=row.chunk_tokens,
    )
    figures: list[Figure] = []
    if row.prefill_rate:
        step = prefill_time(spec, shape, place, eff, tokens=row.prompt_tokens, users=row.users)
        rate = row.prompt_tokens * row.users / step.seconds
        figures.append(_figure(row, "prefill", row.prefill_rate, rate, is_fitted))
    if row.decode_rate:
        step = decode_time(spec, shape, place, eff, users=row.users, context=row.prompt_tokens)
        rate = row.users / step.seconds
        figures.append(_figure(row, "decode", row.decode_rate, rate, is_fitted))
    return figures


def _figure(
    row: PublishedRow, phase: str, published: float, predicted: float, is_fitted: bool
) -> Figure:
    return Figure(
        row=row.id, phase=phase, published=published, predicted=predicted, is_fitted=is_fitted
    )


def predict_rows(eff: Efficiencies) -> list[Figure]:
    """Return the predicted and published speeds (figures) of all published measurements, in the
    file's order.
    """
    published = read_published()
    return [
        figure
        for row in published.rows
        for figure in predict_row(row, eff, is_fitted=row.id in published.fitted)
    ]


def median_error(figures: Sequence[Figure]) -> float:
    """Return the median of the absolute relative errors of predictions."""
    return statistics.median(abs(figure.error) for figure in figures)


def fit() -> Efficiencies:
    """Fit the efficiencies to the three chosen rows.

    Five figures determine five efficiencies, so this solves the equations: Newton steps on
    logarithms, with finite differences, damped so that all stay in range.

    Raises: InternalError if the steps do not converge.
    """
    published = read_published()
    rows = [row for row in published.rows if row.id in published.fitted]

    def residuals(logs: Sequence[float]) -> list[float]:
        eff = _efficiencies(logs)
        figures = [figure for row in rows for figure in predict_row(row, eff)]
        return [math.log(figure.predicted / figure.published) for figure in figures]

    logs = [math.log(value) for value in START]
    for _ in range(ROUNDS):
        error = residuals(logs)
        if max(map(abs, error)) < 1e-9:
            return _efficiencies(logs)
        step = _solve(_differentiate(residuals, logs, error), error)
        largest = max(map(abs, step))
        logs = [x - d * min(1.0, 0.3 / largest) for x, d in zip(logs, step, strict=True)]
    what = f"efficiencies do not meet the rows {published.fitted}: errors {residuals(logs)}"
    raise InternalError("placement.fit", what)


def _efficiencies(logs: Sequence[float]) -> Efficiencies:
    values = [math.exp(x) for x in logs]
    return Efficiencies(**dict(zip(FITTED, values, strict=True)))


def _differentiate(
    function: Callable[[Sequence[float]], list[float]], at: list[float], value: list[float]
) -> list[list[float]]:
    """Return the derivatives of a function of several numbers at a point, as a matrix [outputs,
    inputs], by finite differences.
    """
    delta = 1e-5
    columns = [function([x + delta * (i == j) for j, x in enumerate(at)]) for i in range(len(at))]
    return [[(column[k] - value[k]) / delta for column in columns] for k in range(len(value))]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small linear system by elimination; unknowns of a singular system stay 0."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12:
            rows[i][i] = 1e12
        for k in range(size):
            if k != i:
                share = rows[k][i] / rows[i][i]
                rows[k] = [a - share * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]
