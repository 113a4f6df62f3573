"""``tandem sim decide``: replay the routing decisions of a live server."""

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.core.errors import NotFoundError

__all__ = ["decide"]

SHOWN = 20
"""Largest number of decisions that the table lists."""


class _Summary(msgspec.Struct, kw_only=True):
    decisions: int
    same: int
    then: dict[str, int]
    """Number of requests by the instance that computed their prompt, or by another outcome."""
    now: dict[str, int]


def decide(
    journal: Annotated[Path, typer.Argument(help="File that cluster.journal named.")],
    policy: Annotated[
        str | None, typer.Option(help="In the place of the server's, as cluster.policy.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Replay the journal of a server's conductor: the same events, the decisions beside its own.

    With the policy that the server had, all are the same; with another one, the table shows where
    that would have sent requests, given the loads that there really were.
    """
    from tandem.conductor.journal import Outcome, replay_journal

    then: Counter[str] = Counter()
    now: Counter[str] = Counter()
    total = same = 0
    rows: list[tuple[object, ...]] = []

    def name(outcome: Outcome) -> str:
        return outcome.prefill or outcome.decode or outcome.kind

    try:
        with journal.open("rb") as lines:
            for each in replay_journal(lines, policy):
                total += 1
                same += each.then == each.now
                then[name(each.then)] += 1
                now[name(each.now)] += 1
                if each.then != each.now and len(rows) < SHOWN:
                    rows.append((each.request_id, *map(_describe, (each.then, each.now))))
    except OSError as error:
        what = f"cannot read {journal}: {error.strerror}: give a file of cluster.journal"
        raise NotFoundError("sim.decide", what) from error
    if json:
        print_json(_Summary(decisions=total, same=same, then=dict(then), now=dict(now)))
        return
    sys.stdout.write(f"{same} of {total} decisions are the same\n")
    if rows:
        print_table(("request", "then", "now"), rows)


def _describe(outcome: tuple[str, str, str, float | None]) -> str:
    kind, prefill, decode, ttft_s = outcome
    names = " + ".join(each for each in (prefill, decode) if each)
    time = "" if ttft_s is None else f", {ttft_s * 1e3:.1f} ms"
    return f"{kind} {names}{time}".strip()
