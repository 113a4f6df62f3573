"""``tandem bench conductor``: CPU time of a routing decision, by policy, instances and queue
length.

With ``--trace``, cases of ``conductor_live.py`` also measure what policies and admission gain on
running instances.

The prompt has 514 KV blocks. Every instance has cached the first 64 of them, and one instance in
twenty the next 400 too. CPU time of the process is measured, so other load on the machine does not
count; the prompts' block keys are computed before.
"""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.bench.conductor_live import make_live_cases
from tandem.bench.harness import BenchCase
from tandem.conductor.conductor import Conductor
from tandem.conductor.directory import Chain
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import POLICIES, make_policy
from tandem.conductor.routes import InstanceRef, Place
from tandem.core.instance_status import InstanceRole

__all__ = ["make_cases"]

BLOCK_SIZE = 16
NUM_SHARED, NUM_GROUP, NUM_OWN = 64, 400, 50
NUM_GROUPS = 20
NUM_DECISIONS = 200
MANY, FEW = 1000, 10
PLACE = Place(False, frozenset(), None, needs_decode=True, is_resumed=False)
FACTS = InstanceFacts(num_blocks=10_000, block_size=BLOCK_SIZE, max_model_len=131_072,
                      max_batch_tokens=2048)  # fmt: skip


def make_cases(*, quick: bool, trace: Path | None = None) -> Iterator[BenchCase]:
    """Yield each policy with 1,000 instances against 10, and with long queues against short ones.

    Args:
       quick: fewer decisions.
       trace: a trace in Mooncake's format for the live cases; None leaves them out.
    """
    count = NUM_DECISIONS // 4 if quick else NUM_DECISIONS
    roles: dict[str, Sequence[InstanceRole]] = {
        "unified": ("unified",),
        "pairs": ("prefill", "decode"),
    }
    for name, kinds in roles.items():
        for policy in POLICIES:
            many, few = _Asked(policy, kinds, MANY, 1, count), _Asked(policy, kinds, FEW, 1, count)
            yield BenchCase(
                name=f"policy={policy} roles={name} instances={MANY}",
                unit="us CPU a decision",
                ours=many.measure,
                check=many.check,
                baseline=few.measure,
                baseline_name=f"{FEW} instances",
            )
    short = _Asked("mooncake", ("unified",), MANY, 1, count)
    long = _Asked("mooncake", ("unified",), MANY, 1000, count)
    yield BenchCase(
        name=f"policy=mooncake roles=unified instances={MANY} queue=x1000",
        unit="us CPU a decision",
        ours=long.measure,
        check=long.check,
        baseline=short.measure,
        baseline_name="queue=x1",
    )
    if trace is not None:
        yield from make_live_cases(trace, quick=quick)


class _Asked:
    """A conductor (the router of requests) that knows instances under load, and prompts for which
    it must choose instances.
    """

    def __init__(
        self, policy: str, roles: Sequence[InstanceRole], num_instances: int, queue: int, count: int
    ) -> None:
        self._setup = (policy, roles, num_instances, queue)
        self._count = count
        self._conductor: Conductor | None = None
        self._number = 0

    def check(self) -> str:
        """Let the conductor decide once; return ``ok`` if the decision names an instance which, for
        a policy that knows prefixes, has the prompt's prefix cached, else what is wrong.
        """
        decision = self._get().place(PLACE, self._ask())
        chosen = decision.chosen
        if decision.route is None or chosen is None:
            return "no route"
        wants_prefix = self._setup[0] in ("prefix", "dynamo") and self._setup[3] == 1
        least = (NUM_SHARED + NUM_GROUP) * BLOCK_SIZE if wants_prefix else NUM_SHARED * BLOCK_SIZE
        return "ok" if chosen.prefix_len >= least else f"prefix of {chosen.prefix_len}"

    def measure(self) -> float:
        """Return the microseconds of CPU time that a decision takes."""
        conductor = self._get()
        asked = [self._ask() for _ in range(self._count)]
        begin_s = time.process_time()
        for question in asked:
            conductor.place(PLACE, question)
        return (time.process_time() - begin_s) / self._count * 1e6

    def _get(self) -> Conductor:
        if self._conductor is None:
            self._conductor = _make(*self._setup)
        return self._conductor

    def _ask(self) -> Question:
        self._number += 1
        group = _list_group(self._number % NUM_GROUPS)
        own = range(10**9 + self._number * NUM_OWN, 10**9 + (self._number + 1) * NUM_OWN)
        keys = [*range(NUM_SHARED), *group, *own]
        prompt_len = len(keys) * BLOCK_SIZE + 1
        return Question(f"r{self._number}", prompt_len, 300, [Chain(keys, BLOCK_SIZE)])


def _list_group(group: int) -> range:
    first = 10**6 + group * NUM_GROUP
    return range(first, first + NUM_GROUP)


def _make(policy: str, roles: Sequence[InstanceRole], num_instances: int, queue: int) -> Conductor:
    conductor, chance = Conductor(make_policy(policy)), random.Random(1)  # noqa: S311
    names: dict[str, InstanceRole] = {f"i{n}": roles[n % len(roles)] for n in range(num_instances)}
    for number, (name, role) in enumerate(names.items()):
        conductor.join(name, role)
        conductor.serve(InstanceRef(name, 0), FACTS)
        load = Load(
            queued_tokens=chance.randrange(1000) * queue,
            queued_context=chance.random() * 1e6 * queue,
            num_decoding=chance.randrange(64),
            decode_tokens=chance.randrange(100_000),
            num_requests=chance.randrange(64) * queue,
            used_blocks=chance.randrange(5000),
            largest_blocks=100,
        )
        conductor.set_load(name, load)
        conductor.note_blocks(name, range(NUM_SHARED))
        conductor.note_blocks(name, _list_group(number // len(roles) % NUM_GROUPS))
    sources = [name for name, role in names.items() if role == "prefill"]
    for name, role in names.items():
        if role == "decode":
            conductor.set_sources(name, sources)
    return conductor
