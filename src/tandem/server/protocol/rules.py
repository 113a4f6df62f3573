"""Rules for request bodies beyond the types of their fields, as JSON Schema.

Handlers check the same rules and name the field; these are for readers of ``/openapi.json``, both
people and programs. Rules that depend on the model's context are not here.
"""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ABORT",
    "CHAT",
    "COMPLETION",
    "DETOKENIZE",
    "EMBEDDING",
    "GENERATE",
    "MESSAGES",
    "RESPONSES",
    "TOKENIZE",
    "Rule",
]

Rule = Mapping[str, Any]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/TokenId"}}
"""Schema of a list of token ids; ``make_document`` defines TokenId, whose bound is the
vocabulary."""


def _list_of(item: Rule) -> Rule:
    return {"type": "array", "minItems": 1, "items": item}


def _given(name: str, value: Rule) -> Rule:
    """Return the JSON Schema that a field is present and its value satisfies ``value``."""
    return {"required": [name], "properties": {name: value}}


def _absent(name: str) -> Rule:
    """Return the JSON Schema that a field is null or left out."""
    return {"properties": {name: {"type": "null"}}}


_CONTENT = {
    "anyOf": [
        {"type": "string"},
        _list_of(
            {
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            }
        ),
    ]
}
_MESSAGES = _list_of(
    {
        # An assistant's message may have tool calls instead of content.
        "anyOf": [
            {"required": ["content"], "properties": {"content": _CONTENT}},
            {
                "required": ["tool_calls"],
                "properties": {
                    "tool_calls": _list_of({}),
                    "content": {"anyOf": [{"type": "null"}, _CONTENT]},
                },
            },
        ]
    }
)
_HAS_ONE_BEST = {
    # Answers are not ranked, so best_of must be 1 or absent; best_of equal to a larger n would mean
    # the same, but no client sends it.
    "anyOf": [
        _absent("best_of"),
        {"properties": {"best_of": {"const": 1}, "n": {"enum": [None, 1]}}},
    ]
}
_CAN_BE_ASKED = {
    "properties": {
        "modalities": {"items": {"const": "text"}},
    }
}
_HAS_ROOM = {
    # If a request has both max_completion_tokens and max_tokens, the newer max_completion_tokens
    # counts.
    "anyOf": [
        _given("max_completion_tokens", {"type": "integer", "minimum": 1}),
        {
            "allOf": [
                _absent("max_completion_tokens"),
                {"properties": {"max_tokens": {"not": {"const": 0}}}},
            ]
        },
    ]
}
_ONE_END = {
    # A request either continues the final message or begins an answer, so the two options exclude
    # each other.
    "anyOf": [
        {"properties": {"continue_final_message": {"enum": [None, False]}}},
        {"properties": {"add_generation_prompt": {"enum": [None, False]}}},
    ]
}
_HAS_LOGPROBS = {
    "anyOf": [
        {"properties": {"top_logprobs": {"enum": [None, 0]}}},
        _given("logprobs", {"const": True}),
    ]
}

CHAT: Rule = {
    "allOf": [
        _given("messages", _MESSAGES),
        _HAS_ONE_BEST,
        _CAN_BE_ASKED,
        _HAS_ROOM,
        _ONE_END,
        _HAS_LOGPROBS,
    ]
}
_BLOCKS = {"anyOf": [{"type": "string"}, _list_of({"properties": {"type": {"const": "text"}}})]}
MESSAGES: Rule = _given("messages", _list_of({"properties": {"content": _BLOCKS}}))
_ITEMS = _list_of(
    {
        "required": ["role", "content"],
        "properties": {
            "type": {"enum": ["message", None]},
            "role": {"type": "string"},
            "content": {"type": "string"},
        },
    }
)
RESPONSES: Rule = {
    "allOf": [
        _given("input", {"anyOf": [{"type": "string"}, _ITEMS]}),
        _absent("previous_response_id"),
        _absent("background"),
        {"properties": {"tools": {"type": ["array", "null"], "maxItems": 0}}},
        {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}},
    ]
}
COMPLETION: Rule = {
    "allOf": [
        _given("prompt", {"anyOf": [_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)]}),
        _HAS_ONE_BEST,
    ]
}
EMBEDDING: Rule = _given("input", {"anyOf": [_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)]})
GENERATE: Rule = {
    "oneOf": [
        {"allOf": [_given("text", {"anyOf": [_TEXT, _list_of(_TEXT)]}), _absent("input_ids")]},
        {"allOf": [_given("input_ids", {"anyOf": [_IDS, _list_of(_IDS)]}), _absent("text")]},
    ]
}
TOKENIZE: Rule = {
    "allOf": [
        {
            "oneOf": [
                {
                    "allOf": [
                        _given("prompt", {"type": ["string", "array"]}),
                        _absent("messages"),
                    ]
                },
                {"allOf": [_given("messages", _MESSAGES), _absent("prompt")]},
            ]
        },
        _ONE_END,
    ]
}
DETOKENIZE: Rule = _given(
    "tokens", {"anyOf": [{"type": "array", "maxItems": 0}, _IDS, _list_of({**_IDS, "minItems": 0})]}
)
ABORT: Rule = {
    "anyOf": [_given("rid", {"type": "string"}), _given("abort_all", {"const": True})],
}
