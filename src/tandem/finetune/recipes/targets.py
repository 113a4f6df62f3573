"""The modules and parameters that get an adapter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tandem.core.errors import ConfigError

__all__ = [
    "find_expert_parameters",
    "find_expert_shapes",
    "find_targets",
    "name_targets",
    "take_names_literally",
]

EXPERTS = "experts"
"""Word in ``lora_target`` that stands for the routed experts."""
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
_ROUTERS = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")


@contextmanager
def take_names_literally(model: Any) -> Iterator[None]:
    """Make PEFT take target names as they are, inside the context in which an adapter is added or
    loaded.

    PEFT recognises MoE families by ``model_type``, and for these takes ``gate_proj`` as the routed
    experts of earlier releases, even if other modules have that name: adapters of shared experts
    and dense blocks would be lost. So the configuration has another ``model_type`` inside the
    context.
    """
    config = model.config
    config.model_type = f"{config.model_type}_as_named"
    try:
        yield
    finally:
        # Deleting the instance's attribute makes the class's model_type visible again.
        del config.model_type


def find_targets(model: Any, wish: str) -> list[str]:
    """Return the dotted names of the linear modules that ``lora_target`` means.

    Args:
        model: transformers' model.
        wish: names, comma-separated. ``all``: the projections of attention, of shared experts and
            of dense blocks, as the KTransformers tutorials mean it, but neither routers, routed
            experts nor the head. ``experts``: the routed experts, which are parameters and so not
            in the result: see ``find_expert_parameters``. Others are last names of modules.

    Raises: ConfigError: a name that no linear module has.
    """
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    usual = [name for name in linear if not _ROUTERS.search(name) and ".experts." not in name]
    wanted = _split_wish(wish)
    known = {name.rpartition(".")[2] for name in linear}
    for name in sorted(wanted - known - {"all", EXPERTS}):
        words = ["all", *([EXPERTS] if _list_experts(model) else []), *sorted(known)]
        raise ConfigError(
            "finetune.find_targets",
            f"lora_target {name!r}: unknown: choose of {', '.join(words)}",
            field="lora_target",
        )
    chosen = set(usual) if "all" in wanted else set()
    return [name for name in linear if name in chosen or name.rpartition(".")[2] in wanted]


def find_expert_parameters(model: Any, wish: str) -> list[str]:
    """Return PEFT's names for the parameters of the routed experts if ``lora_target`` asks for
    them.

    Each name is the end of a dotted name, so that it means that parameter in every layer. The list
    is empty if routed experts are not asked for.

    Args:
        model: transformers' model.
        wish: the value of ``lora_target``, as in ``find_targets``.

    Raises: ConfigError: they are asked for, and the model has no experts with one parameter for a
        whole layer.
    """
    if EXPERTS not in _split_wish(wish):
        return []
    ends = {
        f"{'.'.join(name.split('.')[-2:])}.{parameter}"
        for name in _list_experts(model)
        for parameter in EXPERT_PARAMETERS
    }
    if not ends:
        what = f"lora_target {EXPERTS}: {type(model).__name__} has no routed experts: leave it out"
        raise ConfigError("finetune.find_targets", what, field="lora_target")
    return sorted(ends)


def find_expert_shapes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return (experts, outputs, inputs) of each parameter of a module of routed experts.

    Empty for other modules. Parameters are in the module's order, on which PEFT's names for their
    adapters depend.
    """
    is_transposed = bool(getattr(module, "is_transposed", False))
    found: dict[str, tuple[int, int, int]] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if name in EXPERT_PARAMETERS and parameter.dim() == 3:
            count, rows, columns = parameter.shape
            found[name] = (count, columns, rows) if is_transposed else (count, rows, columns)
    return found if len(found) == len(EXPERT_PARAMETERS) else {}


def _list_experts(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if find_expert_shapes(module)]


def _split_wish(wish: str) -> set[str]:
    return {part.strip() for part in wish.split(",") if part.strip()}


def name_targets(model: Any, targets: list[str]) -> list[str]:
    """Return the last words of target names if PEFT would match exactly these modules by them;
    otherwise the full names.
    """
    last = sorted({name.rpartition(".")[2] for name in targets})
    matched = {
        name for name, _ in model.named_modules() if name.rpartition(".")[2] in last and name
    }
    return last if matched == set(targets) else sorted(targets)
