"""Calibration files: step costs that a live server has learnt from its instances.

``tandem sim calibrate`` writes one and ``tandem sim run --calibration`` reads it: every group of
the scenario gets the costs, the memory and the blocks of the live instances with its role.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.instance_status import InstanceRole, InstanceStatus
from tandem.core.wire import InstanceInfo
from tandem.sim.cluster.scenario import Group, Scenario
from tandem.sim.cluster.steps import Calibration

__all__ = [
    "CalibrationFile",
    "LearntInstance",
    "calibrate_scenario",
    "has_learnt",
    "learn_instances",
    "read_calibration",
    "write_calibration",
]

MIN_STEPS = 64
"""Fewest steps an instance must have run for its learnt costs to be used."""


class LearntInstance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step costs that one instance of a live server has learnt, and its memory."""

    name: str
    role: InstanceRole
    costs: Calibration
    num_steps: int
    kv_tokens: Annotated[int, Meta(ge=1)]
    kv_bytes_per_token: Annotated[int, Meta(ge=0)]
    block_size: Annotated[int, Meta(ge=1)]
    max_batch_tokens: Annotated[int, Meta(ge=1)]
    max_model_len: Annotated[int, Meta(ge=1)]


class CalibrationFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calibration of a live server: its instances and its overhead per request."""

    version: Literal[1] = 1
    model: str = ""
    request_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Milliseconds of a request outside of its steps; see ``Scenario.request_ms``."""
    instances: Annotated[tuple[LearntInstance, ...], Meta(min_length=1)]


def has_learnt(instance: InstanceStatus) -> bool:
    """Return True if the costs of an instance's steps are learnt from enough of them."""
    costs = instance.step_costs
    return costs is not None and costs.num_steps >= MIN_STEPS


def learn_instances(instances: Sequence[InstanceStatus], info: InstanceInfo) -> CalibrationFile:
    """Return the calibration of a server from its status.

    Args:
       instances: the server's list of instances.
       info: model and settings, which are the same for all instances of a server.

    Raises: ConfigError (no instance, or none of a role, has run enough steps).
    """
    learnt: list[LearntInstance] = []
    for each in instances:
        costs = each.step_costs
        if costs is None or not has_learnt(each):
            continue
        fields = {
            name: getattr(costs, name) for name in costs.__struct_fields__ if name != "num_steps"
        }
        learnt.append(
            LearntInstance(
                name=each.name,
                role=msgspec.convert(each.role, InstanceRole),
                costs=Calibration(**fields, model=info.model, error=each.step_error),
                num_steps=costs.num_steps,
                kv_tokens=info.num_blocks * info.block_size,
                kv_bytes_per_token=info.kv_bytes_per_token,
                block_size=info.block_size,
                max_batch_tokens=info.max_batch_tokens,
                max_model_len=info.max_model_len,
            )
        )
    # Without one of its roles a server is another one: a decode instance alone serves nothing.
    missing = {each.role for each in instances} - {each.role for each in learnt}
    if missing or not learnt:
        role = f"{min(missing)} instance" if missing and learnt else "instance"
        what = f"no {role} has computed {MIN_STEPS} steps: send the server a load first"
        raise ConfigError("sim.calibrate", what)
    return CalibrationFile(model=info.model, instances=tuple(learnt))


def read_calibration(path: Path) -> CalibrationFile:
    """Read the calibration in a file.

    Raises: NotFoundError (the file cannot be read); ConfigError (it is not a calibration; names the
    field).
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        what = f"cannot read {path}: {why}: give a file of tandem sim calibrate"
        raise NotFoundError("sim.calibration", what) from error
    try:
        return msgspec.convert(parse_yaml(text), CalibrationFile, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError("sim.calibration", f"{path.name}: {error}") from error


def write_calibration(path: Path, found: CalibrationFile) -> None:
    """Write a calibration to a file as YAML."""
    path.write_text(yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False), "utf-8")


def calibrate_scenario(scenario: Scenario, found: CalibrationFile) -> Scenario:
    """Return a scenario whose instances have the costs and memory of the live ones with the same
    role.

    Raises: ConfigError (no live instance has the role of a group).
    """
    groups = tuple(_calibrate(group, found) for group in scenario.instances)
    return msgspec.structs.replace(scenario, instances=groups, request_ms=found.request_ms)


def _calibrate(group: Group, found: CalibrationFile) -> Group:
    alike = [each for each in found.instances if each.role == group.role]
    if not alike:
        roles = ", ".join(sorted({each.role for each in found.instances}))
        what = f"the calibration has no {group.role} instance, but {roles}"
        raise ConfigError("sim.calibration", what, field="instances.role")
    first = alike[0]
    engine = msgspec.structs.replace(
        group.engine,
        block_size=first.block_size,
        max_batch_tokens=first.max_batch_tokens,
        max_model_len=first.max_model_len,
        max_running=min(group.engine.max_running, first.max_batch_tokens),
    )
    return msgspec.structs.replace(
        group,
        calibration=_average(alike),
        kv_tokens=first.kv_tokens,
        kv_bytes_per_token=first.kv_bytes_per_token,
        engine=engine,
    )


def _average(alike: Sequence[LearntInstance]) -> Calibration:
    """Return the mean of the instances' step costs, weighted by the number of steps that each was
    learnt from.
    """
    total = sum(each.num_steps for each in alike)
    names = [
        name
        for name in Calibration.__struct_fields__
        if isinstance(getattr(alike[0].costs, name), float)
    ]
    means = {
        name: sum(getattr(each.costs, name) * each.num_steps for each in alike) / total
        for name in names
    }
    return msgspec.structs.replace(alike[0].costs, **means)
