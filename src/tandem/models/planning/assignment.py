"""Assignment of rules to a skeleton's modules: the operator of each, and its weight format.

Children come first, so that a parent module's assignment can depend on theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from tandem.core.errors import NotFoundError
from tandem.core.model.layers import (
    EmbeddingSpec,
    ExpertsSpec,
    FrozenLinearSpec,
    GatedDeltaSpec,
    GqaSpec,
    HeadSpec,
    KimiDeltaSpec,
    LinearSpec,
    Mamba2Spec,
    MlaSpec,
    MlpSpec,
    OperatorSpec,
    RouterSpec,
    ShortConvSpec,
)
from tandem.core.model.plan import NO_FORMAT, ModulePlan
from tandem.kernels.weights.formats import explain_groups, fit_groups
from tandem.models.loading.skeleton import list_modules
from tandem.models.planning.describe import Describer, describe_decoder_layer
from tandem.models.planning.operators import (
    DEVICE_KWARGS,
    FORMAT_KWARG,
    OPERATORS,
    OperatorEntry,
    resolve_operator,
)
from tandem.models.planning.probes import UnfitModuleError
from tandem.models.planning.stored import StoredModel
from tandem.placement.rules import DEFAULT, Assignment, Rule, RuleTable, assign_rules, parse_rules

__all__ = ["DefaultFormats", "Workload", "load_rules", "plan_modules"]

Workload = Literal["serving", "training"]
"""Purpose that decides the built-in rules: ``serving`` (operators) or ``training`` (frozen weights
with adapters).
"""

BUILT_IN = "built-in"
"""Name reported as the origin of rules that come from the program and not from a user's file."""


MULTIPLIED = (
    GqaSpec,
    MlaSpec,
    GatedDeltaSpec,
    KimiDeltaSpec,
    ShortConvSpec,
    Mamba2Spec,
    MlpSpec,
    LinearSpec,
    FrozenLinearSpec,
    HeadSpec,
)
"""Types of specs whose operators have matrices that take the weight format of linear modules."""
GATED = (GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec)
"""Types of specs whose operators have matrices that control a state's decay; these matrices take
the weight format of router scores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultFormats:
    """Names of the weight formats of matrices for which no placement rule names a format."""

    experts: str
    linear: str
    router: str
    """Format of router scores, which determine choices: one without loss."""
    stored: StoredModel = field(default_factory=StoredModel)
    """Matrices of the checkpoint that may keep their stored format."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Numbers of inputs of the matrices, by the skeleton's module."""

    def fit(self, name: str, spec: OperatorSpec, wish: str) -> tuple[str, str]:
        """Return (format that a rule's ``int8`` or another name means for an operator's matrices,
        why its groups are other ones than usual; empty if they are not).

        Args:
            name: path of the module.
            spec: spec of its operator.
            wish: the rule's format.

        Raises: NotFoundError (there is no such format).
        """
        if wish == NO_FORMAT:
            return NO_FORMAT, ""
        if isinstance(spec, ExpertsSpec):
            widths = {spec.hidden_size, spec.intermediate_size}
        else:
            below = f"{name}."
            widths = {k for m, k in self.widths.items() if m == name or m.startswith(below)}
        chosen = fit_groups(wish, widths)
        return chosen.name, explain_groups(wish, chosen, widths)

    def choose(self, name: str, spec: OperatorSpec, wish: str | None) -> tuple[str, bool]:
        """Return (format of an operator's matrices, True if each matrix keeps the format of its
        codes).

        Args:
            name: path of the module.
            spec: spec of its operator.
            wish: format of its rule, which has precedence; None: the rule names none.
        """
        if isinstance(spec, EmbeddingSpec):
            # Embedding rows are looked up, not multiplied: they keep the checkpoint's codes, or
            # plain values.
            held = None if wish is not None else self.stored.find_format(name)
            return NO_FORMAT if held is None else held.name, False
        is_score = isinstance(spec, LinearSpec) and spec.out_features == 1
        if isinstance(spec, RouterSpec) or is_score:
            # A router does not keep the checkpoint's codes, because products with codes would also
            # quantize its activations.
            return self.router if wish is None else wish, False
        if isinstance(spec, ExpertsSpec):
            default = self.experts
        elif isinstance(spec, MULTIPLIED):
            default = self.linear
        else:
            return NO_FORMAT, False
        if wish is not None:
            return wish, False
        held = self.stored.find_format(name)
        keeps_codes = not isinstance(spec, ExpertsSpec) and self.stored.is_mixed(name)
        if isinstance(spec, GatedDeltaSpec) and held is None:
            # The output matrix may take its inputs in an order that would split blocks of codes;
            # then the codes are kept as stored.
            keeps_codes = self.stored.has_codes(name)
        return default if held is None else held.name, keeps_codes


