"""Rules that assign operators to a model's modules. Pure: text and names in, a table out.

The grammar is that of the KTransformers rule files::

    - match: {name: REGEX, class: CLASS}       # at least one; both must hold
      replace: {class: OPERATOR | default, kwargs: {...}}
      recursive: true | false                  # default true; false skips the module's children

Modules are visited depth first and the first rule that matches wins. ``name`` is searched (not
anchored) in the dotted module path; ``class`` is the import path of the module's class or of one of
its bases. Classes are only compared here, never imported.

Bounds: a file may come from anywhere, so its size, number of rules, nesting and regular expressions
are limited; an expression that could backtrack exponentially is refused.
"""

import re
from typing import Any, cast

import msgspec
import yaml

from tandem.core.config import YamlLoader
from tandem.core.errors import ConfigError

__all__ = ["Assignment", "ModuleInfo", "Rule", "RuleTable", "assign_rules", "parse_rules"]

MAX_FILE_BYTES = 1 << 20
MAX_RULES = 1000
MAX_PATTERN_LEN = 1000
MAX_REPEATS = 4
"""Most unbounded repeats in a pattern: matching takes at most the name's length to this power."""
MAX_NODES = 20_000
MAX_NODE_DEPTH = 6

DEFAULT = "default"
"""Operator name that leaves a module unchanged."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A placement rule (which operator replaces which modules), as read from a rule file and
    checked.
    """

    name: str | None = None
    """Regular expression that is searched in a module's dotted path; None: any path."""
    class_name: str | None = None
    """Import path or bare name of a module class that the rule applies to; None: any class."""
    operator: str = DEFAULT
    """Name of the operator that replaces the module, as written in the file; it is looked up when
    rules are applied.
    """
    kwargs: dict[str, Any] = {}
    recursive: bool = True
    source: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """Place of the rule as ``file:line``, for messages."""
        return f"{self.source}:{self.line}"


class ModuleInfo(msgspec.Struct, frozen=True):
    """Name and classes of a module, without the module itself."""

    name: str
    class_path: str
    bases: tuple[str, ...] = ()
    """Import paths of all base classes, nearest first."""


class Assignment(msgspec.Struct, frozen=True):
    """The placement rule that applies to one module, if any, or has skipped it."""

    module: ModuleInfo
    rule: int | None = None
    """Index of the rule that matched first; None if none did."""
    skipped_by: int | None = None
    """Index of the rule that skipped this module: one with ``recursive: false`` on a parent; None:
    none did."""


class RuleTable(msgspec.Struct, frozen=True):
    """The result of applying placement rules: one assignment for each module, in visiting order,
    and the rules without effect.
    """

    rules: tuple[Rule, ...]
    assignments: tuple[Assignment, ...]
    unused: tuple[int, ...]
    """Indices of rules that match no module."""
    shadowed: dict[int, tuple[int, ...]]
    """Rules that match modules but are never first, each with the rules that were."""

    def operator_of(self, module_name: str) -> str:
        """Return the name of the operator that the rules assign to a module, as written in the
        file; ``default`` if no rule matched.
        """
        for assignment in self.assignments:
            if assignment.module.name == module_name and assignment.rule is not None:
                return self.rules[assignment.rule].operator
        return DEFAULT


