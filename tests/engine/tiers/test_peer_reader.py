"""The decode side's bookkeeping of loads from other instances, without any bytes."""

import asyncio

import numpy as np

from tandem.core.clock import ManualClock
from tandem.core.instance_status import Statistics
from tandem.core.wire import KvHandle, PrefillKv, SamplingParams
from tandem.engine.disaggregation.hand_over import ReadTarget
from tandem.engine.disaggregation.reader import PeerReader
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.scheduling.request import Request


class Sink:
    def __init__(self):
        self.failed = []

    def load_failed(self, request, block_ids, reason="failed"):
        self.failed.append((request.request_id, [b.number for b in block_ids], reason))


def make_loads(count):
    source = PrefillKv(
        instance="prefill", handle=KvHandle(request_id="p", num_tokens=4 * count, lease_s=1.0)
    )
    request = Request("d", [1] * 4 * count, SamplingParams(), 0.0, kv_source=source)
    return [
        BlockLoad(request, i, b"%d" % i, GroupBlock(Group.FULL, 10 + i), source)
        for i in range(count)
    ]


def read(*plans):
    """Give a reader plans at once, as a slow thread sees them; return what it reported."""

    async def run():
        sink = Sink()
        target = ReadTarget(None, np.zeros(64, np.uint8), None, ManualClock(), Statistics())
        reader = PeerReader(target, sink)
        for plan in plans:
            reader.begin(plan)
        for _ in range(5):
            await asyncio.sleep(0)
        assert reader.num_in_transfer == 0
        return sink.failed

    return asyncio.run(run())


def test_a_load_that_is_dropped_before_its_hand_over_has_begun_is_reported():
    """Else its blocks belong to a transfer for ever: its task ends before its first line."""
    loads = make_loads(2)
    failed = read(StepPlan(loads=loads), StepPlan(dropped=loads))
    assert failed == [("d", [10], "dropped"), ("d", [11], "dropped")]


def test_a_load_from_an_instance_that_was_never_opened_is_reported():
    failed = read(StepPlan(loads=make_loads(1)))
    assert failed == [("d", [10], "not_found")]
