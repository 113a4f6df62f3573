"""Changes of single configuration fields on eager's side: the tiny model must notice each.

A proof that does not react to a field says nothing about it. So a model stays unproved if
transformers reads a field, the field is not known to be harmless, and changing it leaves the logits
within the bound.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from tandem.models.families import choose_auto_class
from tandem.models.identity import IGNORED_CONFIG
from tandem.models.proof.result import Flip
from tandem.models.proof.shrink import NUM_TOKENS
from tandem.models.proof.tiny import Reference, build_eager, run_eager

__all__ = ["HARMLESS", "OF_TRAINING", "flip_fields", "list_changes", "list_read_fields"]

HARMLESS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "max_position_embeddings": lambda values: True,
    "max_window_layers": lambda values: True,
    "enable_moe_fp32_combine": lambda values: True,
    "use_sliding_window": lambda values: True,
    "sliding_window": lambda values: not _slides(values),
    "layer_types": lambda values: not _slides(values),
    "sliding_window_pattern": lambda values: True,
    "head_dim": lambda values: "kv_lora_rank" in values,
    "mamba_chunk_size": lambda values: True,
    "chunk_size": lambda values: True,
    "use_mamba_kernels": lambda values: True,
    # The sparse mixer of Phi-3.5-MoE chooses two, whatever its class is told.
    "num_experts_per_tok": lambda values: (
        values.get("num_local_experts") == 0 or values.get("model_type") == "phimoe"
    ),
    "use_double_wide_mlp": lambda values: not values.get("num_kv_shared_layers"),
    "rope_parameters.truncate": lambda values: True,
    "topk_group": lambda values: values.get("topk_group") == values.get("n_group"),
    "n_group": lambda values: values.get("topk_group") == values.get("n_group"),
    "topk_method": lambda values: values.get("topk_group") == values.get("n_group"),
}
"""Fields that transformers reads but that may change nothing, each with the condition for this.

Length limits only size buffers, or matter to a dynamic RoPE; fields that say which layers slide are
summarised in ``layer_types``, which a saved configuration has; MLA derives ``head_dim`` from other
sizes; ``truncate`` may round to the same dimensions; chunk sizes only change the order of sums.
"""

OF_TRAINING = ("dropout", "pdrop", "jitter", "aux_loss", "z_loss", "initializer", "layerdrop")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
KEPT = {
    "architectures": "names the class",
    "model_type": "names the class",
    "tie_word_embeddings": "says where the head's weights come from: loading shows it",
    "vocab_size": "has a row of the embedding and the head for each token: loading shows it",
}
"""Configuration fields that the proof does not change, each with the reason."""
UNSET = "is not set: a configuration that sets it has a proof of its own"
NAMED = "is a name: a configuration with another has a proof of its own"
NAMES = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "rope_type": ("linear", "default"),
    "topk_method": ("greedy", "group_limited_greedy"),
}
"""Fields whose values are names, with other values to try."""
LAYER_KINDS = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
OF_LENGTH = ("dynamic", "longrope")
"""Types of RoPE that change with the length of the sequence."""
SMALL = 1e-9
"""Size up to which a number is no quantity but guards a division, which only larger ones show."""
SEARCHED = ("noticed", "structural", "unnoticed", "refused")
"""Outcomes of changed values in order of precedence; the search ends at a value that is noticed."""


def _slides(values: dict[str, Any]) -> bool:
    kinds = values.get("layer_types")
    return bool(values.get("sliding_window")) and (not kinds or "sliding_attention" in kinds)


def list_changes(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (field, description of the change, values of all fields) for each change of one
    configuration field whose effect on transformers' model is to be tried.
    """
    values: dict[str, Any] = config.to_dict()
    for field, value in sorted(values.items()):
        if field in IGNORED_CONFIG or field in KEPT:
            continue
        if any(word in field for word in OF_TRAINING):
            continue
        if isinstance(value, dict):
            yield from _change_nested(field, value, values)
            continue
        for changed in _list_values(field, value):
            yield field, f"{value!r} -> {changed!r}"[:80], {**values, field: changed}


