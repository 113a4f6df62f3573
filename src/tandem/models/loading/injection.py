"""Replacement of a skeleton's modules by a plan's operators; children first, so parents
find them.
"""

from typing import Any

from torch import nn

from tandem.core.errors import UnsupportedError
from tandem.core.model.plan import ModelPlan
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.cpu.hosted_experts import HostedExperts
from tandem.kernels.weights.formats import WeightFormat
from tandem.kernels.weights.matrix import MatrixSettings
from tandem.models.loading.builders import Resources, build_operator

__all__ = ["apply_plan", "find_module_format", "require_no_meta"]


def apply_plan(model: Any, plan: ModelPlan, resources: Resources) -> None:
    """Replace modules of ``model`` by a plan's operators, in place.

    Args:
        model: a skeleton on the meta device, of the plan's configuration; modified.
        plan: spec and weight format of each operator.
        resources: threads, caches and number of parts.

    Raises: UnsupportedError: a module of the plan has a problem.
    """
    for problem in (module.problem for module in plan.modules if module.problem):
        raise UnsupportedError("models.apply_plan", problem)
    for planned in reversed(plan.modules):
        if planned.spec is not None:
            model.set_submodule(planned.module, build_operator(planned, model, resources))


def find_module_format(module: nn.Module) -> WeightFormat | None:
    """Return the format of a module's matrices; None: they are tensors, or there are none."""
    if isinstance(module, HostedExperts):
        module = module.native
    if isinstance(module, NativeExperts):
        return module.weight_format
    settings = getattr(module, "settings", None)
    return settings.weight_format if isinstance(settings, MatrixSettings) else None


def require_no_meta(model: nn.Module) -> None:
    """Check that no tensor is left on the meta device after loading.

    Raises:
        UnsupportedError: a module has a buffer that no operator can rebuild.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UnsupportedError(
                "models.load", f"{name} is computed by the skeleton and cannot be rebuilt here"
            )
