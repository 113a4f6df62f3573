"""A scenario: all assumptions of a simulated run, as one YAML file.

Machines and models are those of ``tandem plan --list``, or files. Settings of an instance are those
of ``tandem serve`` (``EngineConfig``), so that a scenario has no setting that a server lacks.
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
    """A group of identical instances."""

    count: Count = 1
    role: InstanceRole = "unified"
    hardware: str = ""
    """The machine of one instance: a name in ``tandem plan --list``, or a file."""
    model: str = ""
    """The model: a name in ``tandem plan --list``."""
    weights: str = "bf16"
    """Weight format of all weights."""
    accelerators: Annotated[int, Meta(ge=0)] | None = None
    """Number of the machine's accelerators that the instance uses; None takes all."""
    kv_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens whose KV fits into the instance; 0 computes them from the memory left by the weights.
    """
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the accelerators' memory used for weights and KV."""
    step_overhead_ms: NonNegative = 0.0
    """Milliseconds of each step in addition to the device's work."""
    decode_overhead_ms: NonNegative = 0.0
    """Milliseconds that each decode adds to a step's overhead, for example for sampling."""
    gpu_compute: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the peak rate of matrix products that is reached; None takes the cost model's
    default.
    """
    gpu_bandwidth: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the peak memory bandwidth that is reached; None takes the cost model's default."""
    calibration: Calibration | None = None
    """Learnt step costs, used instead of ``hardware`` and ``model``."""
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0
    """KV bytes per token; needed with ``calibration``, which does not contain it."""
    engine: EngineConfig = EngineConfig(block_size=512, max_batch_tokens=8192, max_running=256)
    nic_gbps: Positive | None = None
    """Gbit/s of this group's ports; None takes those of ``links``."""

    def check_speed(self) -> None:
        """Check that this group of instances has what its speed follows from: a machine and a
        model, or a calibration. Called late, since a command may add a calibration.

        Raises: ConfigError (it has neither, or a calibration without ``kv_tokens``).
        """
        if self.calibration is None and not (self.hardware and self.model):
            what = "a group of instances has hardware and model, or a calibration"
            raise ConfigError("sim.scenario", what, field="instances.hardware")
        if self.calibration is not None and not self.kv_tokens:
            what = "with a calibration, say how many tokens of KV an instance keeps"
            raise ConfigError("sim.scenario", what, field="instances.kv_tokens")


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between instances: each has one full-duplex port."""

    gbps: Positive = 800.0
    """Gbit/s of a port in each direction."""
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.87
    """Share of the bandwidth that carries payload: 87 GB/s of 4 x 200 Gbit/s, the published figure
    of the transfer engine.
    """
    latency_us: NonNegative = 50.0
    """Microseconds from starting a transfer until its first byte moves."""
    is_layerwise: bool = True
    """True if the KV of a chunk is moved while its later layers are computed."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests of a run: a trace or a generated load, and changes to it."""

    trace: str = ""
    """Path of a trace in Mooncake's format."""
    generator: Generator | str | None = None
    """Statistics of a generated load, or the name of a built-in one, instead of a trace."""
    block_tokens: Count = BLOCK_TOKENS
    """Tokens per hash of the trace."""
    length_divisor: Count = 1
    """Divisor of all lengths, including the tokens per hash: makes the load fit a small model."""
    limit: Annotated[int, Meta(ge=0)] = 0
    """Most requests to run; 0 runs all."""
    rate_scale: Positive = 1.0
    """Factor on the request rate: times between arrivals are divided by it."""
    repeat: Count = 1
    """Number of times the trace is run in sequence, each time with new hashes."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All assumptions of one run."""

    name: str = ""
    note: str = ""
    """Assumptions that the reader should know, with their sources."""
    seed: int = 1
    instances: Annotated[tuple[Group, ...], Meta(min_length=1)]
    links: LinkSpec = LinkSpec()
    store: StoreSpec | None = None
    policy: str = "prefix"
    """Name of the routing policy, as in the setting ``cluster.policy``."""
    admission: AdmissionMode | Literal["late"] = "none"
    """Admission by the TTFT and TPOT of ``slo``; a rejected request counts as failed. ``late``,
    which servers do not have, checks TTFT on arrival and TPOT after the prefill.
    """
    roles: Literal["fixed", "load"] = "fixed"
    """With ``load``, instances change between prefill and decode, as with ``cluster.roles``."""
    lease_s: Positive = 30.0
    """Seconds of a lease, as ``cluster.lease_s``."""
    slo: Objectives = Objectives()
    load: Load = Load()
    request_ms: NonNegative = 0.0
    """Milliseconds that a request takes outside of its steps, for the server's work and messages.
    """
    timeout_s: Positive | None = None
    """Longest time of a request in seconds; None for no limit."""


def parse_scenario(text: str, where: str) -> Scenario:
    """Return the scenario of a YAML text.

    Raises: ConfigError (names the field).
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
    """Read a scenario from a file; the path of its trace is relative to the file.

    Raises: NotFoundError (the file cannot be read); ConfigError (it is not a valid scenario; names
        the field).
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
    """Return a scenario with some fields replaced.

    Args:
       scenario: the original.
       changes: values by path, such as ``load.rate_scale``, ``instances.0.count``, or
           ``instances.*.step_overhead_ms`` for all groups.

    Raises: ConfigError (no such field, or a value out of its bounds).
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
    """Parse ``PATH=VALUE`` words, values as YAML; return values by path.

    Raises: ConfigError (a word is not of this form).
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
