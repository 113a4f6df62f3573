"""A scenario: all that a simulated run assumes, as one YAML file.

Machines and models are those of ``tandem plan --list``, or files. Settings of an instance are those
of ``tandem serve`` (``EngineConfig``), so a scenario says nothing that a server could not be told.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import yaml
from msgspec import Meta

from tandem.conductor.admission import AdmissionMode
from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError
from tandem.core.instance_status import InstanceRole
from tandem.core.loads.figures import Objectives
from tandem.core.loads.traces import BLOCK_TOKENS
from tandem.engine.config import EngineConfig
from tandem.sim.cluster.generators import Generator
from tandem.sim.cluster.steps import Calibration
from tandem.sim.cluster.store import StoreSpec

__all__ = [
    "Group",
    "LinkSpec",
    "Load",
    "Scenario",
    "change_scenario",
    "parse_changes",
    "parse_scenario",
    "read_scenario",
]

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances that are alike."""

    count: Count = 1
    role: InstanceRole = "unified"
    hardware: str = ""
    """The machine of one instance: a name of ``tandem plan --list``, or a file."""
    model: str = ""
    """A configuration of ``tandem plan --list``."""
    weights: str = "bf16"
    """Format of all weights."""
    accelerators: Annotated[int, Meta(ge=0)] | None = None
    """Accelerators of the machine that the instance uses; None is all of them."""
    kv_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens whose KV the instance keeps; 0 is as many as fit beside the weights."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """The share of the accelerators' memory for weights and KV."""
    step_overhead_ms: NonNegative = 0.0
    """Milliseconds of each step beside the device's work."""
    decode_overhead_ms: NonNegative = 0.0
    """Milliseconds that each decode of a step adds to that, such as a sampler's."""
    gpu_compute: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the peak of matrix products; None is the cost model's own."""
    gpu_bandwidth: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the peak of memory; None is the cost model's own."""
    calibration: Calibration | None = None
    """Learnt costs of steps, in the place of machine and model."""
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0
    """With ``calibration``, that says nothing of it."""
    engine: EngineConfig = EngineConfig(block_size=512, max_batch_tokens=8192, max_running=256)
    nic_gbps: Positive | None = None
    """Bits of this group's ports, where they are not those of ``links``."""

    def check_speed(self) -> None:
        """Refuse a group without speed; a command may have given it one after it was read.

        Raises: ConfigError.
        """
        if self.calibration is None and not (self.hardware and self.model):
            what = "a group of instances has hardware and model, or a calibration"
            raise ConfigError("sim.scenario", what, field="instances.hardware")
        if self.calibration is not None and not self.kv_tokens:
            what = "with a calibration, say how many tokens of KV an instance keeps"
            raise ConfigError("sim.scenario", what, field="instances.kv_tokens")


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network of the instances: each has one port, both directions at once."""

    gbps: Positive = 800.0
    """Gigabits a second of a port, one direction."""
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.87
    """Share that is payload: 87 GB/s of 4 x 200 Gbit/s, as the transfer engine is published."""
    latency_us: NonNegative = 50.0
    """From asking for a transfer until its first byte moves."""
    is_layerwise: bool = True
    """KV of a chunk moves while its later layers are computed."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests of a run."""

    trace: str = ""
    """A file in Mooncake's format."""
    generator: Generator | str | None = None
    """Statistics of a load, or the name of one that is known, in the place of a trace."""
    block_tokens: Count = BLOCK_TOKENS
    """Tokens that a hash of the trace stands for."""
    length_divisor: Count = 1
    """Divides all lengths, those that a hash stands for included: the load of a small model."""
    limit: Annotated[int, Meta(ge=0)] = 0
    """Requests at most; 0 is all."""
    rate_scale: Positive = 1.0
    """Factor on the rate: times between arrivals are divided by it."""
    repeat: Count = 1
    """The trace so often, one after the other, each with hashes of its own."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run."""

    name: str = ""
    note: str = ""
    """Assumptions that the reader should know, with their sources."""
    seed: int = 1
    instances: Annotated[tuple[Group, ...], Meta(min_length=1)]
    links: LinkSpec = LinkSpec()
    store: StoreSpec | None = None
    policy: str = "prefix"
    """The policy, as ``cluster.policy``."""
    admission: AdmissionMode | Literal["late"] = "none"
    """By TTFT and TPOT of ``slo``; a request that is refused counts as failed. late, which no
    server does: by TTFT at its arrival, and by TPOT after its prefill."""
    roles: Literal["fixed", "load"] = "fixed"
    """load: instances change between prefill and decode, as ``cluster.roles``."""
    lease_s: Positive = 30.0
    """Seconds of a lease, as ``cluster.lease_s``."""
    slo: Objectives = Objectives()
    load: Load = Load()
    request_ms: NonNegative = 0.0
    """Milliseconds of a request beside its steps: the server's, and of messages to and fro."""
    timeout_s: Positive | None = None
    """Seconds that a request may take."""


