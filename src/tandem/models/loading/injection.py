"""Applying rules, or a plan, to a skeleton: children first, so a parent sees what they became."""

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn

from tandem.core.errors import NotFoundError, UnsupportedError
from tandem.core.model_plan import NO_FORMAT, ModelPlan, ModulePlan
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.weights.formats import WeightFormat
from tandem.kernels.weights.matrix import MatrixSettings
from tandem.models.loading.builders import (
    FORMAT_KWARG,
    KEEPS_CODES_KWARG,
    BuildContext,
    UnfitModuleError,
    WeightSettings,
)
from tandem.models.loading.operators import (
    DEVICE_KWARGS,
    OPERATORS,
    OperatorEntry,
    resolve_operator,
)
from tandem.models.loading.skeleton import list_modules
from tandem.models.planning.probes import AttentionCall
from tandem.models.planning.roles import observe_attentions
from tandem.placement.rules import DEFAULT, Assignment, Rule, RuleTable, assign_rules, parse_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["apply_plan", "apply_rules", "find_module_format", "load_rules", "require_no_meta"]


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
        what = f"cannot read {path}: {error}: give a YAML file of rules"
        raise NotFoundError("models.load_rules", what) from error
    return parse_rules(text, Path(path).name) + rules


def apply_rules(
    model: nn.Module,
    config: Any,
    rules: tuple[Rule, ...],
    *,
    device: str,
    settings: WeightSettings,
) -> tuple[RuleTable, tuple[ModulePlan, ...]]:
    """Replace modules of ``model`` by operators, in place; say what became of each module.

    Args:
        model: a skeleton on the meta device; modified.
        config: its configuration.
        rules: in order of precedence.
        device: where the operators will run, to say where that differs from what a rule asks.
        settings: how weights are stored and run.

    A rule that took a module without operator here is a ``problem`` of that module.

    Raises:
        ConfigError: a rule names an unknown operator or argument.
    """
    entries = [resolve_operator(rule) for rule in rules]
    table = assign_rules(list_modules(model), rules)
    plans: dict[str, ModulePlan] = {}
    attentions = observe_attentions(model)
    for assignment in reversed(table.assignments):
        plans[assignment.module.name] = _apply_one(
            model, config, assignment, rules, entries, attentions, device=device, settings=settings
        )
    owners = dict(_find_absorbed(table, plans))
    ordered = [plans[assignment.module.name] for assignment in table.assignments]
    return table, tuple(
        ModulePlan(
            module=plan.module,
            class_name=plan.class_name,
            operator=DEFAULT,
            rule=plan.rule,
            owner=owners[plan.module],
            note=f"part of {owners[plan.module]}",
        )
        if plan.module in owners
        else plan
        for plan in ordered
    )


def apply_plan(model: nn.Module, config: Any, plan: ModelPlan, settings: WeightSettings) -> None:
    """Replace modules of ``model`` by the operators that a plan names, in place.

    Args:
        model: a skeleton on the meta device, of the plan's configuration; modified.
        config: its configuration.
        plan: says operator and weight format of each module.
        settings: threads, caches and parts; its formats are not used.

    Raises: UnsupportedError: a module of the plan has a problem, or is not what it was.
    """
    for problem in (module.problem for module in plan.modules if module.problem):
        raise UnsupportedError("models.apply_rules", problem)
    attentions = observe_attentions(model)
    for planned in reversed(plan.modules):
        if planned.operator == DEFAULT:
            continue
        entry = OPERATORS.resolve(planned.operator, where="models.apply_plan", field="operator")
        kwargs = {FORMAT_KWARG: planned.weight_format, KEEPS_CODES_KWARG: planned.keeps_codes}
        context = BuildContext(planned.module, model, config, kwargs, settings, attentions)
        try:
            built = entry.build(model.get_submodule(planned.module), context)
        except UnfitModuleError as error:
            raise UnsupportedError(
                "models.apply_plan", f"{planned.module} is not what the plan was made of: {error}"
            ) from error
        model.set_submodule(planned.module, built)


def _apply_one(
    model: nn.Module,
    config: Any,
    assignment: Assignment,
    rules: tuple[Rule, ...],
    entries: list[OperatorEntry | None],
    attentions: dict[str, AttentionCall | str],
    *,
    device: str,
    settings: WeightSettings,
) -> ModulePlan:
    name = assignment.module.name
    kept = ModulePlan(
        module=name,
        class_name=assignment.module.class_path.rpartition(".")[2],
        operator=DEFAULT,
        rule="" if assignment.rule is None else rules[assignment.rule].place,
    )
    if assignment.rule is None:
        stopped = assignment.skipped_by
        note = "" if stopped is None else f"below {rules[stopped].place}, not recursive"
        return msgspec.structs.replace(kept, note=note)
    rule, entry = rules[assignment.rule], entries[assignment.rule]
    if entry is None:
        problem = _tell_problem(rule, rule.operator, name, "the operator is not here")
        return msgspec.structs.replace(kept, note="no operator here", problem=problem)
    module = model.get_submodule(name)
    if entry.choose is not None:
        entry = OPERATORS.resolve(entry.choose(module), where=rule.place, field="replace.class")
    try:
        context = BuildContext(name, model, config, rule.kwargs, settings, attentions)
        built = entry.build(module, context)
    except UnfitModuleError as error:
        if entry.is_optional:
            return msgspec.structs.replace(kept, note=f"not fused: {error}")
        problem = _tell_problem(rule, entry.name, name, str(error))
        return msgspec.structs.replace(kept, note=f"cannot: {error}", problem=problem)
    model.set_submodule(name, built)
    weight_format = find_module_format(built)
    return msgspec.structs.replace(
        kept,
        operator=entry.name,
        weight_format=NO_FORMAT if weight_format is None else weight_format.name,
        keeps_codes=_keeps_codes(built),
        note=_note_devices(rule, device),
    )


def _tell_problem(rule: Rule, operator: str, module_name: str, why: str) -> str:
    return f"{rule.place}: operator {operator} cannot take {module_name}: {why}"


def find_module_format(module: nn.Module) -> WeightFormat | None:
    """Return the format in which a module stores its matrices; None: as tensors, or it has none."""
    if isinstance(module, NativeExperts):
        return module.weight_format
    settings = getattr(module, "settings", None)
    return settings.weight_format if isinstance(settings, MatrixSettings) else None


def _keeps_codes(module: nn.Module) -> bool:
    settings = getattr(module, "settings", None)
    return isinstance(settings, MatrixSettings) and settings.keeps_codes


def _note_devices(rule: Rule, device: str) -> str:
    asked = {str(rule.kwargs[key]) for key in DEVICE_KWARGS if key in rule.kwargs}
    others = sorted(d for d in asked if d.partition(":")[0] != device.partition(":")[0])
    return f"asked for {', '.join(others)}, runs on {device}" if others else ""


def _find_absorbed(table: RuleTable, plans: dict[str, ModulePlan]) -> "Iterator[tuple[str, str]]":
    """Yield (module, the operator above it that took its weights)."""
    owner = None
    for assignment in table.assignments:
        name = assignment.module.name
        if owner is not None and name.startswith(f"{owner}."):
            yield name, owner
            continue
        operator = plans[name].operator
        entry = OPERATORS.resolve(operator, where="models.apply_rules", field="operator")
        owner = name if entry.absorbs else None


def require_no_meta(model: nn.Module) -> None:
    """Assert that loading left nothing on the meta device.

    Raises:
        UnsupportedError: a module has a buffer that no operator can rebuild.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UnsupportedError(
                "models.load", f"{name} is computed by the skeleton and cannot be rebuilt here"
            )
