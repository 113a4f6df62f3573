"""Any sequence of calls with any arguments: typed errors, right bytes, never a crash.

Method: a Hypothesis state machine drives two engines and a toy model (the bytes each buffer should
hold); closed engines, dead buffers and wild numbers are drawn as often as good ones.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tests_transfer_world import SECRET

from tandem.core.errors import TandemError
from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine

WILD = st.one_of(st.integers(0, 5000), st.integers(-(2**70), 2**70), st.just(2**63), st.just(-1))


class EngineMachine(RuleBasedStateMachine):
    buffers = Bundle("buffers")

    def __init__(self) -> None:
        super().__init__()
        settings_ = {"secret": SECRET, "deadline_ms": 5000}
        self.engines = [TransferEngine(TransferConfig(**settings_)) for _ in range(2)]
        self.segments = [
            self.engines[0].local_segment,
            self.engines[0].open(self.engines[1].address),
        ]
        # What each live buffer should hold, by identity; its engine's index.
        self.model: dict[int, tuple[int, object, np.ndarray, np.ndarray]] = {}
        self.rng = np.random.default_rng(0)

    def teardown(self) -> None:
        for engine in self.engines:
            engine.close(deadline_s=5)

    @rule(target=buffers, which=st.integers(0, 1), size=WILD, shared=st.booleans())
    def add(self, which, size, shared):
        engine = self.engines[which]
        try:
            if shared:
                buffer = engine.allocate(size if size < 2**20 else 2**62)
                memory = buffer.array
            else:
                memory = np.zeros(max(0, min(size, 5000)), np.uint8)
                buffer = engine.register(memory)
        except TandemError:
            return None
        self.model[id(buffer)] = (which, buffer, memory, memory.copy())
        return buffer

    @rule(
        local=buffers,
        remote=buffers,
        op=st.sampled_from(Op),
        begin=WILD,
        length=WILD,
        local_offset=WILD,
        transport=st.sampled_from([None, "local", "shm", "cma", "tcp"]),
        cancels=st.integers(0, 3),
    )
    def transfer(self, local, remote, op, begin, length, local_offset, transport, cancels):
        if local is None or remote is None or local is remote:
            return
        which, engine = (
            1 if id(remote) not in self.model else self.model[id(remote)][0],
            self.engines[0],
        )
        batch = None
        try:
            batch = engine.submit(
                [
                    Transfer(
                        op,
                        local,
                        self.segments[which],
                        remote.offset + begin,
                        length,
                        local_offset=local_offset,
                    )
                ],
                transport=transport,
            )
            if cancels == 0:
                batch.cancel()
            batch.wait(4)
        except TandemError:
            # A failed transfer may have moved part of its bytes: the model follows the memory.
            if batch is not None:
                for entry in self.model.values():
                    entry[3][:] = entry[2]
            return
        assert 0 <= length <= 5000 * 300
        if length == 0:
            return
        mine, theirs = self.model[id(local)], self.model[id(remote)]
        near = slice(local_offset, local_offset + length)
        far = slice(begin, begin + length)
        assert begin >= 0
        assert begin + length <= len(theirs[3])
        assert local_offset + length <= len(mine[3])
        if op == Op.WRITE:
            theirs[3][far] = mine[3][near]
        else:
            mine[3][near] = theirs[3][far]

    @rule(buffer=buffers, value=st.integers(0, 255))
    def fill(self, buffer, value):
        if buffer is not None and id(buffer) in self.model:
            _, _, memory, expected = self.model[id(buffer)]
            memory[:] = value
            expected[:] = value

    @rule(buffer=buffers, which=st.integers(0, 1))
    def unregister(self, buffer, which):
        if buffer is None:
            return
        try:
            self.engines[which].unregister(buffer, deadline_s=60)
        except TandemError:
            return
        assert self.model.pop(id(buffer))[0] == which

    @rule(size=st.integers(0, 100), name=st.text(max_size=5))
    def notify(self, size, name):
        try:
            self.engines[0].notify(self.segments[1], name, bytes(size), deadline_s=5)
        except (TandemError, UnicodeEncodeError):
            return
        assert self.engines[1].notifications(5)[-1].name == name

    @rule(which=st.integers(0, 1), dice=st.integers(0, 30))
    def close(self, which, dice):
        if dice == 0:
            self.engines[which].close(deadline_s=5)

    @invariant()
    def memory_is_as_the_model_says(self):
        for _, _, memory, expected in self.model.values():
            assert np.array_equal(memory, expected)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
