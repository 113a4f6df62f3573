"""From settings to a running engine: load the model, size the KV cache, put the parts together."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from tandem import _native
from tandem.core.clock import Clock
from tandem.core.errors import ConfigError
from tandem.core.wire import InstanceInfo
from tandem.engine.blocks import BlockPool
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.memory import plan_kv_cache
from tandem.engine.prefix_index import PrefixIndex
from tandem.engine.scheduler import Scheduler
from tandem.engine.torch_runner import TorchRunner
from tandem.kernels.paged import PagedKvCache
from tandem.models.causal import CausalModel, load_model
from tandem.models.config import ModelConfig

__all__ = ["BuiltEngine", "build_engine"]

logger = logging.getLogger(__name__)


class BuiltEngine(NamedTuple):
    """An engine, and what it runs."""

    engine: Engine
    info: InstanceInfo


def build_engine(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    clock: Clock,
    progress: Callable[[int, int, str], None] | None = None,
) -> BuiltEngine:
    """Load a model and make the engine that serves it.

    Args:
        model_config: what to load.
        engine_config: 0 where the value is to be decided here.
        clock: the engine's.
        progress: called with (bytes done, bytes in all, what) while weights load.

    Raises: what loading raises; ConfigError if the settings do not fit the model or the memory.
    """
    host = _native.read_topology()
    torch.set_num_threads(engine_config.threads or host.recommended_threads)
    model = load_model(
        model_config.path,
        dtype=model_config.dtype,
        rules=Path(model_config.rules) if model_config.rules else None,
        device=model_config.device,
        revision=model_config.revision,
        progress=progress,
    )
    config = _resolve(engine_config, model)
    layout = model.kv_layout(config.block_size, config.kv_dtype)
    plan = plan_kv_cache(
        config,
        block_bytes=layout.block_bytes,
        max_model_len=config.max_model_len,
        available_bytes=host.available_memory_bytes,
    )
    logger.info(
        "event=kv_planned blocks=%d block_size=%d bytes=%d bytes_per_token=%d reason=%r",
        plan.num_blocks,
        config.block_size,
        plan.size_bytes,
        layout.block_bytes // config.block_size,
        plan.reason,
    )
    pool = BlockPool(plan.num_blocks)
    index = PrefixIndex(
        pool,
        block_size=config.block_size,
        fingerprint=f"{model.fingerprint}/{layout.describe()}",
    )
    engine = Engine(
        Scheduler(config, pool, index),
        TorchRunner(model, PagedKvCache(layout, plan.num_blocks)),
        clock,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=tuple(model.spec.eos_token_ids),
    )
    info = InstanceInfo(
        model=model_config.path,
        architecture=model.spec.architecture,
        dtype=model.dtype,
        vocab_size=model.spec.vocab_size,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        kv_bytes_per_token=layout.block_bytes // config.block_size,
        weight_bytes=model.weight_bytes,
        num_parameters=model.spec.num_parameters,
        eos_token_ids=list(model.spec.eos_token_ids),
        fingerprint=model.fingerprint,
        pid=0,
        load_seconds=0.0,
    )
    return BuiltEngine(engine, info)


def _resolve(config: EngineConfig, model: CausalModel) -> EngineConfig:
    own = model.spec.max_position_embeddings
    if config.max_model_len > own:
        raise ConfigError(
            "engine.build",
            f"max_model_len is {config.max_model_len}, but the model knows {own} positions",
            field="engine.max_model_len",
        )
    return msgspec.structs.replace(config, max_model_len=config.max_model_len or own)
