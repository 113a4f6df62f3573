"""The sizes of the KV cache, of state slots and of window blocks, with reasons. Pure arithmetic."""

from typing import NamedTuple

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.kv_layout import KVLayout, MlaLayout, WindowLayout
from tandem.core.model.plan import OWN_CONTEXT
from tandem.engine.config import EngineConfig
from tandem.engine.groups.windows import count_window_blocks
from tandem.kernels.latents.pages import count_padded_bytes

__all__ = [
    "KvPlan",
    "LatentPlan",
    "StatePlan",
    "WindowPlan",
    "check_context",
    "plan_kv_cache",
    "plan_latents",
    "plan_states",
]

DEFAULT_FRACTION = 0.4
"""Share of the free memory that the KV cache gets by default. Activations, the page cache of mapped
weights, and the user's other programs need the rest."""

SLOTS_PER_REQUEST = 4
"""State slots per running request: one for its state, the others for snapshots."""

KEPT_WINDOW_TOKENS = 2048
"""Tokens of cached KV per cached window. It is about a message of a chat, because later prompts go
on at the ends of messages."""

MAP_BYTES = 8
"""Bytes that record, for each latent in the file, its slot in memory and its checksum."""

DISK_FRACTION = 0.9
"""Fraction of the free space of a disk that a file of latents takes at most by default."""

GIB = 1 << 30


class WindowPlan(NamedTuple):
    """The number and size of the window blocks (KV of the sliding-window layers alone) that will be
    allocated.
    """

    num_blocks: int
    block_bytes: int
    reason: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all window blocks together."""
        return self.num_blocks * self.block_bytes


class KvPlan(NamedTuple):
    """The number and size of the KV blocks that will be allocated."""

    num_blocks: int
    block_bytes: int
    reason: str
    max_model_len: int
    """Largest number of tokens of a request."""
    max_model_len_reason: str
    windows: WindowPlan | None = None
    """Blocks of the sliding-window layers; None: these layers use the full blocks."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks, without the window blocks of the sliding-window layers."""
        return self.num_blocks * self.block_bytes


class StatePlan(NamedTuple):
    """The number and size of the state slots (each for one recurrent state) that will be
    allocated.
    """

    num_slots: int
    state_bytes: int
    reason: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all state slots together."""
        return self.num_slots * self.state_bytes


class LatentPlan(NamedTuple):
    """The file of latents (the compressed KV of sparse attention), and the memory for some of
    them.
    """

    folder: str
    memory_bytes: int
    row_bytes: int
    """Bytes of a token's latent in one layer."""
    block_bytes: int
    """Bytes of a block's latents in the file, all layers, with their padding."""
    index_bytes: int
    """Bytes of a block's index keys, which stay in memory, all layers."""
    map_bytes: int
    """Bytes that note where a block's latents are in memory, and their checksums."""
    top: int
    """Tokens that a token attends to in a layer, at most."""

    @property
    def num_rows(self) -> int:
        """Number of latents (one for a token in a layer) for which there is memory."""
        return self.memory_bytes // self.row_bytes


def plan_latents(
    config: EngineConfig, layout: KVLayout, *, tops: frozenset[int], context: int, is_shared: bool
) -> LatentPlan:
    """Plan the file of latents that ``config`` asks for.

    Args:
        config: with ``latents_in_memory``.
        layout: of the blocks.
        tops: tokens that the layers' tokens attend to; 0 is all.
        context: tokens of the longest request.
        is_shared: blocks go to a store or to other instances.

    Raises: UnsupportedError (the model attends to all tokens); ConfigError (no request is long
        enough, too little memory, or blocks that are shared).
    """
    where, field = "engine.plan_latents", "engine.latents_in_memory"
    if not isinstance(layout, MlaLayout) or not layout.index_layers or not min(tops, default=0):
        what = "the model's layers attend to all tokens, whose latents must be in memory: leave "
        raise UnsupportedError(where, f"{what}engine.latents_in_memory empty", field=field)
    top = max(tops)
    if is_shared:
        what = "blocks whose latents are in a file go to no store and no other instance: leave "
        raise UnsupportedError(where, f"{what}engine.latents_in_memory empty", field=field)
    if context <= top:
        what = f"a context of {context} tokens, of which each attends to {top}, reads all latents "
        raise ConfigError(where, f"{what}in each step: leave it empty", field=field)
    row_bytes = layout.bytes_per_layer // layout.block_size
    plan = LatentPlan(
        folder=config.latents_folder,
        memory_bytes=config.latents_in_memory_bytes,
        row_bytes=row_bytes,
        block_bytes=count_padded_bytes(layout.block_size * layout.num_layers, row_bytes),
        index_bytes=layout.index_block_bytes,
        map_bytes=MAP_BYTES * layout.block_size * layout.num_layers,
        top=top,
    )
    least = max(top + 1, 2)
    if plan.num_rows < least:
        what = f"{plan.memory_bytes} bytes for latents, and a token attends to {top} of "
        what += f"{row_bytes}: give it {least * row_bytes} bytes at least"
        raise ConfigError(where, what, field=field)
    return plan