def _change_nested(
    field: str, inner: dict[str, Any], values: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for key, value in sorted(inner.items()):
        if isinstance(value, dict):
            for name, what, changed in _change_nested(f"{field}.{key}", value, {}):
                yield name, what, {**values, field: {**inner, key: next(iter(changed.values()))}}
            continue
        for changed in _list_values(key, value):
            outer = field.rpartition(".")[2]
            changes = {**inner, key: changed}
            if key == "rope_type":
                changes.setdefault("factor", 2.0)
            made = {**values, outer: changes}
            yield f"{field}.{key}", f"{value!r} -> {changed!r}"[:80], made


def _list_values(field: str, value: Any) -> list[Any]:
    """Return other values of the same type that are tried for a configuration field in place of its
    own; empty if none is known.
    """
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in (value + 1, value // 2, 2 * value, 1) if v > 0 and v != value]
    if isinstance(value, float):
        # A guard of a division is told from a factor by a value that a divisor does not exceed.
        guard = [1.0] if 0 < value <= SMALL else []
        return [2 * value, value / 4, *guard] if value else [0.5]
    if field in ("short_factor", "long_factor") and isinstance(value, list):
        return [[2.0 * factor for factor in value]]
    if isinstance(value, str):
        return [name for name in NAMES.get(field, ()) if name != value][:2]
    if field == "layer_types" and isinstance(value, list):
        return [[LAYER_KINDS.get(value[0], value[0]), *value[1:]]]
    if field.endswith("_layers") and isinstance(value, list):
        # The field lists layer indices: toggle layer 0 or layer 1, since another field may already
        # cause one of the two changes.
        return [sorted({i} ^ set(value)) for i in (0, 1)]
    return []


def flip_fields(
    config: Any,
    state: dict[str, Tensor],
    references: tuple[Reference, ...],
    *,
    is_stepwise: bool,
    fields: frozenset[str] | None = None,
) -> tuple[Flip, ...]:
    """Change each field of a tiny configuration and run eager with the same weights.

    Args:
        config: configuration of the tiny model.
        state: its weights, float32.
        references: eager's results without a change; a change is noticed if one of them shows it.
        is_stepwise: as for ``run_eager``.
        fields: the fields to change; None: all.
    """
    values = config.to_dict()
    read = list_read_fields(config)
    outcomes: dict[str, Flip] = {}
    tried: dict[str, list[dict[str, Any]]] = {}
    for field, change, changed in list_changes(config):
        if fields is not None and field not in fields:
            continue
        found = outcomes.get(field)
        if found is not None and found.outcome in ("noticed", "structural"):
            continue
        outcome = _try_change(type(config), changed, state, references, is_stepwise)
        if outcome == "unnoticed":
            tried.setdefault(field, []).append(changed)
        if found is None or SEARCHED.index(outcome) < SEARCHED.index(found.outcome):
            outcomes[field] = Flip(field=field, change=change, outcome=outcome)
    for field, flip in outcomes.items():
        if flip.outcome == "unnoticed":
            is_harmless = HARMLESS.get(field)
            is_read = field.partition(".")[0] in read
            if not is_read or not _can_matter(config, field, tried[field]):
                outcomes[field] = replace(flip, outcome="unread")
            elif is_harmless is not None and is_harmless(values):
                outcomes[field] = replace(flip, outcome="harmless")
    names = {field.partition(".")[0] for field in outcomes}
    for field in sorted((read & values.keys()) - names - IGNORED_CONFIG.keys()):
        if not any(word in field for word in OF_TRAINING):
            outcomes[field] = Flip(field=field, change=_explain(field, values), outcome="kept")
    return tuple(outcomes.values())


def _explain(field: str, values: dict[str, Any]) -> str:
    """Return the reason why a configuration field was not changed when its effect was tried."""
    value = values[field]
    if field in KEPT:
        return KEPT[field]
    return UNSET if value is None or value == [] else NAMED


def _try_change(
    kind: Any,
    values: dict[str, Any],
    state: dict[str, Tensor],
    references: tuple[Reference, ...],
    is_stepwise: bool,
) -> Literal["noticed", "structural", "refused", "unnoticed"]:
    from transformers.initialization import no_init_weights

    try:
        config = kind.from_dict(deepcopy(values))
        with no_init_weights():
            model = build_eager(config)
    except Exception:  # noqa: BLE001 - transformers raises anything
        return "refused"
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        return "structural"
    model.load_state_dict(state)
    for reference in references:
        try:
            logits = run_eager(model, reference.tokens, is_stepwise=is_stepwise)
        except Exception:  # noqa: BLE001 - as above
            return "refused"
        if reference.find_excess(logits) > 1:
            return "noticed"
    return "unnoticed"


def _can_matter(config: Any, field: str, changes: list[dict[str, Any]]) -> bool:
    """Return True unless a field has no effect on what transformers' modules compute.

    A class reads some fields and ignores them, as others have precedence (the number of heads of
    each layer over that of all), and most ignore some fields of ``rope_parameters``, such as the
    rotated share of a head. Such a field leaves all modules as they are, and is not read while they
    run; of a RoPE, angles may differ that no layer asks for, as each has its own. A RoPE that
    changes with the length reads its fields while it runs.

    Args:
        config: configuration of the tiny model.
        field: the changed field.
        changes: the values of all fields, for each change that was tried.
    """
    made = [type(config).from_dict(deepcopy(values)) for values in changes]
    if all(other.to_dict() == config.to_dict() for other in made):
        return False  # The class sets the field from another one.
    outer = field.partition(".")[0]
    is_rope = outer == "rope_parameters"
    if is_rope and any(f"'{kind}'" in repr(config.rope_parameters) for kind in OF_LENGTH):
        return True
    ours = _describe_modules(config)
    changed = {
        place
        for theirs in map(_describe_modules, made)
        for place in ours.keys() | theirs.keys()
        if ours.get(place) != theirs.get(place)
    }
    fields, read = _list_run_reads(config)
    if is_rope:
        return bool(changed & read)
    return bool(changed) or outer in fields


CLASS = "class"
Place = tuple[str, str]
"""The name of a module, and that of one of its attributes or ``CLASS``."""


def _describe_modules(config: Any) -> dict[Place, str]:
    """Return the classes, attributes and non-weight buffers of a model's modules."""
    model = build_eager(config)
    stored = model.state_dict().keys()
    found: dict[Place, str] = {}
    for name, module in model.named_modules():
        found[name, CLASS] = type(module).__name__
        found |= {(name, attribute): value for attribute, value in _list_attributes(module)}
        for key, buffer in module.named_buffers(recurse=False):
            if f"{name}.{key}" not in stored:
                found[name, key] = str(buffer.tolist())
    return found


def _list_attributes(module: Any) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a module's own: numbers, strings, lists of them, and functions."""
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str, list, tuple)):
            yield name, str(value)
        elif callable(value):
            yield name, str(getattr(value, "__qualname__", type(value).__name__))


