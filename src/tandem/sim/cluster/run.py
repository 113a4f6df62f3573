"""Builds and runs a scenario: instances from machines and models, requests from a trace, and
figures.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.errors import CapacityError, ConfigError
from tandem.core.loads.figures import Objectives, summarise
from tandem.core.loads.records import LoadReport, RequestRecord
from tandem.core.loads.traces import TraceRow, check_divisor, read_rows, shrink_rows
from tandem.core.wire import Slo
from tandem.engine.cluster.request_states import Limits
from tandem.placement.catalog import find_model, read_hardware
from tandem.placement.costs import Placement
from tandem.placement.fitting import read_efficiencies
from tandem.placement.shape import FORMAT_BYTES, read_shape
from tandem.sim.cluster.cluster import Decision, RoleSwitch, SimCluster
from tandem.sim.cluster.events import Events
from tandem.sim.cluster.generators import find_generator, generate_rows
from tandem.sim.cluster.instance import InstanceSetup, SimInstance
from tandem.sim.cluster.links import Links
from tandem.sim.cluster.placing import Placing
from tandem.sim.cluster.requests import repeat_rows, scale_rows
from tandem.sim.cluster.scenario import Group, LinkSpec, Load, Scenario
from tandem.sim.cluster.steps import LearntSteps, PlannedSteps, StepModel
from tandem.sim.cluster.store import SimStore

__all__ = [
    "InstanceFigures",
    "Run",
    "SimReport",
    "build_cluster",
    "make_setups",
    "open_load",
    "run_scenario",
]


class InstanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The measured figures of one simulated instance over a run."""

    name: str
    role: str
    busy_s: float
    """Seconds spent in steps."""
    prefill_s: float
    """Seconds of ``busy_s`` spent on prompts."""
    steps: int
    requests: int
    """Number of prompts looked up in the instance's prefix index."""
    prompt_tokens: int
    hit_tokens: int
    """Prompt tokens found in the prefix index, including those that the store had loaded in time.
    """
    store_hit_tokens: int
    """Prompt tokens of ``hit_tokens`` that were loaded from the store."""
    preemptions: int
    received_bytes: float
    sent_bytes: float


