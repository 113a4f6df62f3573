"""How much memory the KV cache takes, and why. Plain arithmetic; the caller measures."""

from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.engine.config import EngineConfig

__all__ = ["KvPlan", "check_context", "plan_kv_cache"]

DEFAULT_FRACTION = 0.4
"""Of the free memory, when nothing is set: activations, the page cache that the weights are
mapped through, and the user's other programs need the rest."""

GIB = 1 << 30


class KvPlan(NamedTuple):
    """The KV cache that will be allocated."""

    num_blocks: int
    block_bytes: int
    reason: str
    max_model_len: int
    """Tokens of the longest request."""
    max_model_len_reason: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes


def check_context(max_model_len: int, own: int) -> None:
    """Refuse a context that was asked for, beyond the positions that the model knows.

    Raises: ConfigError.
    """
    if max_model_len > own:
        raise ConfigError(
            "engine.plan",
            f"a context of {max_model_len} tokens is asked for, but the model knows {own} "
            "positions: lower --max-model-len",
            field="engine.max_model_len",
        )


def plan_kv_cache(
    config: EngineConfig,
    *,
    block_bytes: int,
    own_context: int,
    available_bytes: int,
    total_bytes: int,
    fraction: float = DEFAULT_FRACTION,
) -> KvPlan:
    """Choose the number of blocks, and the context: the model's own, or less if it does not fit.

    Args:
        config: ``num_kv_blocks`` wins over ``kv_cache_gib`` wins over the default.
        block_bytes: size of one block over all layers.
        own_context: positions that the model knows; ``config.max_model_len`` is at most that.
        available_bytes: memory free now, after the weights are loaded.
        total_bytes: all memory of the machine.
        fraction: of the free memory, when nothing is set.

    Raises: ConfigError if the cache cannot hold one request of the context that was asked for, or
        not one block, or is larger than the machine, with what would help.
    """
    max_model_len = config.max_model_len or own_context
    context_reason = "as asked for" if config.max_model_len else "the model's own"
    needed = -(-max_model_len // config.block_size)
    if config.num_kv_blocks:
        num_blocks, reason = config.num_kv_blocks, "engine.num_kv_blocks"
    elif config.kv_cache_gib:
        num_blocks = int(config.kv_cache_gib * GIB) // block_bytes
        reason = "engine.kv_cache_gib"
    else:
        # More than every running request at full length could never be used by requests, but
        # an idle block still serves as prefix cache: twice that is plenty.
        useful = 2 * config.max_running * needed
        affordable = int(available_bytes * fraction) // block_bytes
        num_blocks = min(useful, affordable)
        reason = (
            f"twice {config.max_running} requests of {max_model_len} tokens"
            if useful <= affordable
            else f"{fraction:.0%} of {available_bytes / GIB:.1f} GiB free"
        )
    if num_blocks < needed and not config.max_model_len and num_blocks > 0:
        max_model_len = num_blocks * config.block_size
        context_reason = (
            f"what fits of the model's {own_context}: {num_blocks} blocks "
            f"({num_blocks * block_bytes / GIB:.2f} GiB, from {reason}); "
            "--engine.kv-cache-gib takes more memory"
        )
    elif num_blocks < needed:
        raise ConfigError(
            "engine.plan_kv_cache",
            f"{num_blocks} blocks ({num_blocks * block_bytes / GIB:.2f} GiB, from {reason}) cannot "
            f"hold one request of {max_model_len} tokens, which takes {needed} blocks of "
            f"{block_bytes} bytes: raise --engine.kv-cache-gib or lower --max-model-len",
            field="engine.max_model_len",
        )
    if num_blocks * block_bytes > total_bytes:
        raise ConfigError(
            "engine.plan_kv_cache",
            f"{num_blocks} blocks of {block_bytes} bytes (from {reason}) are more than the "
            f"machine's {total_bytes / GIB:.1f} GiB: lower {reason}",
            field=reason,
        )
    return KvPlan(num_blocks, block_bytes, reason, max_model_len, context_reason)
