"""What rules make of a model, without its weights: the report behind ``tandem plan``."""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem._native import ThreadPool
from tandem.core.spec import ModelSpec
from tandem.models.families import open_checkpoint
from tandem.models.injection import Outcome, apply_rules, load_rules
from tandem.models.operators import ExpertSettings
from tandem.models.precision import choose_dtype, plan_experts
from tandem.models.skeleton import build_skeleton
from tandem.placement.rules import DEFAULT, Rule

__all__ = ["RulesReport", "explain_rules"]


@dataclass(frozen=True, slots=True)
class RulesReport:
    """Rule by module, and what the rules came to."""

    model: str
    spec: ModelSpec
    rules: tuple[Rule, ...]
    outcomes: tuple[Outcome, ...]
    unused: tuple[int, ...]
    """Indexes of rules that matched no module."""
    shadowed: dict[int, tuple[int, ...]]
    """Rules that earlier ones took all modules from, each with those rules."""

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON types."""
        return {
            "model": self.model,
            "dtype": self.spec.dtype,
            "dtype_reason": self.spec.dtype_reason,
            "modules": [
                {
                    "module": outcome.module,
                    "class": outcome.class_name,
                    "operator": outcome.operator,
                    "rule": None if outcome.rule is None else self.rules[outcome.rule].place,
                    "note": outcome.note,
                }
                for outcome in self.outcomes
            ],
            "unused_rules": [self.rules[i].place for i in self.unused],
            "shadowed_rules": {
                self.rules[i].place: [self.rules[j].place for j in by]
                for i, by in self.shadowed.items()
            },
        }

    def render(self) -> str:
        """Return the report as text; modules that differ in their numbers alone share a line."""
        groups: dict[tuple[str, str, str, str, str], list[str]] = {}
        for outcome in self.outcomes:
            place = "-" if outcome.rule is None else self.rules[outcome.rule].place
            pattern = re.sub(r"\d+", "*", outcome.module)
            note = re.sub(r"\.\d+", ".*", outcome.note)
            key = (pattern, outcome.class_name, outcome.operator, place, note)
            groups.setdefault(key, []).append(outcome.module)
        rows = [("module", "class", "operator", "rule", "note")]
        for (pattern, class_name, operator, place, note), members in groups.items():
            name = members[0] if len(members) == 1 else f"{pattern} x{len(members)}"
            rows.append((name, class_name, operator, place, note))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [f"{self.model}: {self.spec.dtype_reason}", ""]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        lines += ["", *self._render_rules()]
        return "\n".join(lines)

    def _render_rules(self) -> list[str]:
        replaced = sum(outcome.operator != DEFAULT for outcome in self.outcomes)
        lines = [f"{replaced} of {len(self.outcomes)} modules are operators of ours."]
        own = [i for i in self.unused if self.rules[i].source != "built-in"]
        lines += [f"unused: {self.rules[i].place} matched no module" for i in own]
        for i, by in self.shadowed.items():
            if self.rules[i].source != "built-in":
                earlier = ", ".join(self.rules[j].place for j in by)
                lines.append(f"shadowed: {self.rules[i].place}, all its modules went to {earlier}")
        return lines


def explain_rules(
    model_path: str | Path,
    rules_path: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    expert_format: str = "auto",
) -> RulesReport:
    """Report which rule takes which module; reads ``config.json`` and the rule file alone.

    Arguments as those of ``load_model``.

    Raises: as ``describe_model`` and ``load_rules``; a known operator without implementation
        here, or a module that an operator cannot take, is reported instead of raised.
    """
    checkpoint = open_checkpoint(model_path)
    model = build_skeleton(checkpoint.config)
    rules = load_rules(rules_path)
    spec = choose_dtype(checkpoint.spec, dtype)
    plan = plan_experts(spec, expert_format, device)
    table, outcomes = apply_rules(
        model,
        checkpoint.config,
        rules,
        device=device,
        experts=ExpertSettings(plan.weight_format, ThreadPool(1)),
        strict=False,
    )
    return RulesReport(
        spec.name,
        spec,
        rules,
        tuple(outcomes),
        table.unused,
        table.shadowed,
    )