def parse_rules(text: str, source: str) -> tuple[Rule, ...]:
    """Parse a rule file.

    Args:
        text: the file's contents.
        source: the file's name, for messages.

    Raises:
        ConfigError: invalid YAML or grammar, or a bound is exceeded; the text has file, line and
            field.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError("placement.parse_rules", f"{source}: over {MAX_FILE_BYTES} characters")
    loader = YamlLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return ()
        _check_nodes(root, source)
        return _parse_root(loader, root, source)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 0
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            "placement.parse_rules", f"{source}:{line}: not YAML: {problem}"
        ) from error
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]


def _error(source: str, node: yaml.Node, what: str, field: str | None = None) -> ConfigError:
    place = f"{source}:{node.start_mark.line + 1}"
    return ConfigError("placement.parse_rules", f"{place}: {what}", field=field)


def _check_nodes(root: yaml.Node, source: str) -> None:
    """Check that the YAML tree of a rule file is small, before values are built of it; an alias
    counts each time it is used.
    """
    stack, seen = [(root, 0)], 0
    while stack:
        node, depth = stack.pop()
        seen += 1
        if seen > MAX_NODES or depth > MAX_NODE_DEPTH:
            raise _error(source, node, f"over {MAX_NODES} values or {MAX_NODE_DEPTH} levels deep")
        if isinstance(node, yaml.SequenceNode):
            stack += [(child, depth + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            stack += [(child, depth + 1) for pair in node.value for child in pair]


def _parse_root(loader: YamlLoader, root: yaml.Node, source: str) -> tuple[Rule, ...]:
    if not isinstance(root, yaml.SequenceNode):
        raise _error(source, root, "a rule file is a list of rules, each starting with `- match:`")
    if len(root.value) > MAX_RULES:
        raise _error(source, root, f"{len(root.value)} rules, more than {MAX_RULES}")
    return tuple(_parse_rule(loader, node, source, f"[{i}]") for i, node in enumerate(root.value))


def _fields(
    node: yaml.Node, source: str, field: str, allowed: tuple[str, ...]
) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise _error(source, node, f"{field} must be a mapping of {', '.join(allowed)}", field)
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = key.value
        if name not in allowed:
            raise _error(source, key, f"{field}: unknown key {name!r}, use {allowed}", field)
        if name in fields:
            raise _error(source, key, f"{field}: {name!r} is given twice", field)
        fields[name] = value
    return fields


def _parse_text(node: yaml.Node, source: str, field: str) -> str:
    is_text = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
    if not is_text or not node.value or len(node.value) > MAX_PATTERN_LEN:
        raise _error(source, node, f"{field} must be a text of 1 to {MAX_PATTERN_LEN}", field)
    return node.value


def _construct(loader: YamlLoader, node: yaml.Node) -> object:
    # PyYAML's type stubs leave construct_object untyped, hence the cast.
    return cast("object", loader.construct_object(node, deep=True))


def _parse_kwargs(loader: YamlLoader, node: yaml.Node, source: str, field: str) -> dict[str, Any]:
    value = _construct(loader, node)
    if value is None:
        return {}
    if isinstance(value, dict):
        kwargs = cast("dict[object, Any]", value)
        if all(isinstance(key, str) for key in kwargs):
            return cast("dict[str, Any]", kwargs)
    raise _error(source, node, f"{field} must be a mapping with names as keys", field)


def _parse_rule(loader: YamlLoader, node: yaml.Node, source: str, field: str) -> Rule:
    fields = _fields(node, source, field, ("match", "replace", "recursive"))
    for required in ("match", "replace"):
        if required not in fields:
            raise _error(source, node, f"{field} has no `{required}`", f"{field}.{required}")
    match = _fields(fields["match"], source, f"{field}.match", ("name", "class"))
    if not match:
        raise _error(source, fields["match"], f"{field}.match needs `name` or `class`")
    texts = {
        key: _parse_text(value, source, f"{field}.match.{key}") for key, value in match.items()
    }
    if "name" in texts:
        _check_pattern(texts["name"], match["name"], source, f"{field}.match.name")
    replace = _fields(fields["replace"], source, f"{field}.replace", ("class", "kwargs"))
    operator = DEFAULT
    if "class" in replace:
        operator = _parse_text(replace["class"], source, f"{field}.replace.class")
    kwargs: dict[str, Any] = {}
    if "kwargs" in replace:
        kwargs = _parse_kwargs(loader, replace["kwargs"], source, f"{field}.replace.kwargs")
    recursive = True
    if "recursive" in fields:
        recursive = _construct(loader, fields["recursive"])
        if not isinstance(recursive, bool):
            raise _error(source, fields["recursive"], f"{field}.recursive must be true or false")
    return Rule(
        name=texts.get("name"),
        class_name=texts.get("class"),
        operator=operator,
        kwargs=kwargs,
        recursive=recursive,
        source=source,
        line=node.start_mark.line + 1,
    )


def _check_pattern(pattern: str, node: yaml.Node, source: str, field: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise _error(
            source, node, f"{field} is not a regular expression: {error}", field
        ) from error
    count, is_nested = _count_repeats(pattern)
    if is_nested or count > MAX_REPEATS:
        what = "a repeat within a repeat, as in (a+)+" if is_nested else f"{count} repeats"
        raise _error(source, node, f"{field}: {what}, can take for ever: write it flat", field)


_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _count_repeats(pattern: str) -> tuple[int, bool]:
    """Return (number of unbounded repeats in a valid pattern, True if one contains another).

    Nested repeats backtrack exponentially, others polynomially in their number.
    """
    count, is_nested = 0, False
    groups = [False]
    position = 0
    while position < len(pattern):
        atom = cast("re.Match[str]", _CHARACTER.match(pattern, position)).group()
        position += len(atom)
        if atom == "(":
            groups.append(False)
            continue
        holds_repeat = groups.pop() if atom == ")" else False
        is_repeated = _UNBOUNDED.match(pattern, position) is not None
        count += is_repeated
        is_nested = is_nested or (is_repeated and holds_repeat)
        groups[-1] = groups[-1] or holds_repeat or is_repeated
    return count, is_nested


def _matches(rule: Rule, pattern: re.Pattern[str] | None, module: ModuleInfo) -> bool:
    if pattern is not None and not pattern.search(module.name):
        return False
    return rule.class_name is None or _is_class(rule.class_name, module)


def _is_class(wanted: str, module: ModuleInfo) -> bool:
    """Compare import paths; a bare name, or a KTransformers path, by its last part.

    KTransformers ships copies of transformers' modeling files, and its rules name the classes in
    those copies; here the class of the same name is meant, ignoring case: its DeepseekV2MoE is
    DeepseekV2Moe in transformers.
    """
    paths = (module.class_path, *module.bases)
    if "." in wanted and not wanted.startswith("ktransformers."):
        # A class is also compared by the path that it is imported from: torch.nn.Linear is defined
        # in torch.nn.modules.linear.
        return wanted in paths or wanted in [_public_path(path) for path in paths]
    last = wanted.rpartition(".")[2]
    names = [path.rpartition(".")[2] for path in paths]
    if "." in wanted:
        return last.lower() in [name.lower() for name in names]
    return last in names


def _public_path(path: str) -> str:
    package, _, name = path.rpartition(".")
    return f"torch.nn.{name}" if package.startswith("torch.nn.modules.") else path


def assign_rules(modules: list[ModuleInfo], rules: tuple[Rule, ...]) -> RuleTable:
    """Find the first matching rule of each module.

    Args:
        modules: depth first, parents before children; names are dotted paths.
        rules: in order of precedence.
    """
    patterns = [None if rule.name is None else re.compile(rule.name) for rule in rules]
    assignments: list[Assignment] = []
    losers: dict[int, set[int]] = {}
    winners: set[int] = set()
    stop_prefix, stop_rule = None, None
    for module in modules:
        if stop_prefix is not None and module.name.startswith(stop_prefix):
            assignments.append(Assignment(module, None, stop_rule))
            continue
        stop_prefix = stop_rule = None
        fits = [i for i, rule in enumerate(rules) if _matches(rule, patterns[i], module)]
        if not fits:
            assignments.append(Assignment(module))
            continue
        winner = fits[0]
        winners.add(winner)
        for loser in fits[1:]:
            losers.setdefault(loser, set()).add(winner)
        assignments.append(Assignment(module, winner))
        if not rules[winner].recursive:
            stop_prefix, stop_rule = f"{module.name}.", winner
    never = [i for i in range(len(rules)) if i not in winners]
    return RuleTable(
        rules=rules,
        assignments=tuple(assignments),
        unused=tuple(i for i in never if i not in losers),
        shadowed={i: tuple(sorted(losers[i])) for i in never if i in losers},
    )
