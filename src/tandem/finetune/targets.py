"""Which linear modules get an adapter."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tandem.core.errors import ConfigError

__all__ = ["find_targets", "name_targets", "take_names_literally"]

_ROUTERS = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")


@contextmanager
def take_names_literally(model: Any) -> Iterator[None]:
    """Let PEFT take names of targets for those modules, while an adapter is added or loaded.

    For MoE families PEFT takes ``gate_proj`` for the routed experts of earlier releases, whatever
    other modules have that name: adapters of shared experts and dense blocks would be dropped. It
    knows the families by ``model_type``.
    """
    config = model.config
    config.model_type = f"{config.model_type}_as_named"
    try:
        yield
    finally:
        # The class has it.
        del config.model_type


def find_targets(model: Any, wish: str) -> list[str]:
    """Return the dotted names of the modules that ``lora_target`` means.

    Args:
        model: transformers' model.
        wish: ``all``: the projections of attention, of shared experts and of dense blocks, as the
            KTransformers tutorials mean it, but neither routers, routed experts nor the head; or
            last names of linear modules, comma-separated.

    Raises: ConfigError: a name that no linear module has.
    """
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    usual = [name for name in linear if not _ROUTERS.search(name) and ".experts." not in name]
    if wish == "all":
        return usual
    wanted = {part.strip() for part in wish.split(",") if part.strip()}
    known = {name.rpartition(".")[2] for name in linear}
    for name in sorted(wanted - known):
        if name in ("gate_up_proj", "experts") or not wanted & known:
            what = "routed experts are frozen" if name in ("gate_up_proj", "experts") else "unknown"
        else:
            what = "unknown"
        raise ConfigError(
            "finetune.find_targets",
            f"lora_target {name!r}: {what}: choose all, or of {', '.join(sorted(known))}",
            field="lora_target",
        )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def name_targets(model: Any, targets: list[str]) -> list[str]:
    """Return last names if they mean the same modules to PEFT, otherwise the full names."""
    last = sorted({name.rpartition(".")[2] for name in targets})
    matched = {
        name for name, _ in model.named_modules() if name.rpartition(".")[2] in last and name
    }
    return last if matched == set(targets) else sorted(targets)
