"""Applying rules to a skeleton: children first, so that a parent sees what its parts became."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tandem.core.errors import NotFoundError, UnsupportedError
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.formats import WeightFormat
from tandem.kernels.matrix import MatrixSettings
from tandem.models.operators import (
    DEVICE_KWARGS,
    BuildContext,
    OperatorEntry,
    UnfitModuleError,
    WeightSettings,
    refuse,
    resolve_operator,
)
from tandem.models.skeleton import list_modules
from tandem.placement.rules import DEFAULT, Assignment, Rule, RuleTable, assign_rules, parse_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Outcome", "apply_rules", "find_module_format", "load_rules"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one module."""

    module: str
    class_name: str
    operator: str
    """The operator in its place, or ``default`` where the skeleton's module stays."""
    rule: int | None
    note: str = ""


def load_rules(path: str | Path | None) -> tuple[Rule, ...]:
    """Return the rules of a file, if one is given, followed by the built-in ones.

    Raises:
        NotFoundError: no such file.
        ConfigError: it is not a rule file.
    """
    builtin = resources.files("tandem.models") / "rules" / "builtin.yaml"
    rules = parse_rules(builtin.read_text("utf-8"), "built-in")
    if path is None:
        return rules
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError("models.load_rules", f"cannot read {path}: {error}") from error
    return parse_rules(text, Path(path).name) + rules


def apply_rules(
    model: nn.Module,
    config: Any,
    rules: tuple[Rule, ...],
    *,
    device: str,
    settings: WeightSettings,
    strict: bool = True,
) -> tuple[RuleTable, list[Outcome]]:
    """Replace modules of ``model`` by operators, in place.

    Args:
        model: a skeleton on the meta device; modified.
        config: its configuration.
        rules: in order of precedence.
        device: where the operators will run, to say where that differs from what a rule asks.
        settings: how weights are stored and run.
        strict: raise where a rule took a module that has no operator here; else say so in its
            outcome and keep the module.

    Raises:
        ConfigError: a rule names an unknown operator or argument.
        UnsupportedError: an operator cannot take the module that its rule matched.
    """
    entries = [resolve_operator(rule) for rule in rules]
    table = assign_rules(list_modules(model), rules)
    outcomes: dict[str, Outcome] = {}
    for assignment in reversed(table.assignments):
        outcome = _apply_one(
            model,
            config,
            assignment,
            rules,
            entries,
            device=device,
            settings=settings,
            strict=strict,
        )
        outcomes[assignment.module.name] = outcome
    absorbed = dict(_find_absorbed(table, outcomes, entries))
    ordered = [outcomes[assignment.module.name] for assignment in table.assignments]
    return table, [
        Outcome(o.module, o.class_name, DEFAULT, o.rule, f"part of {absorbed[o.module]}")
        if o.module in absorbed
        else o
        for o in ordered
    ]


def _apply_one(
    model: nn.Module,
    config: Any,
    assignment: Assignment,
    rules: tuple[Rule, ...],
    entries: list[OperatorEntry | None],
    *,
    device: str,
    settings: WeightSettings,
    strict: bool,
) -> Outcome:
    name = assignment.module.name
    class_name = assignment.module.class_path.rpartition(".")[2]
    if assignment.rule is None:
        stopped = assignment.skipped_by
        note = "" if stopped is None else f"below {rules[stopped].place}, not recursive"
        return Outcome(name, class_name, DEFAULT, None, note)
    rule, entry = rules[assignment.rule], entries[assignment.rule]
    if entry is None:
        if strict:
            why = "the operator is not here"
            raise refuse(name, rule.operator, rule.place, why)
        return Outcome(name, class_name, DEFAULT, assignment.rule, "no operator here")
    module = model.get_submodule(name)
    try:
        built = entry.build(module, BuildContext(name, model, config, rule.kwargs, settings))
    except UnfitModuleError as error:
        if not entry.is_optional:
            if strict:
                raise refuse(name, entry.name, rule.place, str(error)) from None
            return Outcome(name, class_name, DEFAULT, assignment.rule, f"cannot: {error}")
        return Outcome(name, class_name, DEFAULT, assignment.rule, f"not fused: {error}")
    model.set_submodule(name, built)
    weight_format = find_module_format(built)
    notes = ["" if weight_format is None else weight_format.name, _note_devices(rule, device)]
    note = "; ".join(note for note in notes if note)
    return Outcome(name, class_name, entry.name, assignment.rule, note)


def find_module_format(module: nn.Module) -> WeightFormat | None:
    """Return the format in which a module stores its matrices; None: as tensors, or it has none."""
    if isinstance(module, NativeExperts):
        return module.weight_format
    settings = getattr(module, "settings", None)
    return settings.weight_format if isinstance(settings, MatrixSettings) else None


def _note_devices(rule: Rule, device: str) -> str:
    asked = {str(rule.kwargs[key]) for key in DEVICE_KWARGS if key in rule.kwargs}
    others = sorted(d for d in asked if d.partition(":")[0] != device.partition(":")[0])
    return f"asked for {', '.join(others)}, runs on {device}" if others else ""


def _find_absorbed(
    table: RuleTable, outcomes: dict[str, Outcome], entries: list[OperatorEntry | None]
) -> "Iterator[tuple[str, str]]":
    """Yield (module, the operator above it that took its weights)."""
    owner = None
    for assignment in table.assignments:
        name = assignment.module.name
        if owner is not None and name.startswith(f"{owner}."):
            yield name, owner
            continue
        entry = None if assignment.rule is None else entries[assignment.rule]
        took = entry is not None and outcomes[name].operator == entry.name
        owner = name if took and entry is not None and entry.absorbs else None


def require_no_meta(model: nn.Module) -> None:
    """Assert that loading left nothing on the meta device.

    Raises:
        UnsupportedError: a module has a buffer that nobody knows how to rebuild.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UnsupportedError(
                "models.load", f"{name} is computed by the skeleton and cannot be rebuilt here"
            )
