"""Goal: a request goes where it is computed soonest, and never where it cannot go.

Method: a fleet of a few instances, whose events the test sends.
"""

import random

import msgspec
import pytest

from tandem.conductor.conductor import Conductor
from tandem.conductor.directory import Chain
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.journal import JournalingConductor, replay_journal
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import POLICIES, make_policy
from tandem.conductor.prediction import predict_row_tpot, predict_tpot
from tandem.conductor.routes import Alone, InstanceRef, NoRoute, Pair, Place
from tandem.core.config import resolve_config
from tandem.core.errors import ConfigError
from tandem.engine.cluster.config import ClusterConfig

P0, P1, D0, D1, U0, U1 = (InstanceRef(name, 0) for name in ("p0", "p1", "d0", "d1", "u0", "u1"))
BLOCK = 16
FACTS = InstanceFacts(num_blocks=100, block_size=BLOCK, max_model_len=2048, max_batch_tokens=512)


class Root(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)


def ask(prompt_len=208, max_tokens=10, first=0):
    keys = list(range(first, first + (prompt_len - 1) // BLOCK))
    return Question("r", prompt_len, max_tokens, [Chain(keys, BLOCK)])


def make(*refs, policy="prefix", sources=("p0", "p1"), **loads):
    conductor = Conductor(make_policy(policy))
    for ref in refs:
        conductor.join(ref.name, {"p": "prefill", "d": "decode", "u": "unified"}[ref.name[0]])
        conductor.serve(ref, FACTS)
        conductor.set_load(ref.name, loads.get(ref.name, Load()))
    for ref in refs:
        if ref.name[0] == "d":
            conductor.set_sources(ref.name, sources)
    return conductor


def place(**fields):
    values = {"is_held": False, "avoid": frozenset(), "prefill": None, "needs_decode": True}
    return Place(**(values | {"is_resumed": False} | fields))


def route(conductor, question=None, **fields):
    return conductor.place(place(**fields), ask() if question is None else question).route


@pytest.mark.parametrize("policy", ["prefix", "load", "mooncake"])
def test_the_least_loaded_of_each_role_serve_a_request(policy):
    busy = {"p0": Load(queued_tokens=500), "d0": Load(num_decoding=1, decode_tokens=9)}
    assert route(make(P0, P1, D0, D1, policy=policy, **busy)) == Pair(P1, D1)


@pytest.mark.parametrize("policy", ["prefix", "mooncake", "dynamo"])
def test_a_prefix_counts_as_computed_until_the_queue_costs_more(policy):
    conductor = make(P0, P1, D0, policy=policy)
    assert route(conductor) == Pair(P0, D0)
    conductor.set_load("p0", Load(queued_tokens=150))
    assert route(conductor).prefill == P0
    assert route(conductor, ask(first=5)).prefill == P1
    conductor.set_load("p0", Load(queued_tokens=250))
    assert route(conductor).prefill == P1


@pytest.mark.parametrize("policy", ["prefix", "mooncake", "dynamo"])
def test_blocks_that_an_instance_tells_of_count_until_it_takes_them_back(policy):
    conductor = make(U0, U1, policy=policy)
    keys = list(range(12))
    conductor.note_blocks("u1", keys)
    assert route(conductor, ask(prompt_len=200)) == Alone(U1)
    conductor = make(U0, U1, policy=policy)
    conductor.note_blocks("u1", keys)
    conductor.note_blocks("u1", removed=keys[1:])
    conductor.set_load("u1", Load(queued_tokens=20))
    assert route(conductor, ask(prompt_len=200)) == Alone(U0)
    conductor = make(U0, U1, policy=policy)
    conductor.note_blocks("u1", keys)
    conductor.stop("u1")
    conductor.serve(InstanceRef("u1", 1), FACTS)
    assert route(conductor, ask(prompt_len=200)) == Alone(U0), "a restarted one holds nothing"


def test_the_setting_names_the_policies():
    names = msgspec.json.schema(ClusterConfig)["$defs"]["ClusterConfig"]["properties"]["policy"]
    assert set(names["enum"]) == set(POLICIES)
    with pytest.raises(ConfigError, match="policy"):
        resolve_config(Root, file=None, environment={}, flags={"cluster.policy": ("--x", "dice")})


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_with_what_there_is(policy):
    conductor = make(P0, P1, D0, D1, policy=policy)
    for number in range(20):
        answer = route(conductor, ask(first=number))
        assert answer.prefill in (P0, P1)
        assert answer.decode in (D0, D1)
    conductor.stop("d0")
    conductor.stop("p1")
    assert route(conductor) == Pair(P0, D1)
    conductor.stop("p0")
    assert route(conductor) == Alone(D1)
    conductor.leave("d0")
    conductor.join("u0", "unified")
    conductor.serve(U0, FACTS)
    assert route(conductor) == Alone(U0)


def test_round_robin_takes_turns_and_random_is_fair():
    conductor = make(U0, U1, policy="round_robin")
    assert [route(conductor).instance for _ in range(4)] == [U0, U1, U0, U1]
    conductor = make(U0, U1, policy="random")
    drawn = [route(conductor).instance for _ in range(1000)]
    assert 400 < drawn.count(U0) < 600


def test_sglang_balances_when_loads_differ_and_else_follows_its_own_tree():
    conductor = make(U0, U1, policy="sglang")
    conductor.note_blocks("u1", range(12))
    assert route(conductor) == Alone(U0), "it listens to no events, and both trees are empty"
    assert route(conductor) == Alone(U0)
    assert route(conductor, ask(first=500)) == Alone(U1), "the smaller tree"
    conductor.set_load("u0", Load(num_requests=64))
    assert route(conductor) == Alone(U0)
    conductor.set_load("u0", Load(num_requests=65))
    assert route(conductor) == Alone(U1)


def test_blocks_are_read_early_only_where_all_have_room():
    assert route(make(P0, D0, d0=Load(used_blocks=70))) == Pair(P0, D0)
    assert route(make(P0, D0, d0=Load(used_blocks=72))) == Pair(P0, None)
    # One that has sent tokens cannot go on late; it waits for room there.
    full = make(P0, D0, d0=Load(used_blocks=99))
    assert route(full, is_resumed=True, prefill=P0) == Pair(P0, D0)


def test_who_cannot_read_whom_is_no_pair():
    assert route(make(P0, P1, D0, sources=["p1"])) == Pair(P1, D0)
    lonely = make(P0, D0, sources=[])
    assert route(lonely) == Alone(P0)
    assert route(lonely, is_held=True, prefill=P0) == NoRoute()
    assert route(make(P0, D0), is_held=True, prefill=P0) == Pair(None, D0)
    # The only reader has refused it.
    avoiding = make(P0, P1, D0, D1, sources=["p1"])
    avoiding.set_sources("d1", ["p0"])
    assert route(avoiding, avoid=frozenset({D1})) == Pair(P1, D0)
    assert route(avoiding, avoid=frozenset({D0})) == Pair(P0, D1)


@pytest.mark.parametrize("only", [P0, D0, U0])
def test_any_role_serves_alone_if_it_must(only):
    conductor = make(only)
    assert route(conductor) == Alone(only)
    avoid = frozenset({only})
    assert route(conductor, avoid=avoid) == NoRoute()
    conductor.stop(only.name)
    assert route(conductor, avoid=avoid) is None
    restarted = InstanceRef(only.name, 1)
    conductor.serve(restarted, FACTS)
    assert route(conductor, avoid=avoid) == Alone(restarted)


def test_one_token_needs_no_decode_instance():
    assert route(make(P0, D0), needs_decode=False) == Alone(P0)


def test_a_resumed_request_without_a_pair_goes_where_its_prompt_was_computed():
    assert route(make(P0, P1), is_resumed=True, prefill=P1) == Alone(P1)


def test_one_that_drains_gets_nothing_new_and_requests_wait_for_it():
    conductor = make(U0, U1)
    conductor.set_draining("u0", is_draining=True)
    assert [route(conductor) for _ in range(3)] == [Alone(U1)] * 3
    conductor.set_draining("u1", is_draining=True)
    assert route(conductor) is None
    conductor.set_draining("u0", is_draining=False)
    assert route(conductor) == Alone(U0)


def test_a_role_changes_which_questions_an_instance_is_asked():
    conductor = make(P0, P1, D0)
    conductor.set_role("p1", "decode")
    conductor.set_sources("p1", ["p0"])
    conductor.set_load("d0", Load(num_decoding=1))
    assert route(conductor) == Pair(P0, P1)
    conductor.set_role("p1", "unified")
    conductor.set_load("p0", Load(queued_tokens=900))
    assert route(conductor, ask(first=77)) == Alone(P1)


def test_a_hot_prefix_is_fetched_where_the_queue_is_shorter():
    """Algorithm 1: what is fetched from the store counts as its transfer, beyond the threshold."""

    def decide(threshold, queued, held=0, speed=0.0):
        conductor = make(U0, U1, policy="mooncake", u0=Load(queued_tokens=queued))
        conductor.set_load_speed("u1", speed)
        conductor.policy.threshold = threshold
        conductor.note_blocks("u0", range(100))
        conductor.note_blocks("u1", range(held))
        conductor.note_in_store(range(100))
        return conductor.place(place(), ask(prompt_len=1616))

    local = decide(1.25, queued=10)
    assert (local.route, local.chosen.prefix_len, local.chosen.transfer_s) == (Alone(U0), 1600, 0)
    fetched = decide(1.25, queued=1000)
    assert fetched.route == Alone(U1)
    assert fetched.chosen.prefix_len == 1600
    assert fetched.chosen.transfer_s > 0
    assert [each.instance for each in fetched.considered] == ["u1", "u0"]
    slow = decide(1.25, queued=1000, speed=10.0)
    assert slow.route == Alone(U0), "a load from the store would take 160 s, as it has told"
    # 1600 tokens are 1.11 times what it holds itself.
    assert decide(1.25, queued=1000, held=90).chosen.prefix_len == 1440
    assert decide(1.05, queued=1000, held=90).chosen.prefix_len == 1600


def test_the_time_predicted_for_one_row_is_that_predicted_for_all():
    """A policy compares all rows, admission looks at one of them: a promise is about the time that
    the row was chosen for, to the last bit."""
    conductor, chance = make(P0, P1, D0, D1, U0, U1), random.Random(1)
    fleet = conductor.fleet
    for name in fleet.names:
        queued = chance.choice([0, chance.randrange(5000)])
        conductor.set_load(name, Load(queued, queued * 1e3 / 3, chance.randrange(64), 12345))
    rows_s = predict_tpot(fleet, 208, 300).tolist()
    assert rows_s == [predict_row_tpot(fleet, row, 208, 300) for row in range(fleet.num_rows)]
    for name in fleet.names:
        conductor.set_load(name, Load(0, 0.0, 3, 12345))
    idle_s = predict_tpot(fleet, 208, 300).tolist()
    for row, name in enumerate(fleet.names):
        conductor.set_load(name, Load(900, 1e6, 3, 12345))
        assert predict_row_tpot(fleet, row, 208, 300, has_queue=False) == idle_s[row]


@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_without_their_window_or_state_are_no_prefix(depth):
    conductor = make(policy="prefix")
    facts = FACTS._replace(group_depth=depth)
    for ref in (U0, U1):
        conductor.join(ref.name, "unified")
        conductor.serve(ref, facts)
        conductor.note_blocks(ref.name, range(12))
    conductor.note_group("u1", range(9 - depth, 9))
    decision = conductor.place(place(), ask(prompt_len=200))
    assert (decision.route, decision.chosen.prefix_len) == (Alone(U1), 9 * BLOCK)
    # It has computed the whole prompt by then, and keeps a state or a window there.
    decision = conductor.place(place(), ask(prompt_len=200))
    assert (decision.route, decision.chosen.prefix_len) == (Alone(U1), 12 * BLOCK)
    conductor.note_group("u1", removed=[11])
    assert conductor.count_hits(ask(prompt_len=200).chains).max() == 11 * BLOCK
    conductor.note_group("u1", removed=range(9 - depth, 12))
    assert conductor.count_hits(ask(prompt_len=200).chains).max() == 0
    conductor.note_group("u1", range(depth))
    conductor.note_flushed("u1")
    assert conductor.count_hits(ask(prompt_len=200).chains).max() == 0


def test_a_journal_has_the_windows_and_states_by_which_a_prefix_counts():
    """A replay that does not know of them sends the request where no prefix is."""
    lines = []
    conductor = JournalingConductor("prefix", "none", lines.append)
    for ref in (U0, U1):
        conductor.join(ref.name, "unified")
        conductor.serve(ref, FACTS._replace(group_depth=1))
        conductor.note_blocks(ref.name, range(12))
    conductor.note_group("u0", [5])
    conductor.note_group("u1", [8])
    conductor.place(place(), ask(prompt_len=200))
    conductor.note_group("u1", removed=[8, 10, 11])
    conductor.place(place(), ask(prompt_len=200))
    replayed = list(replay_journal(lines))
    assert [each.then.decode for each in replayed] == ["u1", "u0"]
    assert all(each.now == each.then for each in replayed)


def test_a_journal_of_the_version_before_is_replayed():
    """Its ends of requests do not say if the answer was whole."""
    lines = [
        b'{"version":3,"policy":"prefix","admission":"none"}\n',
        b'["note_end",["r",4,1.5]]\n',
        b'["note_end",["s",4,1.5,false]]\n',
    ]
    assert list(replay_journal(lines)) == []


def test_a_journal_has_every_event_of_a_conductor():
    questions = {
        "is_draining",
        "get_step_error",
        "get_step_costs",
        "count_hits",
        "count_stored",
        "find_role_change",  # Its answer comes back as ``set_role``.
    }
    public = {name for name in vars(Conductor) if not name.startswith("_")}
    assert public - questions == {name for name in vars(JournalingConductor) if name in public}