def list_read_fields(config: Any) -> set[str]:
    """Return the fields that transformers reads while it builds a model."""
    kind, read = type(config), set[str]()
    seen = _observe(config, read)
    seen.dtype = torch.float32
    with torch.device("meta"):
        model_class: Any = choose_auto_class(config)._model_mapping[kind]
        model_class(seen)
    return _add_aliases(kind, read)


def _list_run_reads(config: Any) -> tuple[set[str], set[Place]]:
    """Return the fields, and the places of a model's modules, that transformers reads while a model
    of a tiny configuration runs over a prompt and decodes.
    """
    fields, places = set[str](), set[Place]()
    model = build_eager(config)
    for name, module in [*model.named_modules()]:
        places.add((name, CLASS))
        if getattr(module, "config", None) is model.config and module is not model:
            module.config = _observe(config, fields)
        _observe_module(module, name, places)
    model.config = _observe(model.config, fields)
    tokens = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    run_eager(model, tokens)
    run_eager(model, tokens[:2], is_stepwise=True)
    return _add_aliases(type(config), fields), places


def _observe_module(module: Any, name: str, places: set[Place]) -> None:
    """Make a module add the names of attributes that are read to ``places``."""
    kind: Any = type(module)

    def note(self: Any, attribute: str) -> Any:
        places.add((name, attribute))
        return kind.__getattribute__(self, attribute)

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": note})


def _observe(config: Any, read: set[str]) -> Any:
    """Return a copy of a configuration that adds the names of fields that are read to ``read``."""
    kind: Any = type(config)

    def note(self: Any, name: str) -> Any:
        read.add(name)
        return kind.__getattribute__(self, name)

    seen = deepcopy(config)
    # The subclass keeps the name of its parent, because transformers looks classes up by name.
    object.__setattr__(seen, "__class__", type(kind.__name__, (kind,), {"__getattribute__": note}))
    return seen


def _add_aliases(kind: Any, read: set[str]) -> set[str]:
    aliases: dict[str, str] = getattr(kind, "attribute_map", {})
    return read | {aliases[name] for name in read if name in aliases}
