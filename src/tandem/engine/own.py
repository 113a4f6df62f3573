"""The engine plan of a model that transformers' own modules run: memory by tokens, and its rows."""

from typing import NamedTuple

import msgspec

from tandem.core.kv_layout import GqaLayout
from tandem.core.model.plan import ModelPlan, OwnModules
from tandem.engine.config import EngineConfig
from tandem.engine.groups.reuse import StatePolicy
from tandem.engine.memory import DEFAULT_FRACTION, KvPlan, StatePlan, plan_kv_cache, plan_states

__all__ = ["OwnMemory", "list_own_rows", "make_own_policy", "plan_own_memory"]

MIB = 1 << 20


class OwnMemory(NamedTuple):
    """The memory of cache objects: blocks count the tokens of running ones, slots hold them."""

    layout: GqaLayout
    """Layout of blocks without a layer: they name tokens and hold nothing."""
    kv: KvPlan
    states: StatePlan
    config: EngineConfig


def plan_own_memory(
    model: ModelPlan, config: EngineConfig, *, available_bytes: int, total_bytes: int
) -> OwnMemory:
    """Choose how many tokens the cache objects of running requests may have together.

    Copies that are kept for prefixes may have as many again.

    Args:
        model: with ``own``.
        config: as of ``plan_kv_cache`` and ``plan_states``.
        available_bytes: memory free now, after the weights are loaded.
        total_bytes: all memory of the machine.

    Raises: ConfigError, as these.
    """
    own = model.own
    assert own is not None, "a plan of operators"
    fraction = DEFAULT_FRACTION / 2
    states = plan_states(
        config,
        state_bytes=max(own.fixed_bytes, 1),
        available_bytes=available_bytes,
        total_bytes=total_bytes,
        fraction=fraction,
    )
    kv = plan_kv_cache(
        config,
        block_bytes=max(own.token_bytes, 1) * config.block_size,
        own_context=model.spec.max_position_embeddings,
        available_bytes=available_bytes,
        total_bytes=total_bytes,
        taken_bytes=states.size_bytes,
        fraction=fraction,
    )
    every = -(-config.state_every // own.piece) * own.piece if own.is_cut else 0
    return OwnMemory(
        layout=GqaLayout(num_layers=0, num_kv_heads=1, head_dim=1, block_size=config.block_size),
        kv=kv,
        states=states,
        config=msgspec.structs.replace(
            config, prefix_cache=config.prefix_cache and own.is_cut, state_every=every
        ),
    )


def make_own_policy(own: OwnModules, config: EngineConfig) -> StatePolicy:
    """Return how copies of cache objects are kept: at ends of pieces, within a budget of tokens.

    Args:
        own: of the model's plan.
        config: as planned.
    """
    return StatePolicy(
        config.num_state_slots,
        config.state_every,
        grid=own.piece if own.is_cut else 1,
        max_tokens=config.num_kv_blocks * config.block_size,
    )


def list_own_rows(own: OwnModules, kv: KvPlan, config: EngineConfig) -> list[tuple[str, str, str]]:
    """Return (what, value, why) of what differs from a model of operators.

    Args:
        own: of the model's plan.
        kv: the tokens of running requests.
        config: as planned.
    """
    tokens = kv.num_blocks * config.block_size
    kept = f"of at most {tokens} tokens together" if own.is_cut else "none"
    why = "the last full pieces of prompts; a prefix is taken up at the end of a piece"
    return [
        ("modules", "transformers' own, slower than operators", own.reason),
        ("sequences", f"one at a time, {own.describe()}", "proved on a tiny model of its class"),
        (
            "cache objects",
            f"of at most {tokens} tokens together, {kv.size_bytes / MIB:.0f} MiB",
            f"{kv.reason}; {own.token_bytes} bytes a token and {own.fixed_bytes} each",
        ),
        (
            "copies of them",
            f"{config.num_state_slots if own.is_cut else 0} slots, {kept}",
            why if own.is_cut else "a prompt is not cut, so no part of one is taken up",
        ),
        (
            "routed experts",
            "our operators" if own.has_our_experts else "transformers' own, if it has any",
            "proved in their place" if own.has_our_experts else "none that our operators compute",
        ),
        (
            "prefill/decode",
            "each instance computes prompts itself",
            "a cache object is neither sent nor stored",
        ),
    ]
