"""Goal: a schema written in other keywords allows the same values, or says of which fewer.

Method: random schemas of all keywords and random values; ``jsonschema`` is the judge of both the
schema and what it becomes. Patterns are those on which its regular expressions agree with ours.
"""

import json
import random
import re
from collections import Counter

import jsonschema
import pytest
from vocabularies import make_byte_level_tokenizer

from tandem.models.tokenizing.grammars import (
    find_fault,
    list_vocabulary,
    make_matcher,
    make_token_table,
    write_grammar,
)
from tandem.models.tokenizing.schemas.rewrite import RefusedError, rewrite_schema

VALUES = [
    None, True, False, 0, 1, 2, -1, 1.5, "", "a", "ab", "abc", "b", [], [1], [1, 2], ["a", 1],
    [1, 1], [None, "a", 2], {}, {"a": 1}, {"a": "x", "b": 2}, {"b": None}, {"a": 1, "b": 1, "c": 1},
]  # fmt: skip
NAMES = ["a", "b", "c"]
BOUNDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
LEAVES = (
    "type", "const", "enum", "multipleOf", "pattern", "required", "uniqueItems",
    "dependentRequired", *BOUNDS,
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "dependentSchemas", "patternProperties")
PARTS = (
    "additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def make_value(chance: random.Random, depth: int = 2):
    kind = chance.randrange(8) if depth else 7
    if kind == 0:
        return [make_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind < 3:
        names = chance.sample([*NAMES, "ab", "z"], chance.randrange(4))
        return {name: make_value(chance, depth - 1) for name in names}
    return chance.choice(VALUES)


def make_leaf(chance: random.Random, keyword: str):
    if keyword in BOUNDS:
        return chance.randrange(3)
    match keyword:
        case "type":
            kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
            return chance.choice([chance.choice(kinds), chance.sample(kinds, 2)])
        case "const":
            return chance.choice(VALUES)
        case "enum":
            return chance.sample(VALUES, chance.randrange(1, 5))
        case "multipleOf":
            return chance.choice([1, 2, 0.5])
        case "pattern":
            return chance.choice(["^a", "b$", "^[a-c]+$"])
        case "required":
            return chance.sample(NAMES, chance.randrange(3))
        case "uniqueItems":
            return chance.random() < 0.7
        case _:
            return {chance.choice(NAMES): [chance.choice(NAMES)]}


def make_schema(chance: random.Random, depth: int = 3):
    if chance.random() < 0.06:
        return chance.choice([True, False])
    schema: dict = {}
    for _ in range(chance.randrange(1, 5)):
        kinds = [LEAVES, LISTS, MAPS, PARTS, PARTS, ("$ref",)] if depth else [LEAVES]
        keyword = chance.choice(chance.choice(kinds))
        if keyword in LEAVES:
            schema[keyword] = make_leaf(chance, keyword)
        elif keyword in LISTS:
            parts = [make_schema(chance, depth - 1) for _ in range(chance.randrange(1, 4))]
            schema[keyword] = parts
        elif keyword in MAPS:
            names = ["^a", "b$"] if keyword == "patternProperties" else NAMES
            chosen = chance.sample(names, chance.randrange(1, 3))
            schema[keyword] = {name: make_schema(chance, depth - 1) for name in chosen}
        elif keyword == "$ref":
            schema[keyword] = chance.choice(["#/$defs/x", "#/$defs/y"])
        else:
            schema[keyword] = make_schema(chance, depth - 1)
    return schema


def check_seeds(seeds) -> Counter:
    """Compare verdicts of random values; return how many schemas were exact, narrow, refused."""
    seen: Counter = Counter()
    for seed in seeds:
        chance = random.Random(seed)
        schema = {"allOf": [make_schema(chance)]}
        schema["$defs"] = {"x": make_schema(chance, 2), "y": make_schema(chance, 1)}
        try:
            written, narrowed = rewrite_schema(schema, matches)
        except RefusedError as error:
            seen[f"refused: {error.keyword}"] += 1
            continue
        seen["narrow" if narrowed else "exact"] += 1
        jsonschema.Draft202012Validator.check_schema(written)
        judge = jsonschema.Draft202012Validator(schema)
        ours = jsonschema.Draft202012Validator(written)
        for _ in range(40):
            value = make_value(chance)
            try:
                is_valid = judge.is_valid(value)
            except RecursionError:
                # A schema that refers to itself at one place means nothing.
                seen["endless"] += 1
                break
            is_allowed = ours.is_valid(value)
            assert is_valid or not is_allowed, (seed, value, schema, written)
            assert is_allowed or not is_valid or narrowed, (seed, value, schema, written)
    return seen


def test_random_schemas_mean_the_same():
    seen = check_seeds(range(40))
    assert seen["exact"] >= 12, seen


@pytest.mark.slow
def test_thousands_of_random_schemas_mean_the_same():
    seen = check_seeds(range(1000, 4000))
    print(dict(seen))
    assert seen["exact"] >= 1000, seen


@pytest.fixture(scope="module")
def table():
    tokenizer = make_byte_level_tokenizer()
    return make_token_table(list_vocabulary(tokenizer, tokenizer.vocab_size, [0]), tokenizer)


CLOSED = {
    "allOf": [{"properties": {"kind": {"enum": ["car", "bike"]}}, "required": ["kind"]}],
    "if": {"properties": {"kind": {"const": "car"}}},
    "then": {"properties": {"doors": {"type": "integer"}}, "required": ["doors"]},
    "type": "object",
    "unevaluatedProperties": False,
}
TREE = {
    "$id": "https://x.test/strict",
    "$dynamicAnchor": "node",
    "$ref": "tree",
    "unevaluatedProperties": False,
    "$defs": {
        "tree": {
            "$id": "https://x.test/tree",
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
        }
    },
}
COUNTED = {"type": "array", "contains": {"const": 1}, "maxContains": 1, "maxItems": 3}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (CLOSED, [{"kind": "bike"}, {"kind": "car", "doors": 3}], [{"kind": "car"}, {"doors": 3}]),
        (CLOSED, [], [{"kind": "bike", "doors": 3}, {"kind": "bike", "x": 1}]),
        (TREE, [{}, {"children": [{"children": []}]}], [{"x": 1}, {"children": [{"x": 1}]}]),
        (COUNTED, [[1], [2, 1], [2, 3, 1]], [[], [2], [1, 1], [1, 2, 3, 4]]),
        (
            {"type": "string", "not": {"enum": ["", "ab", "a\n"]}},
            ["a", "b", "abc", "a\r"],
            ["", "ab", "a\n", 1],
        ),
        ({"propertyNames": {"pattern": "^x"}}, [{}, {"x1": 2}, 3], [{"y": 1}]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
         [[], [True, False]], [[True, True], [1]]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}},
         [{}, {"b": 1}, {"b": 1, "a": 1}], [{"a": 1}]),
        ({"type": "array", "dependentSchemas": {"c": {"items": {}}},
          "unevaluatedItems": {"type": "boolean"}}, [[], [True]], [[1]]),
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"oneOf": [{"type": "number", "minimum": 3}, {"multipleOf": 1, "maximum": 9}]},
         [1, 12], [4]),
        ({"format": "iri-reference"}, [1, "any text"], []),
    ],
)  # fmt: skip
def test_the_grammar_of_what_is_rewritten(table, schema, valid, invalid):
    """What a model may write under keywords that the library itself refuses."""
    tokenizer = make_byte_level_tokenizer()
    grammar = write_grammar("json_schema", json.dumps(schema))
    assert find_fault(table, grammar) == ""
    for values, is_valid in ((valid, True), (invalid, False)):
        for value in values:
            ids = tokenizer.encode(json.dumps(value))
            matcher = make_matcher(table, grammar)
            is_taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_taken is is_valid, value