def load_rules(
    given: str | Path | tuple[Rule, ...] | None, workload: Workload = "serving"
) -> tuple[Rule, ...]:
    """Return the given rules, or those of a file, followed by the workload's built-in rules.

    Raises:
        NotFoundError: no such file.
        ConfigError: the file is not a rule file.
    """
    rules = _load_builtin_rules(workload)
    if given is None:
        return rules
    if isinstance(given, tuple):
        return given + rules
    try:
        text = Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {given}: {error}: give a YAML file of rules"
        raise NotFoundError("models.load_rules", what) from error
    return parse_rules(text, Path(given).name) + rules


@cache
def _load_builtin_rules(workload: Workload) -> tuple[Rule, ...]:
    """Return the rules of the package for a workload, which are parsed once."""
    builtin = resources.files("tandem.models") / "rules" / f"{workload}.yaml"
    return parse_rules(builtin.read_text("utf-8"), BUILT_IN)


def plan_modules(
    describer: Describer, rules: tuple[Rule, ...], *, device: str, formats: DefaultFormats
) -> tuple[RuleTable, tuple[ModulePlan, ...]]:
    """Decide the operator and format of each module of a skeleton.

    Args:
        describer: specs of the skeleton's modules.
        rules: in order of precedence.
        device: where operators will run, to note where a rule asks for another device.
        formats: default weight formats.

    A rule that matches a module for which there is no operator becomes that module's ``problem``.

    Raises:
        ConfigError: a rule names an unknown operator or argument.
    """
    entries = [resolve_operator(rule) for rule in rules]
    table = assign_rules(list_modules(describer.model), rules)
    plans: dict[str, ModulePlan] = {}
    specs: dict[str, OperatorSpec] = {}
    for assignment in reversed(table.assignments):
        plan = _plan_one(describer, assignment, rules, entries, specs, device, formats)
        plans[plan.module] = plan
        if plan.spec is not None:
            specs[plan.module] = plan.spec
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


def _plan_one(
    describer: Describer,
    assignment: Assignment,
    rules: tuple[Rule, ...],
    entries: list[OperatorEntry | None],
    specs: dict[str, OperatorSpec],
    device: str,
    formats: DefaultFormats,
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
    if entry.choose is not None:
        chosen = entry.choose(describer.model.get_submodule(name))
        entry = OPERATORS.resolve(chosen, where=rule.place, field="replace.class")
    if entry.describe is None:
        return msgspec.structs.replace(kept, note=_note_devices(rule, device))
    try:
        if entry.describe is describe_decoder_layer:
            spec = describer.describe_above(name, entry.describe, specs)
        else:
            spec = describer.describe(name, entry.describe)
    except UnfitModuleError as error:
        if entry.is_optional and rule.place.startswith(BUILT_IN):
            return msgspec.structs.replace(kept, note=f"not fused: {error}")
        problem = _tell_problem(rule, entry.name, name, str(error))
        return msgspec.structs.replace(kept, note=f"cannot: {error}", problem=problem)
    wish, why = rule.kwargs.get(FORMAT_KWARG), ""
    if wish is not None:
        wish, why = formats.fit(name, spec, wish)
    weight_format, keeps_codes = formats.choose(name, spec, wish)
    if entry.needs_format and weight_format == NO_FORMAT:
        return msgspec.structs.replace(kept, note="tensors, as transformers runs them")
    return msgspec.structs.replace(
        kept,
        operator=entry.name,
        spec=spec,
        weight_format=weight_format,
        score_format=formats.router if _has_scores(spec) else NO_FORMAT,
        keeps_codes=keeps_codes,
        note="; ".join(filter(None, (why, _note_devices(rule, device)))),
    )


def _has_scores(spec: OperatorSpec) -> bool:
    """Return True if an operator has a matrix whose products control or choose (a state's gates, an
    index's weights); such a matrix is stored without loss.
    """
    return isinstance(spec, GATED) or (isinstance(spec, MlaSpec) and spec.index is not None)


def _tell_problem(rule: Rule, operator: str, module_name: str, why: str) -> str:
    return f"{rule.place}: operator {operator} cannot take {module_name}: {why}"


def _note_devices(rule: Rule, device: str) -> str:
    asked = {str(rule.kwargs[key]) for key in DEVICE_KWARGS if key in rule.kwargs}
    others = sorted(d for d in asked if d.partition(":")[0] != device.partition(":")[0])
    return f"asked for {', '.join(others)}, runs on {device}" if others else ""


def _find_absorbed(table: RuleTable, plans: dict[str, ModulePlan]) -> Iterator[tuple[str, str]]:
    """Yield (module, operator above it), for modules whose weights an operator above took over."""
    owner = None
    for assignment in table.assignments:
        name = assignment.module.name
        if owner is not None and name.startswith(f"{owner}."):
            yield name, owner
            continue
        operator = plans[name].operator
        entry = OPERATORS.resolve(operator, where="models.apply_rules", field="operator")
        owner = name if entry.absorbs else None
