"""Routed experts of transformers' own modules, computed by our operators.

Classes that our operators do not support as a whole often have experts in the usual form: two
tensors for a layer's experts, and a module that takes each token's choices and weights. Such a
module is replaced by our kernels, which read each chosen expert once; its router is kept. The proof
of the model checks the results with a tiny model that has the same replacement.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from tandem._native import ThreadPool
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.cpu.experts import NativeExperts, PackedExperts
from tandem.kernels.weights.formats import find_format
from tandem.models.planning.describe import describe_routed_experts
from tandem.models.planning.probes import UnfitModuleError
from tandem.models.planning.roles import is_experts

__all__ = ["find_experts", "place_experts"]

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""Argument names of a module of experts, the same as those of our operator."""
WEIGHTS = {"gate_up_proj", "down_proj"}
FORMATS = {"float32": "f32", "bfloat16": "bf16"}
"""Weight formats without loss, by the dtype of the weights."""


def find_experts(modules: nn.Module) -> dict[str, ExpertsSpec]:
    """Return the specs of the routed experts in transformers' model that our operators can compute,
    by module path.
    """
    found: dict[str, ExpertsSpec] = {}
    for name, module in modules.named_modules():
        if not is_experts(module) or not _is_called_alike(module):
            continue
        own = {key for key, _ in (*module.named_parameters(), *module.named_buffers())}
        try:
            spec = describe_routed_experts(module)
        except UnfitModuleError:
            continue
        if own == WEIGHTS and spec.is_gated and not spec.scales_input:
            found[name] = spec
    return found


def _is_called_alike(module: nn.Module) -> bool:
    parameters = tuple(inspect.signature(type(module).forward).parameters)
    return parameters[1 : 1 + len(ARGUMENTS)] == ARGUMENTS


def place_experts(modules: nn.Module, dtype: str, pool: ThreadPool) -> int:
    """Replace experts by our operators, a layer at a time; return the number of layers replaced.

    Args:
        modules: transformers' model, with weights on the CPU.
        dtype: dtype of the weights.
        pool: runs the kernels; borrowed for the life of the model.
    """
    if dtype not in FORMATS:
        return 0
    found = find_experts(modules)
    for name, spec in found.items():
        experts = NativeExperts(spec, weight_format=find_format(FORMATS[dtype]), pool=pool)
        experts.take(_pack(modules.get_submodule(name), spec, experts, pool))
        above, _, own = name.rpartition(".")
        setattr(modules.get_submodule(above), own, experts.eval())
    return len(found)


def _pack(
    module: Any, spec: ExpertsSpec, experts: NativeExperts, pool: ThreadPool
) -> PackedExperts:
    sizes = (spec.num_experts, spec.hidden_size, spec.intermediate_size)
    packed = PackedExperts(experts.weight_format, *sizes, pool=pool, activation=spec.activation)
    both: Tensor = module.gate_up_proj.detach()
    downs: Tensor = module.down_proj.detach()
    for expert_id, (gate_up, down) in enumerate(zip(both, downs, strict=True)):
        if spec.is_transposed:
            gate_up, down = gate_up.t(), down.t()
        gate, up = (gate_up[rows].contiguous() for rows in spec.gate_up_rows)
        packed.pack_expert(expert_id, gate, up, down.contiguous())
    return packed