def parse_scenario(text: str, where: str) -> Scenario:
    """Return the scenario of a YAML text.

    Raises: ConfigError that names the field.
    """
    try:
        fields: Any = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError("sim.scenario", f"{where} is not YAML: {error}") from error
    try:
        # The conversion is not strict, since YAML reads 1e-4 (a number without a decimal point) as
        # text.
        return msgspec.convert(fields, Scenario, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("sim.scenario", f"{where}: {error}") from error


def read_scenario(path: Path) -> Scenario:
    """Return the scenario of a file; a trace that it names is found beside it.

    Raises: NotFoundError; ConfigError that names the field.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        what = f"cannot read {path}: {why}: give the path of a scenario"
        raise NotFoundError("sim.scenario", what) from error
    scenario = parse_scenario(text, path.name)
    trace = scenario.load.trace
    if trace and not Path(trace).is_absolute():
        load = msgspec.structs.replace(scenario.load, trace=str(path.parent / trace))
        scenario = msgspec.structs.replace(scenario, load=load)
    return scenario


def change_scenario(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """Return a scenario with some of its fields replaced.

    Args:
        scenario: to be changed.
        changes: values by path, as ``load.rate_scale``, ``instances.0.count``, or
            ``instances.*.step_overhead_ms`` for all groups.

    Raises: ConfigError (there is no such field, or a value is out of its bounds).
    """
    fields = msgspec.json.decode(msgspec.json.encode(scenario))
    for path, value in changes.items():
        _set(fields, path.split("."), value, path)
    try:
        return msgspec.convert(fields, Scenario, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("sim.scenario", str(error)) from error


def _set(node: Any, keys: list[str], value: Any, path: str) -> None:
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        entries = cast("list[Any]", node)
        if key == "*":
            for each in entries:
                _set(each, rest, value, path)
            return
        if not key.isdecimal() or int(key) >= len(entries) or not rest:
            raise ConfigError("sim.scenario", f"{path}: no {key!r} among {len(entries)} entries")
        _set(entries[int(key)], rest, value, path)
    elif not rest:
        node[key] = value
    elif not isinstance(node.get(key), dict | list):
        raise ConfigError("sim.scenario", f"{path}: the scenario has no {key!r} to change")
    else:
        _set(node[key], rest, value, path)


def parse_changes(words: Iterable[str]) -> dict[str, Any]:
    """Return the changes of ``PATH=VALUE`` words, values as YAML.

    Raises: ConfigError.
    """
    changes: dict[str, Any] = {}
    for word in words:
        path, sign, value = word.partition("=")
        if not sign or not path:
            raise ConfigError("sim.scenario", f"--set {word}: give PATH=VALUE")
        try:
            changes[path] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError("sim.scenario", f"--set {word}: {error}") from error
    return changes