def plan_states(
    config: EngineConfig,
    *,
    state_bytes: int,
    available_bytes: int,
    total_bytes: int,
    fraction: float = DEFAULT_FRACTION,
) -> StatePlan:
    """Choose the number of state slots of a model with recurrent states.

    Args:
        config: ``num_state_slots`` wins over ``state_cache_gib``, which wins over the default.
        state_bytes: size of one state.
        available_bytes: memory free now, after the weights are loaded.
        total_bytes: all memory of the machine.
        fraction: default share of the free memory for KV and states together.

    Raises: ConfigError (no room for one slot, or more memory asked for than there is).
    """
    if config.num_state_slots:
        num_slots, reason = config.num_state_slots, "engine.num_state_slots"
    elif config.state_cache_gib:
        num_slots = int(config.state_cache_gib * GIB) // state_bytes
        reason = "engine.state_cache_gib"
    else:
        # Give states at most half the memory, the rest to KV: reuse of a prefix needs both.
        useful = SLOTS_PER_REQUEST * config.max_running
        affordable = int(available_bytes * fraction / 2) // state_bytes
        num_slots = min(useful, affordable)
        reason = (
            f"{SLOTS_PER_REQUEST} for each of {config.max_running} requests"
            if useful <= affordable
            else f"{fraction / 2:.0%} of {available_bytes / GIB:.1f} GiB free"
        )
    if num_slots < 1 or num_slots * state_bytes > total_bytes:
        raise ConfigError(
            "engine.plan_states",
            f"{num_slots} states of {state_bytes / GIB:.3f} GiB (from {reason}) in a machine of "
            f"{total_bytes / GIB:.1f} GiB: set --engine.num-state-slots",
            field="engine.num_state_slots",
        )
    return StatePlan(num_slots, state_bytes, reason)


def check_context(max_model_len: int, own: int, own_reason: str = OWN_CONTEXT) -> None:
    """Check that a requested context is not longer than the positions that the model knows;
    ``own_reason`` says why these are so many.

    Raises: ConfigError (it is longer).
    """
    if max_model_len > own:
        why = "" if own_reason == OWN_CONTEXT else f" ({own_reason})"
        raise ConfigError(
            "engine.plan",
            f"a context of {max_model_len} tokens is asked for, but the model knows {own} "
            f"positions{why}: lower --max-model-len",
            field="engine.max_model_len",
        )


