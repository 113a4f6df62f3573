"""The plan of `tandem serve` on this machine, printed by ``tandem plan`` and ``serve
--dry-run``.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.cli.config import Config, find_flag
from tandem.cli.output import print_json
from tandem.cli.planning.choices import print_choices
from tandem.core.errors import ConfigError
from tandem.engine.planning import count_users, plan_engine

__all__ = ["follow_wishes", "show_serving"]

QUALITY_FORMATS = {"stored": "auto", "int8": "int8", "int4": "int4"}
"""Value of the format settings (of experts and of other matrices) by the user's wish for
quality."""


def follow_wishes(
    settings: Config, *, context: int, users: int, quality: str
) -> tuple[Config, dict[str, str]]:
    """Return settings changed according to wishes, and the changed values by path.

    Args:
        settings: settings as given. It is an error if one is given and the wish differs.
        context: number of tokens of a sequence; 0: no wish.
        users: number of users served at once; 0: no wish.
        quality: coarsest allowed format of weights; empty: no wish.

    Raises: ConfigError (``quality`` is unknown, or a given setting differs from a wish).
    """
    wished: dict[str, Any] = {}
    if context:
        wished["engine.max_model_len"] = context
    if users:
        wished["engine.max_running"] = users
    if quality:
        if quality not in QUALITY_FORMATS:
            what = f"--quality {quality}: use one of {', '.join(QUALITY_FORMATS)}"
            raise ConfigError("cli.plan", what)
        for field in ("expert_format", "linear_format"):
            wished[f"model.{field}"] = QUALITY_FORMATS[quality]
    defaults = Config()
    changed: dict[str, str] = {}
    fields: dict[str, dict[str, Any]] = {"engine": {}, "model": {}}
    for path, value in wished.items():
        section, _, name = path.partition(".")
        given = getattr(getattr(settings, section), name)
        default = getattr(getattr(defaults, section), name)
        if given not in (default, value):
            what = f"{find_flag(path)} {given} and a wish that makes it {value}: give one of them"
            raise ConfigError("cli.plan", what, field=path)
        if value != given:
            changed[path] = str(value)
        fields[section][name] = value
    replaced = {
        section: msgspec.structs.replace(getattr(settings, section), **values)
        for section, values in fields.items()
        if values
    }
    return msgspec.structs.replace(settings, **replaced), changed


def show_serving(
    settings: Config,
    *,
    with_rejected: bool,
    as_json: bool,
    wished: Mapping[str, str] | None = None,
    rate: float = 0.0,
) -> None:
    """Print the plan of serving with these settings on this machine.

    Args:
        settings: settings of ``tandem serve``.
        with_rejected: True to print rejected alternatives too.
        as_json: True to print one JSON document.
        wished: settings that follow from wishes, for the printed command.
        rate: tokens a second that each user should get; 0: no such wish.

    Raises: errors of ``plan_engine``.
    """
    store, cluster = settings.store, settings.cluster
    planned = plan_engine(
        settings.model,
        settings.engine,
        num_siblings=cluster.num_instances,
        is_shared=bool(store.memory_bytes or store.master or cluster.prefill),
    )
    rows = [*planned.rows(), *_tell_instances(settings)]
    if rate:
        users = count_users(planned, rate)
        rows.append(("users", str(users), f"at {rate:g} tokens/s each, predicted"))
    if as_json:
        told = {**msgspec.structs.asdict(planned), "rows": rows}
        print_json({**told, "operator_threads": planned.operator_threads})
        return
    print_choices(rows, planned.rejected_rows() if with_rejected else [])
    if wished:
        sys.stdout.write(f"\nserve it so: {_tell_command(settings, wished)}\n")


def _tell_instances(settings: Config) -> Iterator[tuple[str, str, str]]:
    cluster = settings.cluster
    if cluster.num_instances > 1:
        roles = {name: getattr(cluster, name) for name in ("prefill", "decode", "unified")}
        counts = ", ".join(f"{count} {role}" for role, count in roles.items() if count)
        yield ("instances", counts, "each as above, on its share of cores and memory")


def _tell_command(settings: Config, wished: Mapping[str, str]) -> str:
    words = ["tandem", "serve", settings.model.path]
    for path, value in wished.items():
        words += [str(find_flag(path)), value]
    return shlex.join(words)
