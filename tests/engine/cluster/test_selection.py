"""Goal: the policy sends a request where it is computed soonest, and never where it cannot go."""

import msgspec
import pytest

from tandem.core.config import resolve_config
from tandem.core.errors import ConfigError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.cluster.machine import Alone, InstanceRef, NoRoute, Pair, Place
from tandem.engine.cluster.selection import (
    AFFINITY_TOKENS,
    POLICIES,
    InstanceView,
    LeastLoadedPolicy,
    PrefixAffinity,
    make_policy,
)

P0, P1, D0, D1, U0 = (InstanceRef(name, 0) for name in ("p0", "p1", "d0", "d1", "u0"))


class Root(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)


def ask(prompt_len=200, max_tokens=10, first=0, salt=""):
    return AddRequest(
        request_id="r",
        prompt_ids=list(range(first, first + prompt_len)),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_salt=salt,
    )


def view(ref, **fields):
    role = {"p": "prefill", "d": "decode", "u": "unified"}[ref.name[0]]
    values = {"num_blocks": 100, "block_size": 16, "max_model_len": 2048}
    if role == "decode":
        values["sources"] = frozenset({"p0", "p1"})
    return InstanceView(ref, role, **(values | fields))


def place(**fields):
    values = {"is_held": False, "avoid": frozenset(), "prefill": None, "needs_decode": True}
    return Place(**(values | {"is_resumed": False} | fields))


def test_the_least_loaded_of_each_role_serve_a_request():
    views = [view(P0, queued_tokens=500), view(P1), view(D0, num_decoding=1), view(D1)]
    assert LeastLoadedPolicy().choose(place(), ask(), views) == Pair(P1, D1)


def test_a_prefix_seen_before_counts_as_computed_until_the_queue_costs_more():
    policy = LeastLoadedPolicy()
    assert policy.choose(place(), ask(), [view(P0), view(D0)]) == Pair(P0, D0)
    busy = [view(P0, queued_tokens=150), view(P1), view(D0)]
    assert policy.choose(place(), ask(), busy).prefill == P0
    assert policy.choose(place(), ask(salt="other"), busy).prefill == P1
    assert policy.choose(place(), ask(first=5), busy).prefill == P1
    busier = [view(P0, queued_tokens=250), view(P1), view(D0)]
    assert policy.choose(place(), ask(), busier).prefill == P1


def test_the_setting_names_the_policy():
    names = msgspec.json.schema(ClusterConfig)["$defs"]["ClusterConfig"]["properties"]["policy"]
    assert set(names["enum"]) == set(POLICIES)
    chosen = {}
    for name in POLICIES:
        policy = make_policy(ClusterConfig(policy=name).policy)
        assert policy.choose(place(), ask(), [view(P0), view(D0)]) == Pair(P0, D0)
        busy = [view(P0, queued_tokens=150), view(P1), view(D0)]
        chosen[name] = policy.choose(place(), ask(), busy).prefill
    # P0 had this prompt before, P1 has the shorter queue.
    assert chosen == {"prefix": P0, "load": P1}


def test_a_name_of_no_policy_is_refused_by_its_setting():
    with pytest.raises(ConfigError, match="policy"):
        resolve_config(Root, file=None, environment={}, flags={"cluster.policy": ("--x", "dice")})


def test_blocks_are_read_early_only_where_all_have_room():
    policy = LeastLoadedPolicy()
    assert policy.choose(place(), ask(), [view(P0), view(D0, used_blocks=71)]) == Pair(P0, D0)
    assert policy.choose(place(), ask(), [view(P0), view(D0, used_blocks=72)]) == Pair(P0, None)
    # One that has sent tokens cannot go on late; it waits for room there.
    resumed = place(is_resumed=True, prefill=P0)
    assert policy.choose(resumed, ask(), [view(P0), view(D0, used_blocks=99)]) == Pair(P0, D0)


def test_who_cannot_read_whom_is_no_pair():
    views = [view(P0), view(P1), view(D0, sources=frozenset({"p1"}))]
    assert LeastLoadedPolicy().choose(place(), ask(), views) == Pair(P1, D0)
    views = [view(P0), view(D0, sources=frozenset())]
    assert LeastLoadedPolicy().choose(place(), ask(), views) == Alone(P0)
    held = place(is_held=True, prefill=P0)
    assert LeastLoadedPolicy().choose(held, ask(), views) == NoRoute()
    assert LeastLoadedPolicy().choose(held, ask(), [view(D0)]) == Pair(None, D0)


@pytest.mark.parametrize("only", [P0, D0, U0])
def test_any_role_serves_alone_if_it_must(only):
    policy = LeastLoadedPolicy()
    assert policy.choose(place(), ask(), [view(only)]) == Alone(only)
    avoid = frozenset({only})
    assert policy.choose(place(avoid=avoid), ask(), [view(only)]) == NoRoute()
    assert policy.choose(place(avoid=avoid), ask(), []) is None
    restarted = InstanceRef(only.name, 1)
    assert policy.choose(place(avoid=avoid), ask(), [view(restarted)]) == Alone(restarted)


def test_one_token_needs_no_decode_instance():
    views = [view(P0), view(D0)]
    assert LeastLoadedPolicy().choose(place(needs_decode=False), ask(), views) == Alone(P0)


def test_a_resumed_request_without_a_pair_goes_where_its_prompt_was_computed():
    views = [view(P0), view(P1)]
    resumed = place(is_resumed=True, prefill=P1)
    assert LeastLoadedPolicy().choose(resumed, ask(), views) == Alone(P1)


def test_affinity_is_bounded_and_matches_the_longest_prefix():
    affinity = PrefixAffinity(max_keys=4)
    affinity.note("prefill", ask(AFFINITY_TOKENS * 2), "p0")
    affinity.note("prefill", ask(AFFINITY_TOKENS), "p1")
    assert affinity.match("prefill", ask(AFFINITY_TOKENS * 2)) == ("p0", 2 * AFFINITY_TOKENS)
    assert affinity.match("prefill", ask(AFFINITY_TOKENS)) == ("p1", AFFINITY_TOKENS)
    assert affinity.match("decode", ask(AFFINITY_TOKENS)) == (None, 0)
    for first in (1000, 2000, 3000, 4000):
        affinity.note("prefill", ask(AFFINITY_TOKENS, first=first), "p1")
    assert affinity.match("prefill", ask(AFFINITY_TOKENS * 2)) == (None, 0)
