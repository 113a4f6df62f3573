"""The part of ``tandem plan`` that replays a trace of expert choices through caches of experts."""

import sys
from pathlib import Path

from tandem.cli.output import make_bars, print_json, print_table
from tandem.core.errors import UnsupportedError

__all__ = ["print_rates"]

MIN_STEPS = 2


def print_rates(trace: Path, *, as_json: bool) -> None:
    """Print the hit rates of all cache policies over a trace.

    Args:
        trace: file written by a server with ``engine.expert_trace``.
        as_json: True to print one JSON document, with the rates of each layer.

    Raises: UnsupportedError (the trace is too short to replay); errors of ``open_trace``.
    """
    from tandem.engine.stepping.expert_trace import open_trace, read_decodes
    from tandem.placement.experts.replay import ORACLE, replay_layers

    header, records = open_trace(trace)
    layers = read_decodes(records, len(header.layers))
    num_steps = len(layers[0])
    if num_steps < MIN_STEPS:
        what = f"{trace} has {num_steps} steps with output tokens: record more of them"
        raise UnsupportedError("cli.replay_experts", what)
    with make_bars(is_off=as_json) as bars:
        task = bars.add_task("replaying", total=None)
        replays = replay_layers(
            layers,
            header.num_experts,
            note_progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    if as_json:
        print_json({"trace": header, "num_steps": num_steps, "replays": replays})
        return
    capacities = sorted({replay.capacity for replay in replays})
    policies = list(dict.fromkeys(replay.policy for replay in replays))
    rates = {(replay.policy, replay.capacity): replay for replay in replays}
    sys.stdout.write(
        f"{header.model}: {num_steps} steps with output tokens, {header.top_k} of "
        f"{header.num_experts} experts in {len(header.layers)} layers\n"
        "hits of the second half, by experts of a layer that are held (loads a step)\n\n"
    )
    print_table(
        ("policy", *(f"{size} held" for size in capacities)),
        [
            (
                policy,
                *(
                    f"{rates[policy, size].hit_rate:.1%} ({rates[policy, size].loads_per_step:.1f})"
                    for size in capacities
                ),
            )
            for policy in policies
        ],
    )
    best = {
        size: max(
            (rates[policy, size] for policy in policies if policy != ORACLE),
            key=lambda replay: replay.hit_rate,
        )
        for size in capacities
    }
    sys.stdout.write("\nby layer, the best policy of each size\n\n")
    print_table(
        ("layer", *(f"{size}: {best[size].policy}" for size in capacities)),
        [
            (str(layer), *(f"{best[size].by_layer[place]:.1%}" for size in capacities))
            for place, layer in enumerate(header.layers)
        ],
    )