def plan_kv_cache(
    config: EngineConfig,
    *,
    block_bytes: int,
    own_context: int,
    own_reason: str = OWN_CONTEXT,
    available_bytes: int,
    total_bytes: int,
    taken_bytes: int = 0,
    fraction: float = DEFAULT_FRACTION,
    windows: WindowLayout | None = None,
    most_blocks: int | None = None,
) -> KvPlan:
    """Choose the number of KV blocks, and the context: the model's own, or less if it does not fit.

    Args:
        config: ``num_kv_blocks`` wins over ``kv_cache_gib``, which wins over the default.
        block_bytes: size of one block over all layers except those of ``windows``.
        own_context: number of positions that the model knows; ``config.max_model_len`` is at most
            that.
        own_reason: why these are so many.
        available_bytes: memory free now, after the weights are loaded.
        total_bytes: all memory of the machine.
        taken_bytes: part of the default share that states take.
        fraction: default share of the free memory.
        windows: layout of the sliding-window layers' own blocks, which need memory too; None: these
            layers use the full blocks.
        most_blocks: blocks whose latents the disk has room for; None: no disk has any.

    Raises: ConfigError (the cache has no room for one block, or for one request of the requested
        context, or exceeds the machine's memory). The message says what would help.
    """
    max_model_len = config.max_model_len or own_context
    context_reason = "as asked for" if config.max_model_len else own_reason
    needed = -(-max_model_len // config.block_size)
    if config.num_kv_blocks:
        num_blocks, reason = config.num_kv_blocks, "engine.num_kv_blocks"
    elif config.kv_cache_gib:
        num_blocks = _count_affordable(config, int(config.kv_cache_gib * GIB), block_bytes, windows)
        reason = "engine.kv_cache_gib"
    else:
        # Running requests at full length bound the blocks in use. Idle blocks still serve as prefix
        # cache, for which twice that number is plenty.
        useful = 2 * config.max_running * needed
        budget = int(available_bytes * fraction) - taken_bytes
        affordable = _count_affordable(config, budget, block_bytes, windows)
        num_blocks = min(useful, affordable)
        reason = (
            f"twice {config.max_running} requests of {max_model_len} tokens"
            if useful <= affordable
            else f"{fraction:.0%} of {available_bytes / GIB:.1f} GiB free"
        )
    if most_blocks is not None and num_blocks > most_blocks:
        if config.num_kv_blocks or config.kv_cache_gib:
            raise ConfigError(
                "engine.plan_kv_cache",
                f"{num_blocks} blocks (from {reason}), and the disk has room for the latents of "
                f"{most_blocks}: lower {reason}",
                field=reason,
            )
        num_blocks, reason = most_blocks, "what the disk of engine.latents_folder has room for"
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
    beside = None if windows is None else _plan_windows(config, num_blocks, windows)
    beside_bytes = 0 if beside is None else beside.size_bytes
    if num_blocks * block_bytes + beside_bytes > total_bytes:
        raise ConfigError(
            "engine.plan_kv_cache",
            f"{num_blocks} blocks of {block_bytes} bytes (from {reason}) are more than the "
            f"machine's {total_bytes / GIB:.1f} GiB: lower {reason}",
            field=reason,
        )
    return KvPlan(num_blocks, block_bytes, reason, max_model_len, context_reason, beside)


def _count_affordable(
    config: EngineConfig, budget: int, block_bytes: int, windows: WindowLayout | None
) -> int:
    """Return how many blocks fit into ``budget`` bytes, together with their window blocks."""
    if windows is None:
        return budget // block_bytes
    own_bytes = windows.layout.bytes_per_block
    # Either as many window blocks as full blocks, or a fixed number for running requests and a
    # share for each cached prefix; take the division with more full blocks.
    equal = budget // (block_bytes + own_bytes)
    fixed, each = _count_windows(config, windows)
    return max(equal, int((budget - fixed * own_bytes) / (block_bytes + each * own_bytes)))


def _count_windows(config: EngineConfig, windows: WindowLayout) -> tuple[int, float]:
    """Return the number of window blocks for running requests and, for cached prefixes, the number
    for each full block.
    """
    size = config.block_size
    seen = count_window_blocks(windows.window, size)
    # Count one step's tokens twice: the next step is planned, with its own blocks, while one runs.
    fixed = config.max_running * (seen + 1) + 2 * -(-config.step_tokens // size)
    return fixed, seen * size / KEPT_WINDOW_TOKENS


def _plan_windows(config: EngineConfig, num_blocks: int, windows: WindowLayout) -> WindowPlan:
    least = count_window_blocks(windows.window, config.block_size) + 2
    if config.num_window_blocks:
        num_windows, reason = config.num_window_blocks, "engine.num_window_blocks"
        if num_windows < least:
            raise ConfigError(
                "engine.plan_windows",
                f"{num_windows} blocks for layers with a window of {windows.window} tokens: one "
                f"request takes {least}",
                field="engine.num_window_blocks",
            )
    else:
        fixed, each = _count_windows(config, windows)
        wanted = fixed + int(each * num_blocks)
        num_windows = max(min(wanted, num_blocks), least)
        reason = (
            f"{config.max_running} requests, and one kept each {KEPT_WINDOW_TOKENS} tokens of KV"
            if num_windows == wanted
            else "as many as other blocks"
        )
    return WindowPlan(num_windows, windows.layout.bytes_per_block, reason)
