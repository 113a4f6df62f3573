"""The context of a model that transformers' own modules run, if it must be shorter than its own.

Some RoPEs take other angles for all positions once a sequence is longer than a certain length. A
cache object whose keys were rotated before that cannot be continued after it, so sequences end
there: at ``original_max_position_embeddings`` of a LongRoPE, at ``max_position_embeddings`` of a
dynamic one.
"""

from collections.abc import Iterator
from typing import Any

from tandem.core.model.plan import OWN_CONTEXT

__all__ = ["find_steady_context", "shrink_trained"]


def find_steady_context(config: Any, own: int) -> tuple[int, str]:
    """Return the tokens up to which a model's angles depend on positions alone, and why.

    Args:
        config: transformers' configuration.
        own: positions that the model knows.
    """
    found, reason = own, OWN_CONTEXT
    text = config.get_text_config(decoder=True)
    for rope in _list_ropes(getattr(text, "rope_parameters", None)):
        kind, length = rope.get("rope_type"), own
        if kind == "longrope":
            length = _find_original(rope, text) or own
        elif kind == "dynamic":
            length = getattr(text, "max_position_embeddings", None) or own
        if length < found:
            found = length
            reason = f"cut from {own}: beyond {length} its {kind} RoPE turns all positions "
            reason += "otherwise, which transformers' own modules do not do for cached keys"
    return found, reason


def shrink_trained(values: dict[str, Any], steady: int, crossed: int) -> None:
    """Shrink the lengths that a RoPE was trained for, in the values of a configuration, in place.

    Args:
        values: values of the configuration's fields.
        steady: length at which a RoPE turns all positions otherwise: served sequences end there,
            and so must a proof's.
        crossed: other lengths, beyond which served sequences go, and so must a proof's.
    """
    ropes = [*_list_ropes(values.get("rope_parameters"))]
    has_long = any(rope.get("rope_type") == "longrope" for rope in ropes)
    for rope in [*ropes, values]:
        if isinstance(rope.get(ORIGINAL), int):
            is_steady = rope.get("rope_type") == "longrope" or (rope is values and has_long)
            rope[ORIGINAL] = steady if is_steady else min(rope[ORIGINAL], crossed)
    if any(rope.get("rope_type") == "dynamic" for rope in ropes) and values.get(LONGEST):
        values[LONGEST] = steady


ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"


def _list_ropes(ropes: Any) -> Iterator[dict[str, Any]]:
    if isinstance(ropes, dict):
        nested = [value for value in ropes.values() if isinstance(value, dict)]
        yield from nested or [ropes]


def _find_original(rope: dict[str, Any], config: Any) -> int | None:
    return rope.get(ORIGINAL) or getattr(config, ORIGINAL, None)
