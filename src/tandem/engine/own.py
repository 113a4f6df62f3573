"""The engine plan of a model that runs by transformers' own modules instead of our operators.

Such a model has one cache object per sequence. KV blocks then only count tokens, and state slots
hold cache objects.
"""

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
    """The memory of a model that runs by transformers' own modules: each state slot holds one
    cache object (a transformers KV cache); KV blocks hold no data and only count the tokens of
    running requests.
    """

    layout: GqaLayout
    """Layout of blocks with no layers: they count tokens and hold no data."""
    kv: KvPlan
    states: StatePlan
    config: EngineConfig


def plan_own_memory(
    model: ModelPlan, config: EngineConfig, *, available_bytes: int, total_bytes: int
) -> OwnMemory:
    """Choose how many tokens the cache objects (transformers' KV caches) of all running requests
    may have together.

    The copies kept for cached prefixes may have as many again.

    Args:
        model: plan of the model, with ``own``.
        config: see ``plan_kv_cache`` and ``plan_states``.
        available_bytes: memory free now, after the weights are loaded.
        total_bytes: all memory of the machine.

    Raises: ConfigError, as ``plan_kv_cache`` and ``plan_states``.
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
        own_reason=model.context_reason,
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
    """Return the policy that keeps copies of cache objects (transformers' KV caches): at multiples
    of the piece length of a prompt, with a limit on their tokens together.

    Args:
        own: part of the model's plan about its own modules.
        config: planned settings.
    """
    return StatePolicy(
        config.num_state_slots,
        config.state_every,
        grid=own.piece if own.is_cut else 1,
        max_tokens=config.num_kv_blocks * config.block_size,
    )


def list_own_rows(own: OwnModules, kv: KvPlan, config: EngineConfig) -> list[tuple[str, str, str]]:
    """Return rows (item, value, reason) of the printed plan that differ from those of a model with
    operators of ours.

    Args:
        own: part of the model's plan about its own modules.
        kv: plan of the blocks, which count running requests' tokens.
        config: planned settings.
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
