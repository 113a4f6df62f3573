"""48 chats by transformers' own modules get the bits of a fresh run, log-probabilities too.

Goal: whatever was reused, given up, preempted or begun elsewhere changes no token and no
log-probability of a model that operators do not run.
Method: a tiny random GPT-2 in bfloat16. Each chat has two turns; the second continues the first,
edits it, or branches off within its answer. Every way of serving them is compared with an engine
that reuses nothing, one prompt at a time. Half of the chats are greedy, half seeded.
"""

import pytest
from chat_engine import ChatEngine, make_prompt
from own_modules import save_own

from tandem.core.wire import AddRequest, Continuation, SamplingParams

pytestmark = pytest.mark.slow

NUM_CHATS, NUM_TOKENS = 48, 24
SIZES = {"block_size": 16, "max_batch_tokens": 64, "max_running": 16, "max_model_len": 640}
ROOM = {"num_kv_blocks": 1600, "num_state_slots": 100}
NUM_STEMS = 7
"""Texts that prompts begin with: as many first pieces, each of which several chats share."""
FIRST = [
    [*make_prompt((290, 261, 340, 33)[i % 4], i % NUM_STEMS), *make_prompt(7 + i % 13, i)]
    for i in range(NUM_CHATS)
]


def make_request(name, i, prompt, **fields):
    sampling = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=float(i % 2), seed=i, ignore_eos=True, logprobs=2
    )
    fields = {"message_end": len(prompt) - 2, **fields}
    return AddRequest(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)


def go_on(i, prompt, answer):
    """The prompt of a chat's second turn."""
    tokens, own = [token for token, _ in answer], make_prompt(9 + i % 11, i + 60)
    if i % 3 == 0:
        return [*prompt, *tokens, *own]
    if i % 3 == 1:
        return [*prompt[: len(prompt) * 2 // 3], *own]
    return [*prompt, *tokens[: 3 + i % 17], *own]


def run(engine, requests, num_steps=None):
    """Answer requests, by id, as far as so many steps go."""
    told = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_requests and num_steps != 0:
        num_steps = None if num_steps is None else num_steps - 1
        for output in engine.step():
            assert output.error_text is None, output.error_text
            told[output.request_id] += zip(output.token_ids, output.logprobs or (), strict=True)
    return list(told.values())


class Case:
    """A model, its chats, and the answers of a fresh run."""

    def __init__(self, folder) -> None:
        self.folder = save_own(folder)
        fresh = self.make(prefix_cache=False, max_batch_tokens=1024, max_running=1)

        def ask(i, prompt):
            [answer] = run(fresh, [make_request(f"{i} {len(prompt)}", i, prompt)])
            return answer

        self.first = [ask(i, prompt) for i, prompt in enumerate(FIRST)]
        turns = zip(range(NUM_CHATS), FIRST, self.first, strict=True)
        self.prompts = [go_on(*turn) for turn in turns]
        self.second = [ask(i, prompt) for i, prompt in enumerate(self.prompts)]
        assert len({str(answer) for answer in self.first + self.second}) > 1.5 * NUM_CHATS

    def make(self, **settings):
        return ChatEngine(self.folder, **(SIZES | ROOM | settings)).engine

    def check(self, engine, label):
        for turn, prompts, expected in (("a", FIRST, self.first), ("b", self.prompts, self.second)):
            asked = [make_request(f"{label}{turn}{i}", i, p) for i, p in enumerate(prompts)]
            assert run(engine, asked) == expected


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("own"))


def test_plain_and_cached(case):
    case.check(case.make(prefix_cache=False, overlap="on"), "plain")
    engine = case.make(overlap="on")
    case.check(engine, "cold")
    before = engine.get_stats().prefix_hit_tokens
    assert before > 1000
    case.check(engine, "warm")
    total = sum(map(len, FIRST + case.prompts))
    assert engine.get_stats().prefix_hit_tokens - before > 0.4 * total


def test_evicted_and_preempted(case):
    """Copies are given up for others and by the budget of tokens; requests lose their blocks.

    Of 800 tokens two requests hold most, and three copies the rest; small blocks run out while
    answers grow.
    """
    engine = case.make(num_kv_blocks=200, block_size=4, num_state_slots=8, overlap="on")
    for label in ("one", "two"):
        case.check(engine, label)
    stats = engine.get_stats()
    assert stats.num_evicted_snapshots > 10
    assert stats.num_preemptions > 0


def test_killed(case):
    """Instances end in the middle; chats go on at others, as the dispatcher has them do."""
    for prompts, expected in ((FIRST, case.first), (case.prompts, case.second)):
        told = [[] for _ in prompts]
        for life in range(4):
            engine = case.make(overlap="on")
            left = [i for i, answer in enumerate(told) if len(answer) < NUM_TOKENS]
            asked = []
            for i in left:
                done = [token for token, _ in told[i]]
                of = {"continuation": Continuation(token_ids=done, seed=i)} if done else {}
                asked.append(make_request(f"{i}", i, prompts[i], **of))
            got = run(engine, asked, 120 if life < 3 else None)
            for i, more in zip(left, got, strict=True):
                told[i] += more
        assert told == expected