class SimReport(LoadReport, frozen=True, kw_only=True):
    """The figures of ``tandem bench serve``, with those of the cluster added."""

    scenario: str
    load_s: float
    """Seconds in which requests arrived: from the first to the last arrival, and one mean gap."""
    events: int
    prefill_s: float
    """Seconds that all instances spent on prompts."""
    hit_ratio: float
    """Share of prompt tokens found in a prefix index."""
    store_hit_ratio: float
    """Share of prompt tokens loaded from the store."""
    fallbacks: dict[str, int]
    role_switches: tuple[RoleSwitch, ...] = ()
    """Role changes caused by the load, in order."""
    instances: list[InstanceFigures]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A completed run of a scenario: its report, its requests and the decisions about them."""

    report: SimReport
    records: list[RequestRecord]
    decisions: list[Decision]


def make_setups(scenario: Scenario) -> list[InstanceSetup]:
    """Return the parts and settings of each instance of a scenario.

    Raises: NotFoundError (unknown machine or model); ConfigError (a group of instances is not fully
        or not validly described, or the instances do not go together); CapacityError (weights do
        not fit).
    """
    setups: list[InstanceSetup] = []
    bus = 1e11 if scenario.store is None else scenario.store.bus_gb_per_s * 1e9
    for group in scenario.instances:
        steps, kv_bytes, num_layers, kv_tokens = _resolve(group)
        size = group.engine.block_size
        num_blocks = kv_tokens // size
        engine = msgspec.structs.replace(
            group.engine,
            num_kv_blocks=num_blocks,
            max_model_len=group.engine.max_model_len or num_blocks * size,
        )
        for _ in range(group.count):
            setups.append(
                InstanceSetup(
                    name=f"{group.role[0]}{len(setups)}",
                    role=group.role,
                    engine=engine,
                    steps=steps,
                    block_bytes=kv_bytes * size,
                    nic_bytes_per_s=_find_port(group, scenario.links),
                    is_layerwise=scenario.links.is_layerwise,
                    num_layers=num_layers,
                    bus_bytes_per_s=bus,
                )
            )
    if len({setup.engine.block_size for setup in setups}) > 1:
        what = "instances with blocks of different sizes cannot read each other's"
        raise ConfigError("sim.scenario", what, field="instances.engine.block_size")
    roles = {setup.role for setup in setups}
    if ("prefill" in roles) != ("decode" in roles):
        what = f"roles {', '.join(sorted(roles))}: prefill and decode go together"
        raise ConfigError("sim.scenario", what, field="instances.role")
    return setups


def _find_port(group: Group, links: LinkSpec) -> float:
    return (group.nic_gbps or links.gbps) * 1e9 / 8 * links.efficiency


def _resolve(group: Group) -> tuple[StepModel, int, int, int]:
    """Return what a group of identical instances is like: the model of its step times, KV bytes per
    token, layers, and tokens of KV that fit.

    Raises: ConfigError (an unknown format, or more accelerators than the machine has);
        CapacityError (the weights do not fit).
    """
    group.check_speed()
    if group.calibration is not None:
        return LearntSteps(group.calibration), group.kv_bytes_per_token, 1, group.kv_tokens
    spec = read_hardware(group.hardware)
    shape = read_shape(find_model(group.model).config, group.model)
    if group.weights not in FORMAT_BYTES:
        what = f"no format {group.weights!r}: there is {', '.join(FORMAT_BYTES)}"
        raise ConfigError("sim.scenario", what, field="instances.weights")
    num = spec.num_accelerators if group.accelerators is None else group.accelerators
    if num > spec.num_accelerators:
        what = f"{group.hardware} has {spec.num_accelerators} accelerators, not {num}"
        raise ConfigError("sim.scenario", what, field="instances.accelerators")
    place = Placement(
        expert_format=group.weights,
        dense_format=group.weights,
        accelerators=num,
        sockets=spec.sockets,
        gpu_experts=max((layer.num_experts for layer in shape.layers), default=0) if num else 0,
        is_dense_on_gpu=num > 0,
        is_attention_on_gpu=num > 0,
    )
    eff = read_efficiencies()
    if group.gpu_compute is not None:
        eff = msgspec.structs.replace(eff, gpu_compute=group.gpu_compute)
    if group.gpu_bandwidth is not None:
        eff = msgspec.structs.replace(eff, gpu_bandwidth=group.gpu_bandwidth)
    steps = PlannedSteps(
        spec,
        shape,
        place,
        eff,
        overhead_s=group.step_overhead_ms / 1e3,
        decode_overhead_s=group.decode_overhead_ms / 1e3,
    )
    memory = spec.accelerator_memory_bytes * num // max(spec.num_accelerators, 1)
    memory = memory if num else spec.memory_bytes
    weight_bytes = shape.num_weights * FORMAT_BYTES[group.weights]
    room = (memory * group.memory_fraction - weight_bytes) / shape.kv_bytes
    if room < group.engine.block_size:
        what = f"{group.model} in {group.weights} does not fit into {group.hardware}"
        raise CapacityError("sim.scenario", what)
    return steps, shape.kv_bytes, len(shape.layers), group.kv_tokens or int(room)


def open_load(load: Load) -> Iterator[TraceRow]:
    """Return the rows (requests) of a load, which is a trace or is generated, in order of arrival.

    Raises: ConfigError (the load names no trace); the errors of ``read_rows``.
    """
    rows: Iterable[TraceRow]
    if load.generator is not None:
        given = load.generator
        rows = generate_rows(find_generator(given) if isinstance(given, str) else given)
    elif load.trace:
        rows = read_rows(Path(load.trace))
    else:
        what = "the scenario has neither a trace nor a generator: give --trace"
        raise ConfigError("sim.scenario", what, field="load.trace")
    if load.repeat > 1:
        rows = repeat_rows(list(rows), load.repeat)
    if load.rate_scale != 1.0:
        rows = scale_rows(rows, load.rate_scale)
    return itertools.islice(shrink_rows(rows, load.length_divisor), load.limit or None)


def build_cluster(
    scenario: Scenario, *, on_done: Callable[[RequestRecord], None] | None = None
) -> SimCluster:
    """Return the cluster of a scenario, before its first request.

    Args:
       scenario: the scenario.
       on_done: called with each completed record.

    Raises: the errors of ``make_setups``.
    """
    events = Events()
    links = Links(events, scenario.links.latency_us / 1e6)
    instances: dict[str, SimInstance] = {}
    store = None
    load = scenario.load
    block_tokens = check_divisor(load.length_divisor, load.block_tokens)
    for setup in make_setups(scenario):
        if block_tokens % setup.engine.block_size:
            what = (
                f"blocks of {setup.engine.block_size} tokens do not divide the trace's of "
                f"{block_tokens}: set engine.block_size, or load.block_tokens"
            )
            raise ConfigError("sim.scenario", what, field="instances.engine.block_size")
        if scenario.store is not None and store is None:
            store = SimStore(scenario.store, links, setup.block_bytes, lambda: events.now_s)
        instances[setup.name] = SimInstance(setup, events, links, instances.__getitem__, store)
    return SimCluster(
        instances,
        Placing(scenario.policy, instances.values(), scenario.admission, _make_slo(scenario.slo)),
        events,
        Limits(lease_s=scenario.lease_s),
        timeout_s=scenario.timeout_s,
        store=store,
        block_tokens=block_tokens,
        request_s=scenario.request_ms / 1e3,
        on_done=on_done,
        is_balanced=scenario.roles == "load",
    )


def _make_slo(objectives: Objectives) -> Slo:
    return Slo(
        ttft_s=None if objectives.ttft is None else objectives.ttft / 1e3,
        tpot_s=None if objectives.tpot is None else objectives.tpot / 1e3,
    )


def run_scenario(
    scenario: Scenario,
    rows: Iterable[TraceRow],
    *,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> Run:
    """Run a scenario until its last request has ended.

    Args:
       scenario: the scenario.
       rows: the requests, in order of arrival.
       on_done: called with each completed record.

    Raises: the errors of ``make_setups``.
    """
    cluster = build_cluster(scenario, on_done=on_done)
    cluster.run(rows)
    figures = [_sum_up(instance) for instance in cluster.instances.values()]
    report = summarise(
        cluster.records,
        backend="tandem-sim",
        dataset_name="mooncake",
        objectives=scenario.slo,
    )
    prompt_tokens = sum(each.prompt_tokens for each in figures)
    fields: dict[str, Any] = {name: getattr(report, name) for name in LoadReport.__struct_fields__}
    return Run(
        report=SimReport(
            **fields,
            scenario=scenario.name,
            load_s=_measure_load_s(cluster.records),
            events=cluster.events.num_run,
            prefill_s=sum(each.prefill_s for each in figures),
            hit_ratio=sum(each.hit_tokens for each in figures) / max(prompt_tokens, 1),
            store_hit_ratio=sum(each.store_hit_tokens for each in figures) / max(prompt_tokens, 1),
            fallbacks=cluster.fallbacks,
            role_switches=tuple(cluster.role_changes),
            instances=figures,
        ),
        records=cluster.records,
        decisions=cluster.decisions,
    )


def _measure_load_s(records: Sequence[RequestRecord]) -> float:
    """Return the seconds in which requests arrived: the number of requests divided by it is their
    rate.
    """
    if len(records) < 2:
        return 1.0
    span_s = records[-1].sent_s - records[0].sent_s
    return max(span_s * len(records) / (len(records) - 1), 1e-9)


def _sum_up(instance: SimInstance) -> InstanceFigures:
    stats = instance.scheduler.get_stats()
    return InstanceFigures(
        name=instance.name,
        role=instance.role,
        busy_s=instance.busy_s,
        prefill_s=instance.prefill_s,
        steps=instance.num_steps,
        requests=stats.num_prefix_queries,
        prompt_tokens=stats.prefix_query_tokens,
        hit_tokens=stats.prefix_hit_tokens,
        store_hit_tokens=stats.store_hit_tokens,
        preemptions=stats.num_preemptions,
        received_bytes=instance.ingress.moved_bytes,
        sent_bytes=instance.egress.moved_bytes,
    )
