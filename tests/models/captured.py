"""The part of a decode step that a graph holds, and a look at each of its operators.

None may read a value, have a shape that depends on one, give the host a tensor or take one from it,
or make one there: it would wait for the device, or repeat what was true when it was captured.
"""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.kernels.cpu.hosted_experts import HostedExperts
from tandem.kernels.hybrid import find_size
from tandem.kernels.lanes.pairs import sum_pairs
from tandem.kernels.native import Buffer
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.kernels.routing import StepRouting
from tandem.kernels.torch.fixed import FixedDecode, count_width


class Captured(TorchDispatchMode):
    """Notes operators that a graph cannot hold, or that would make it wait for the host."""

    def __init__(self):
        super().__init__()
        self.found, self.num_seen = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.num_seen += 1
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        # Numbers as an index give a shape of their own; only a mask's depends on its values.
        is_index = func is torch.ops.aten.index.Tensor
        if tags and not (is_index and all(x.dtype != torch.bool for x in given[1:])):
            self.found.append(f"{func} depends on values")
        if any(x.device.type != "cuda" for x in made):
            self.found.append(f"{func} on the host")
        if any(x.device.type != "cuda" for x in given):
            self.found.append(f"{func} of the host's")
        return out


def put_adapters(adapters, device):
    """Install two adapters of unlike ranks in all modules, and give them a row each of a step."""
    for slot, rank in enumerate((2, 3)):
        for part in adapters.modules.values():
            a, b = (
                torch.ones(shape, dtype=adapters._dtype, device=device)
                for shape in ((rank, part.in_features), (part.out_features, rank))
            )
            part.set_delta(slot, a, b, 0.5)
    adapters._step.begin(3, {0: [1], 1: [2]})


def find_waits(model, block_size, num_tokens=3):
    """Run the layers of a decode step of a fused model; return what a graph cannot hold of it.

    If the model takes adapters, the first row is the model's and the next two have one each.
    """
    sequences = [
        SequenceChunk(
            token_ids=[5 + i],
            start=7 + 9 * i,
            block_table=np.arange(4 * i, 4 * i + 4, dtype=np.int32),
            state_slot=i,
            prompt_len=3,
        )
        for i in range(num_tokens)
    ]
    batch = PagedBatch.build(sequences, block_size, model.device)
    cache, states = model.allocate_kv(16, block_size=block_size), model.allocate_states(4)
    hidden, inputs = model._embed(batch.token_ids), None
    if model._layer_inputs is not None:
        inputs = model._layer_inputs(batch.token_ids, hidden)
    size = find_size(batch.num_tokens)
    width = count_width(batch, cache, size)
    captured = Captured()
    if width:
        fixed = FixedDecode(
            size,
            width,
            cache,
            hidden_size=hidden.shape[1],
            ropes=model.ropes,
            dtype=model.dtype,
            moe=model.moe,
            states=states,
        )
        fixed.fill_(batch, hidden, inputs)
        step, hidden = fixed.step, fixed.hidden
        if model.adapters is not None:
            put_adapters(model.adapters, model.device)
            assert model.adapters.fix_step(size) > 0
        with captured:
            step.begin_()
    else:
        # An index chooses tokens: such a step is no graph, but waits for no value either.
        routing = StepRouting(model.moe, batch, cache, model.dtype) if model.moe else None
        step = model._execution.begin_step(
            batch, cache, model.ropes, model.dtype, None, states, routing
        )
        step.layer_inputs = inputs
    sum_TD = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    with captured:
        for layer in model._fused:
            experts = None if layer.routed is None else layer.routed[1]
            if isinstance(experts, HostedExperts):
                choice = step.choose_experts_(layer, hidden)
                step.run_shared_(choice)
                outputs = sum_TD[:, None].expand(-1, choice.ids.tensor.shape[1], -1)
                total = sum_pairs(choice.ids.tensor, choice.weights.tensor.float(), outputs)
                step.leave_sum_(Buffer(total))
            else:
                step.run_layer_(layer, hidden)
        step.complete_(hidden)
    assert captured.num_seen > 10 * len(model._fused)
    return captured.found
