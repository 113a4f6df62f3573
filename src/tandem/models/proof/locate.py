"""Location of the first difference between our model and eager: the layer and its operator."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.operators.decoder_layer import DecoderLayer
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import MoeBlock, Router
from tandem.kernels.operators.operator import Operator, running
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.loader import CausalModel
from tandem.models.planning.roles import MIXER_NAMES, find_base_part

__all__ = ["locate_difference"]

BLOCK_SIZE = 16
LARGE = 1e-3
"""Smallest difference, relative to the largest item, that is reported: far above float32's
rounding, below a bug's effect.
"""


@torch.inference_mode()
def locate_difference(ours: CausalModel, eager: Any, tokens: Tensor) -> str:
    """Return the first of our operators whose result differs from transformers' module's on the
    same input; empty if none does.

    Args:
        ours: our model, in float32.
        eager: the same model in transformers' eager code, in float64.
        tokens: int64 [T].
    """
    seen: Seen = {}
    hooks = [
        module.register_forward_hook(_make_hook(seen, name), with_kwargs=True)
        for name, module in eager.named_modules()
        if name and name.count(".") <= 4
    ]
    try:
        logits = eager(tokens[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    path, embed = find_base_part(ours.skeleton, "embedding")
    if _differs(embed(tokens), seen[path].result):
        return f"{path} (Embedding)"
    for index, layer in enumerate(ours.skeleton.model.layers):
        name = f"model.layers.{index}"
        found = _locate_in_layer(ours, layer, name, seen, tokens)
        if found:
            return found
    path, norm = find_base_part(ours.skeleton, "norm")
    last = seen[path]
    if _differs(norm(last.given.float()), last.result):
        return f"{path} (RmsNorm)"
    head = ours.skeleton.lm_head
    if _differs(head(last.result[0].float()), logits):
        return f"lm_head ({type(head).__name__})"
    return "" if ours.is_fused else "a module that the skeleton computes"


@dataclass(frozen=True, slots=True)
class _Call:
    """Input and results of one module of transformers' eager model, recorded by a hook so that our
    operator can be compared on the same input.
    """

    given: Tensor
    others: tuple[Tensor, ...]
    """Further positional arguments of the call, after the hidden states."""
    results: tuple[Tensor, ...]

    @property
    def result(self) -> Tensor:
        """First result of the module; only routers have more than one."""
        return self.results[0]


Seen = dict[str, _Call]


def _make_hook(seen: Seen, name: str) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del module
        given = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        results = _copy(output if isinstance(output, tuple) else (output,))
        if isinstance(given, Tensor) and results:
            seen[name] = _Call(given.detach().clone(), _copy(args[1:]), results)

    return hook


def _copy(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach().clone() for value in values if isinstance(value, Tensor))


def _differs(ours: Tensor, theirs: Tensor) -> bool:
    a = ours.double().flatten().numpy()
    b = theirs.double().flatten().numpy()
    if a.shape != b.shape:
        return True
    return not bool(np.max(np.abs(a - b)) <= LARGE * max(1e-30, float(np.max(np.abs(b)))))


def _locate_in_layer(
    ours: CausalModel,
    layer: Any,
    name: str,
    seen: Seen,
    tokens: Tensor,
) -> str:
    """Compare each part of a layer with transformers', then the layer itself, each given the input
    that transformers' part had; return the first that differs.
    """
    cache = ours.allocate_kv(-(-len(tokens) // BLOCK_SIZE), block_size=BLOCK_SIZE)
    table = list(range(cache.num_blocks))
    chunk = SequenceChunk(tokens.tolist(), 0, table, "all", state_slot=0)
    batch = PagedBatch.build([chunk], BLOCK_SIZE)
    execution = ours.context.choose_execution(ours.dtype)

    def begin() -> Any:
        states = ours.allocate_states(1)
        return execution.begin_step(batch, cache, ours.ropes, ours.dtype, states=states)

    for part, operator in layer.named_children():
        path = f"{name}.{part}"
        call = seen.get(path)
        if call is None or not isinstance(operator, Operator):
            continue
        x = call.given[0].float()
        if part in MIXER_NAMES:
            with running(begin()):
                _choose_before(ours, name, seen)
                result = operator(x[None])[0]
        else:
            result = operator(x)
        result = result[0] if isinstance(result, tuple) else result
        if _differs(result, call.result):
            inner = _locate_in_block(operator, path, seen) if isinstance(operator, MoeBlock) else ""
            return inner or f"{path} ({type(operator).__name__})"
    if not isinstance(layer, DecoderLayer):
        return ""
    call = seen[name]
    step = begin()
    if layer.own_input is not None:
        # transformers passes it behind the hidden states, [1, T, items]; the step has those of all
        # layers, of which this one reads its own.
        own = call.others[0][0].float()
        step.layer_inputs = own[:, None].expand(-1, len(ours.skeleton.model.layers), -1)
    with running(step):
        _choose_before(ours, name, seen)
        result = layer(call.given.float())
    result = result[0] if isinstance(result, tuple) else result
    return f"{name} ({type(layer).__name__})" if _differs(result, call.result) else ""


def _choose_before(ours: CausalModel, name: str, seen: Seen) -> None:
    """Give the running step the tokens that an earlier layer's index chose, if this layer shares
    them.
    """
    layers, index = ours.skeleton.model.layers, int(name.rpartition(".")[2])
    mixers = [getattr(layer, "self_attn", None) for layer in layers[: index + 1]]
    chosen = [
        i for i, m in enumerate(mixers) if isinstance(m, MlaAttention) and m.spec.index is not None
    ]
    own = mixers[index]
    if not isinstance(own, MlaAttention) or not own.spec.top or own.spec.index is not None:
        return
    assert chosen, "a layer shares a choice that none made"
    source = chosen[-1]
    layers[source].self_attn(seen[f"model.layers.{source}.self_attn"].given.float())


def _locate_in_block(block: MoeBlock, name: str, seen: Seen) -> str:
    """Compare each part of a MoE block with transformers', given the input that transformers' part
    had; return the first that differs, or an empty string.
    """
    for part, operator in block.named_children():
        path = f"{name}.{part}"
        call = seen.get(path)
        if call is None:
            continue
        x = call.given.float()
        is_wrong = False
        # Some of transformers' routers return the scores of all experts instead of a choice.
        ids = call.results[-1]
        if isinstance(operator, Router) and not ids.is_floating_point():
            weights = call.results[-2]
            _, our_weights, our_ids = operator(x)
            shape = (len(ids), operator.num_experts)
            theirs = weights.new_zeros(shape).scatter_(1, ids, weights)
            made = our_weights.new_zeros(shape).scatter_(1, our_ids, our_weights)
            is_wrong = _differs(made, theirs)
        elif isinstance(operator, RoutedExperts) and len(call.others) == 2:
            ids, weights = call.others
            is_wrong = _differs(operator(x, ids, weights.float()), call.result)
        elif isinstance(operator, Mlp):
            is_wrong = _differs(operator(x), call.result)
        if is_wrong:
            return f"{path} ({type(operator).__name__})"
    return ""
