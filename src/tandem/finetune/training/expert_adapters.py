"""PEFT's adapters on our modules, with LoRA of routed experts.

PEFT adapts a parameter of three dimensions by a ``ParamWrapper`` around its module; if two
parameters are adapted, one wrapper is inside the other. Here too such wrappers hold the LoRA
factors, so that names, shapes and files are PEFT's. But PEFT would compute the merged weights of
all experts; if the experts are packed, our kernel gets the factors instead.

Shapes: E experts, R rank, N outputs, K inputs of a matrix.
"""

import warnings
from math import prod
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from tandem.core.errors import UnsupportedError
from tandem.finetune.recipes.targets import find_expert_shapes, take_names_literally
from tandem.kernels.cpu.adapted_experts import ExpertFactors
from tandem.models.adapter_files import ExpertShapes, read_adapter_files

__all__ = ["AdaptableExperts", "adapt_model", "name_parameters", "open_adapter"]


@runtime_checkable
class AdaptableExperts(Protocol):
    """Routed experts that can compute with the LoRA factors of an adapter in addition to their
    weights.
    """

    is_transposed: bool
    """True if the checkpoint stores the experts with inputs first."""

    def run_adapted(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        factors: ExpertFactors,
    ) -> Tensor:
        """Return the weighted sum of the experts with their factors; arguments as for
        ``RoutedExperts.forward``.
        """
        ...


def _run_adapted(outermost: ParamWrapper, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute routed experts with the LoRA factors of the nested wrappers around them.

    This replaces the outermost wrapper's ``forward``. If adapters are disabled, the experts alone
    are computed.
    """
    wrappers: dict[str, ParamWrapper] = {}
    inner: Any = outermost
    while isinstance(inner, ParamWrapper):
        wrappers[inner.parameter_name] = inner
        inner = inner.base_layer
    if outermost.disable_adapters:
        return inner(x, *args, **kwargs)
    return inner.run_adapted(x, *args, factors=_collect(inner, wrappers), **kwargs)


def _collect(experts: Any, wrappers: dict[str, ParamWrapper]) -> ExpertFactors:
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    scale = 1.0
    for name, wrapper in wrappers.items():
        (adapter,) = wrapper.active_adapters
        a, b = _get_weight(wrapper.lora_A[adapter]), _get_weight(wrapper.lora_B[adapter])
        rank, count = wrapper.r[adapter], wrapper.num_experts
        # In PEFT's B matrix the expert is the fastest index of the columns: [outputs, rank *
        # experts].
        b_ENR = b.float().view(-1, rank, count).permute(2, 0, 1)  # noqa: N806 - a shape suffix
        if name == "gate_up_proj" and experts.is_transposed:
            b_ENR = torch.cat([b_ENR[:, 0::2], b_ENR[:, 1::2]], 1)  # noqa: N806
        own = wrapper.scaling[adapter]
        if parts and own != scale:
            b_ENR = b_ENR * (own / scale)  # noqa: N806
        else:
            scale = own
        parts[name] = a.float().view(count, rank, -1), b_ENR.contiguous()
    for name, (count, num_outputs, num_inputs) in find_expert_shapes(experts).items():
        if name not in parts:
            # A matrix without an adapter gets factors of rank zero, which add nothing.
            parts[name] = torch.zeros(count, 0, num_inputs), torch.zeros(count, num_outputs, 0)
    return ExpertFactors(*parts["gate_up_proj"], *parts["down_proj"], scale)


def _get_weight(half: nn.Module) -> Tensor:
    assert isinstance(half, nn.Linear), type(half)
    return half.weight


def name_parameters(experts: nn.Module, shapes: dict[str, torch.Size], dtype: torch.dtype) -> None:
    """Give packed experts parameters that PEFT finds and adapts. They have the right shapes, but
    the memory of one element.

    Args:
        experts: the module that gets the parameters.
        shapes: shapes by name of the parameters of transformers' module, in its order, on which
            PEFT's names for the adapters depend.
        dtype: dtype of the parameters, to which PEFT rounds new adapters.
    """
    for name, shape in shapes.items():
        assert prod(shape), shape
        value = torch.empty((), dtype=dtype).expand(shape)
        experts.register_parameter(name, nn.Parameter(value, requires_grad=False))


def adapt_model(model: Any, config: LoraConfig, *, is_empty: bool = False) -> Any:
    """Add new adapters to a model; return PEFT's model around it.

    Args:
        model: the model of ``load_frozen``, or a skeleton; changed.
        config: the adapters' configuration.
        is_empty: True to leave the adapters' weights on the meta device.
    """
    with warnings.catch_warnings(), take_names_literally(model):
        # PEFT calls transformers' functions by names that will change, which warns in every run.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config, low_cpu_mem_usage=is_empty)
    return _use_kernels(adapted)


def open_adapter(model: Any, folder: Path, *, is_trainable: bool = False) -> Any:
    """Load the adapter in a folder into a model; return PEFT's model around it.

    Args:
        model: the model of ``load_frozen``; changed.
        folder: folder in PEFT's format. Its files are checked before PEFT reads them.
        is_trainable: True to continue to train the adapter.

    Raises: the errors of ``read_adapter_files``.
    """
    _check_files(model, folder)
    with warnings.catch_warnings(), take_names_literally(model):
        warnings.simplefilter("ignore", FutureWarning)
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
    return _use_kernels(adapted)


def _check_files(model: nn.Module, folder: Path) -> None:
    modules = dict(model.named_modules())

    def find_shape(name: str) -> tuple[int, int]:
        module = modules.get(name)
        if not isinstance(module, nn.Linear):
            what = f"the model has no linear module {name}: the adapter is of another model"
            raise UnsupportedError("finetune.read_adapter", what)
        return module.out_features, module.in_features

    def find_experts(name: str) -> ExpertShapes:
        return find_expert_shapes(modules[name]) if name in modules else {}

    read_adapter_files(folder, find_shape, find_experts=find_experts)


def _use_kernels(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, ParamWrapper) and isinstance(
            module.get_base_layer(), AdaptableExperts
        ):
            # PEFT has no hook for the class of a parameter's wrapper, and recognises wrappers by
            # their class's name. So the method of the outermost wrapper, the one that is called, is
            # replaced.
            module.forward = MethodType(_run_adapted, module)
    return model
