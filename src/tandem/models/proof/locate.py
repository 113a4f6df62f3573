"""Where our model first leaves eager's: the layer, and the operator in it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.decoder_layer import DecoderLayer
from tandem.kernels.execution import choose_execution
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loader import CausalModel

__all__ = ["locate_difference"]

BLOCK_SIZE = 16
LARGE = 1e-3
"""Relative to the largest item: far above float32's rounding, below what a wrong operator does."""


@torch.inference_mode()
def locate_difference(ours: CausalModel, eager: Any, tokens: Tensor) -> str:
    """Return which operator first differs, each given eager's own input; empty if none does.

    Args:
        ours: fused, in float32.
        eager: the same model, in float64.
        tokens: int64 [T].
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(_make_hook(seen, name), with_kwargs=True)
        for name, module in eager.named_modules()
        if name and name.count(".") <= 4
    ]
    try:
        eager(tokens[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not ours.is_fused:
        return "a module that the skeleton computes"
    embedding = ours.skeleton.model.embed_tokens(tokens)
    if _differs(embedding, seen["model.embed_tokens"][1]):
        return "model.embed_tokens (Embedding)"
    for index, layer in enumerate(ours.skeleton.model.layers):
        name = f"model.layers.{index}"
        found = _locate_in_layer(ours, layer, name, seen, tokens)
        if found:
            return found
    hidden = seen["model.norm"][0].float()
    if _differs(ours.skeleton.model.norm(hidden), seen["model.norm"][1]):
        return "model.norm (RmsNorm)"
    return ""


def _make_hook(seen: dict[str, tuple[Tensor, Tensor]], name: str) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del module
        given = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            seen[name] = (given.detach().clone(), result.detach().clone())

    return hook


def _differs(ours: Tensor, theirs: Tensor) -> bool:
    a = ours.double().flatten().numpy()
    b = theirs.double().flatten().numpy()
    if a.shape != b.shape:
        return True
    return not bool(np.max(np.abs(a - b)) <= LARGE * max(1e-30, float(np.max(np.abs(b)))))


def _locate_in_layer(
    ours: CausalModel,
    layer: DecoderLayer,
    name: str,
    seen: dict[str, tuple[Tensor, Tensor]],
    tokens: Tensor,
) -> str:
    """Give each part of a layer what eager's had, then the layer itself."""
    cache = ours.allocate_kv(-(-len(tokens) // BLOCK_SIZE), block_size=BLOCK_SIZE)
    table = list(range(cache.num_blocks))
    batch = PagedBatch.build([SequenceChunk(tokens.tolist(), 0, table, "all")], BLOCK_SIZE)
    execution = choose_execution(ours.device, ours.dtype)

    def begin() -> Any:
        return execution.begin_step(batch, cache, ours.ropes, ours.dtype)

    for part, operator in layer.named_children():
        given, theirs = seen.get(f"{name}.{part}", (None, None))
        if given is None or theirs is None:
            continue
        x = given[0].float()
        if part == "self_attn":
            result = operator(x[None], tandem_step=begin())[0]
        else:
            result = operator(x)
        result = result[0] if isinstance(result, tuple) else result
        if _differs(result, theirs):
            return f"{name}.{part} ({type(operator).__name__})"
    given, theirs = seen[name]
    result = layer(given.float(), tandem_step=begin())
    return f"{name} ({type(layer).__name__})" if _differs(result, theirs) else ""