def test_narrower_schemas_say_so():
    """An item that is found among the first only; numbers that are no integers."""
    assert rewrite_schema({"contains": {"const": 1}}, matches).narrowed == ("contains",)
    assert rewrite_schema({"not": {"type": "integer"}}, matches).narrowed == ("type",)
    assert rewrite_schema({"not": {"type": "string"}}, matches).narrowed == ()


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"$ref": "http://localhost/x.json"}, "$ref"),
        ({"$ref": "#/$defs/nothing"}, "$ref"),
        ({"$defs": {"x": {"not": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}, "$ref"),
        ({"$schema": "http://json-schema.org/draft-04/schema"}, "$schema"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"pattern": "a"}}, "pattern"),
        ({"minItems": -1}, "minItems"),
        ({"type": "thing"}, "type"),
        ({"required": [1]}, "required"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": False}}, "propertyNames"),
        ({"minContains": 40, "contains": {"const": 1}}, "contains"),
        # Bounded, however many alternatives there are.
        (
            {"allOf": [{"anyOf": [{"required": [f"{a}{i}"]} for a in "ab"]} for i in range(40)]},
            "anyOf",
        ),
        ({"not": {"const": "x" * 101}}, "enum"),
        (json.loads('{"not":' * 300 + "{}" + "}" * 300), "$defs"),
        ({"allOf": [{"minimum": 1}] * 3000}, "$defs"),
    ],
)
def test_what_is_refused_is_refused_by_keyword(schema, keyword):
    with pytest.raises(RefusedError) as caught:
        rewrite_schema(schema, matches)
    assert caught.value.keyword == keyword
