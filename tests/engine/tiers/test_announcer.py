"""What a prefill instance answers about prefills that are not there."""

import msgspec
import numpy as np
import pytest
from test_handover import Node, ask

from tandem.core.kv_layout import MlaLayout
from tandem.engine.disaggregation.announcer import PrefillAnnouncer
from tandem.engine.disaggregation.messages import KvAnswer, KvQuestion

LAYOUT = MlaLayout(num_layers=1, block_size=4, kv_lora_rank=4, rope_dim=0, dtype="bfloat16")


class Call:
    peer = "decode"

    def __init__(self, request_id) -> None:
        question = KvQuestion(request_id=request_id, digest=b"", wait_s=1.0, layout=LAYOUT)
        self.payload = msgspec.msgpack.encode(question)
        self.answers = []

    def reply(self, payload):
        self.answers.append(msgspec.msgpack.decode(payload, type=KvAnswer))


def make_announcer(node):
    announcer = PrefillAnnouncer(node.engine, None, np.zeros(1, np.uint8), node.clock)
    node.engine.attach_listener(announcer)
    return announcer


@pytest.mark.parametrize("how", ["released", "expired", "cancelled"])
def test_who_asks_for_the_first_time_after_the_end_does_not_wait(how):
    """A question that was late, as the connection was lost, would wait as long as its request."""
    node = Node()
    announcer = make_announcer(node)
    node.engine.add(ask(prefill_lease_s=30.0))
    if how == "cancelled":
        node.engine.cancel("a")
    node.run()
    if how == "released":
        node.engine.release_hold("a")
    node.clock.advance(30.1)
    node.run()
    [answer] = announcer.handle_calls([Call("a")])
    assert msgspec.msgpack.decode(answer, type=KvAnswer).run is None
    assert announcer.num_waiting == 0


def test_a_question_about_a_prefill_to_come_waits_and_is_forgotten():
    node = Node()
    announcer = make_announcer(node)
    call = Call("b")
    assert announcer.handle_calls([call]) == [None]
    announcer.note_progress()
    assert (announcer.num_waiting, call.answers) == (1, [])
    node.clock.advance(1.1)
    announcer.note_progress()
    assert announcer.num_waiting == 0
