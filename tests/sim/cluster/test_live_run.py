"""Goal: what was decided live is decided again, one by one, when it is replayed.

Method: an engine of the demo model serves a load that does not fit its blocks, on the real clock;
each of its plans is noted, with its moment. A simulated instance that is given the same arrivals
and lets each step end when the live one did must make the same plans. Of conductors, the journal of
a run is replayed; the journal of real processes is in tests/e2e/test_disaggregated_serve.py.
"""

import random
from functools import partial

import pytest
from sim_scenarios import PAIR, draw_rows, make

from tandem.conductor.journal import JournalingConductor, replay_journal
from tandem.conductor.policies.table import POLICIES
from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError, CorruptionError
from tandem.core.loads.records import RequestRecord
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.models.config import ModelConfig
from tandem.sim.cluster.events import Events
from tandem.sim.cluster.instance import InstanceSetup, SimInstance
from tandem.sim.cluster.links import Links
from tandem.sim.cluster.placing import Placing
from tandem.sim.cluster.run import build_cluster

CONFIG = EngineConfig(
    block_size=16,
    num_kv_blocks=14,
    max_model_len=192,
    max_batch_tokens=64,
    max_running=4,
    threads=1,
)
MAX_STEPS = 2000


def draw_requests():
    """Return (step before which it arrives, request), prompts sharing beginnings."""
    chance = random.Random(5)
    prefixes = [[chance.randrange(300, 900) for _ in range(70)] for _ in range(3)]
    drawn = []
    for number in range(16):
        own = [chance.randrange(300, 900) for _ in range(chance.randint(4, 60))]
        prompt = chance.choice(prefixes)[: chance.choice((16, 40, 70))] + own
        num_tokens = chance.choice((1, 9, 60))
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number)
        request = AddRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        drawn.append((chance.randrange(60), request))
    return sorted(drawn, key=lambda each: each[0])


def describe(plan):
    sequences = [
        (each.request.request_id, each.phase, each.start, each.num_tokens)
        for each in plan.sequences
    ]
    copies = [(copy.src_block_id, copy.dst_block_id, copy.num_tokens) for copy in plan.copies]
    return sequences, copies, len(plan.filled), len(plan.evicted)


def note_plans(monkeypatch):
    """Return a list that gets the plans of every scheduler that are not empty, and their moments.

    Its entries are removed by whoever asks the next scheduler.
    """
    plans, schedule = [], Scheduler.schedule

    def noting(scheduler, now_s):
        plan = schedule(scheduler, now_s)
        if plan.sequences:
            plans.append((describe(plan), now_s))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noting)
    return plans


@pytest.mark.slow
def test_the_plans_of_a_live_engine_are_made_again_in_virtual_time(monkeypatch):
    clock = MonotonicClock()
    again = note_plans(monkeypatch)
    built = build_engine(ModelConfig(path="demo", dtype="bfloat16"), CONFIG, clock)
    arrivals = []
    todo = draw_requests()
    for number in range(MAX_STEPS):
        while todo and todo[0][0] <= number:
            request = todo.pop(0)[1]
            built.engine.add(request)
            arrivals.append((clock.now_s(), request))
        if not todo and not built.engine.has_requests:
            break
        built.engine.step()
    assert not built.engine.has_requests
    stats = built.engine.get_stats()
    assert stats.num_preemptions
    assert stats.evicted_tokens
    assert stats.prefix_hit_tokens

    live = list(again)
    again.clear()
    events = Events()
    ends_s = [at_s for _, at_s in live[1:]] + [clock.now_s()]

    class RecordedSteps:
        def predict_s(self, work):
            # This plan is noted already.
            return ends_s[len(again) - 1] - events.now_s

    setup = InstanceSetup(
        name="i", role="unified", engine=CONFIG, steps=RecordedSteps(), block_bytes=1,
        nic_bytes_per_s=1.0,
    )  # fmt: skip
    instance = SimInstance(setup, events, Links(events), {}.__getitem__)
    for number, (at_s, request) in enumerate(arrivals):
        record = RequestRecord(index=number, input_length=1, output_length=1)
        events.call_at(at_s, partial(instance.add, request, record, lambda output: None, 1 << 20))
    events.run()
    assert len(live) > 60
    for number, ((then, _), (now, _)) in enumerate(zip(live, again, strict=True)):
        assert now == then, f"plan {number} of {len(live)}"


def journal_of(policy, count=24):
    """Return the journal of a simulated run, and its decisions by the cluster's own log."""
    lines = []
    scenario = make(PAIR, tokens=512 * 40)
    cluster = build_cluster(scenario)
    cluster.placing = Placing(
        policy,
        cluster.instances.values(),
        conductor=JournalingConductor(policy, "none", lines.append),
    )
    cluster.run(draw_rows(count, gap_ms=60))
    return lines, cluster.decisions


@pytest.mark.parametrize(
    "policy",
    [
        policy if policy in ("mooncake", "sglang") else pytest.param(policy, marks=pytest.mark.slow)
        for policy in POLICIES
    ],
)
def test_a_journal_gives_the_same_decisions_one_by_one(policy):
    lines, decisions = journal_of(policy)
    replayed = list(replay_journal(lines))
    assert [(each.then.kind, each.then.prefill, each.then.decode) for each in replayed] == [
        (each.kind, each.prefill, each.decode) for each in decisions
    ]
    assert len(replayed) >= 24
    assert all(each.now == each.then for each in replayed)


def test_another_policy_decides_otherwise_and_a_torn_line_ends_a_journal():
    lines, _ = journal_of("mooncake")
    other = list(replay_journal(lines, "random"))
    assert 0 < sum(each.now != each.then for each in other) <= len(other)
    torn = [*lines[:-1], lines[-1][:-5]]
    assert len(list(replay_journal(torn))) >= len(other) - 1
    with pytest.raises(ConfigError, match="no policy"):
        list(replay_journal(lines, "best"))
    for wrong in ([], [b"{}\n"], [lines[0], b'["dance", []]\n'], [lines[0], b'["leave", [1]]\n']):
        with pytest.raises(CorruptionError):
            list(replay_journal(wrong))
