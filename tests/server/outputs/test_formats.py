"""Each form of tool calls and reasoning is read, however its text is cut.

Method: texts as the models' templates write them, with the parts that they stand for. Each is read
whole, character by character, and cut in two at every place; the joined deltas must be the same.
"""

import json
import random
import re

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import make_byte_level_tokenizer

from tandem.models.tokenizing.grammars import (
    find_fault,
    list_vocabulary,
    make_matcher,
    make_token_table,
    write_grammar,
)
from tandem.models.tokenizing.schemas.arguments import Arguments
from tandem.models.tokenizing.schemas.formats import FORMAT_PATTERNS
from tandem.models.tokenizing.schemas.kinds import find_kinds, list_names
from tandem.models.tokenizing.schemas.patterns import anchor_pattern
from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.server.api.grammars import write_literal
from tandem.server.outputs.deltas import (
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
    join_deltas,
)
from tandem.server.outputs.formats import FORMATS, detect_format
from tandem.server.outputs.parameters import write_json_value
from tandem.server.outputs.parser import FormatParser
from tandem.server.outputs.writing import WRITTEN_CALLS, write_calls


def split(schema):
    return msgspec.json.decode(write_grammar("arguments", json.dumps(schema)), type=list[Arguments])


TOOLS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"type": "array"},
            "d": {"type": ["string", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
    "say": {
        "$ref": "#/$defs/call",
        "$defs": {
            "text": {"type": "string"},
            "call": {
                "anyOf": [
                    {
                        "properties": {
                            "text": {"$ref": "#/$defs/text"},
                            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                            "kind": {"enum": ["1", "x"]},
                            "code": {"const": "12"},
                            "count": {"type": "integer"},
                            "size": {"type": ["number", "null"]},
                            "data": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "array"}]},
                        }
                    },
                    {"properties": {"text": {"$ref": "#/$defs/text"}}},
                ]
            },
        },
    },
}


def read(form, pieces, *, tools=TOOLS, is_cut=False, **options):
    parser = FormatParser(FORMATS[form], tools, **options)
    deltas = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return join_deltas(deltas + parser.flush(is_cut=is_cut))


def summarize(deltas):
    """Return text, reasoning and the calls as (name, arguments)."""
    text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.call == len(calls)
            calls.append([delta.name, ""])
        elif isinstance(delta, ArgumentsDelta):
            calls[delta.call][1] += delta.text
    return text, reasoning, calls


def check_cuts(form, text, **options):
    """Read a text in all ways; return what it stands for."""
    whole = read(form, [text], **options)
    assert read(form, list(text), **options) == whole
    for position in range(len(text)):
        assert read(form, [text[:position], text[position:]], **options) == whole, position
    return whole


NASTY = 'x </tool_call> "quoted" \\ line\n  end 😀'
NASTY_JSON = json.dumps(NASTY, ensure_ascii=False)
SAMPLES = {
    "qwen": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": %s}}\n</tool_call>'.replace(
            "%s", NASTY_JSON
        ),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n%s\n"
        "</parameter>\n</function>\n</tool_call>".replace("%s", NASTY),
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ],
    "glm": [
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>%s</arg_value>\n</tool_call>".replace("%s", NASTY),
        "<tool_call>now\n</tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">%s</parameter>\n</invoke>'.replace("%s", NASTY),
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" '
        'string="false">1</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">%s'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>".replace("%s", NASTY),
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": %s}\n```<｜tool▁call▁end｜>'.replace("%s", NASTY_JSON),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 1, "b": %s}<｜tool▁call▁end｜>'.replace("%s", NASTY_JSON),
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1, "b": %s}<|tool_call_end|>'.replace("%s", NASTY_JSON),
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ],
    "gemma4": [
        '<|tool_call>call:add{a:1,b:<|"|>%s<|"|>}<tool_call|>'.replace("%s", NASTY),
        "<|tool_call>call:now{}<tool_call|>",
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": %s}}, '.replace("%s", NASTY_JSON),
        '{"name": "now", "arguments": {}}]',
    ],
    "llama3": [
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": %s}}; '.replace(
            "%s", NASTY_JSON
        ),
        '{"name": "now", "parameters": {}}',
    ],
}
THINK = {"gemma4": ("<|channel>thought\n", "<channel|>"), "mistral": ("[THINK]", "[/THINK]")}


@pytest.mark.parametrize("form", SAMPLES)
def test_text_reasoning_and_two_calls(form):
    begin, end = THINK.get(form, ("<think>", "</think>"))
    text = f"{begin}\nI think.\n{end}\n\nHere it is:\n\n" + "\n".join(SAMPLES[form])
    said, reasoning, calls = summarize(check_cuts(form, text))
    assert said == "Here it is:"
    assert reasoning == "I think."
    assert [name for name, _ in calls] == ["add", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [{"a": 1, "b": NASTY}, {}]


@pytest.mark.parametrize("form", SAMPLES)
def test_call_in_reasoning_that_does_not_end_is_found(form):
    text = "Let me see.\n" + "\n".join(SAMPLES[form])
    said, reasoning, calls = summarize(check_cuts(form, text, is_thinking=True))
    assert said == ""
    assert reasoning == "Let me see."
    assert [name for name, _ in calls] == ["add", "now"]


@pytest.mark.parametrize("form", SAMPLES)
def test_no_cut_of_a_call_loses_it(form):
    """As max_tokens cuts it: what came is text, or a call with the arguments that came."""
    text = SAMPLES[form][0]
    for end in range(1, len(text)):
        deltas = read(form, [text[:end]], is_cut=True)
        said, _, calls = summarize(deltas)
        if calls:
            assert calls[0][0] == "add"
            assert said == ""
        else:
            # The marks around calls say nothing; all else is there.
            marks = FORMATS[form].skipped
            left = text[:end]
            for mark in marks:
                left = left.removeprefix(mark)
            assert said.strip() == left.strip()


@pytest.mark.parametrize("form", SAMPLES)
def test_without_tools_calls_are_text(form):
    text = "\n".join(SAMPLES[form])
    said, _, calls = summarize(check_cuts(form, text, tools=None))
    assert said == text
    assert calls == []


HARMONY = (
    "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Here it is:<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": %s}<|call|>'.replace("%s", NASTY_JSON)
)


def test_harmony():
    said, reasoning, calls = summarize(check_cuts("harmony", HARMONY))
    assert (said, reasoning) == ("Here it is:", "I think.")
    assert [(name, json.loads(text)) for name, text in calls] == [("add", {"a": 1, "b": NASTY})]
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert summarize(check_cuts("harmony", final + "Hello\n")) == ("Hello\n", "Hm.", [])
    role = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
    assert summarize(check_cuts("harmony", role)) == ("", "", [["now", "{}"]])
    plain = '{"no": "channels"}'
    assert summarize(check_cuts("harmony", plain)) == (plain, "", [])


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        # Members in another order, arguments as a string, none at all.
        (
            "qwen",
            '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
            "",
            [["add", '{"a": 1}']],
        ),
        (
            "qwen",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [["add", '{"a": 1}']],
        ),
        ("qwen", '<tool_call>{"name": "now"}</tool_call> bye', "bye", [["now", "{}"]]),
        # A brace too few: the mark ends the call.
        (
            "qwen",
            '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> bye',
            "bye",
            [["add", '{"a": 1}']],
        ),
        ("qwen", "<tool_call>\nnot a call\n</tool_call>", None, []),
        ("qwen", '<tool_call>{"nome": "add"}</tool_call>', None, []),
        ("qwen", '<tool_call>{"name": "add", "arguments": }</tool_call>', None, []),
        ("qwen", "a < b <tool", None, []),
        # The other form of the family, and one without its outer mark.
        (
            "qwen",
            "<tool_call><function=add><parameter=a>2</parameter></function></tool_call>",
            "",
            [["add", '{"a": 2}']],
        ),
        (
            "qwen_xml",
            "<function=add>\n<parameter=c>\n[1, 2]\n</parameter>\n</function>",
            "",
            [["add", '{"c": [1, 2]}']],
        ),
        (
            "qwen_xml",
            "<function=add><parameter=d>12</parameter><parameter=e>12</parameter></function>",
            "",
            [["add", '{"d": "12", "e": 12}']],
        ),
        (
            "qwen_xml",
            "<function=add><parameter=d>null</parameter><parameter=a>x</parameter></function>",
            "",
            [["add", '{"d": null, "a": "x"}']],
        ),
        ("glm", "<tool_call>now</tool_call>", "", [["now", "{}"]]),
        (
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
            "",
            [["add", '{"a": 1}'], ["now", "{}"]],
        ),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        (
            "llama3",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
            "",
            [["add", '{"a": 1}'], ["now", "{}"]],
        ),
        ("llama3", '{"name": "Bob", "parameters": {"a": 1}} is JSON', None, []),
        ("llama3", '{"answer": 42}', None, []),
        ("gemma4", "<|tool_call>call:add{a:[1,{b:true}],c}<tool_call|>", "", None),
        (
            "gemma4",
            '<|tool_call>call:add{c:[1,-2.5,<|"|>x<|"|>],d:{e:null}}<tool_call|>',
            "",
            [["add", '{"c": [1, -2.5, "x"], "d": {"e": null}}']],
        ),
    ],
)
def test_unusual_calls(form, text, said, calls):
    found = summarize(check_cuts(form, text))
    assert found[0] == (text if said is None else said)
    if calls is not None:
        assert found[2] == calls
    else:
        assert "c}" in found[2][0][1]


SAID = {
    "text": ("12", "12"),
    "maybe": ('"quoted"', '"quoted"'),
    "kind": ("1", "1"),
    "code": ("12", "12"),
    "count": ("12345678901234567890", 12345678901234567890),
    "data": ("[1, 2]", [1, 2]),
    "other": ("1.50", 1.5),
}
"""Arguments of ``say`` as they are written without marks of their type, and what they are."""


@pytest.mark.parametrize("form", ["qwen_xml", "glm", "minimax_m2"])
def test_arguments_have_the_types_of_the_schema_wherever_it_tells_them(form):
    written = WRITTEN_CALLS[form]
    arguments = [(name, text) for name, (text, _) in SAID.items()]
    arguments += [("maybe", "null"), ("size", ""), ("count", ""), ("size", "1e999")]
    text = written.begin + written.head.replace("{name}", "say")
    for name, value in arguments:
        text += written.key.replace("{key}", name) + value + written.value_end
    said, _, [[name, found]] = summarize(check_cuts(form, text + written.tail + written.end))
    assert (said, name) == ("", "say")
    pairs = json.loads(found, object_pairs_hook=list, parse_float=str)
    expected = [(name, value) for name, (_, value) in SAID.items()]
    expected[-1] = ("other", "1.50")
    # An empty argument that is no text is null, or left out; a number keeps its digits.
    assert pairs == [*expected, ("maybe", None), ("size", None), ("size", "1e999")]


@pytest.mark.parametrize(
    ("form", "opened", "mark", "closed"),
    [
        ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=b>\n", "</parameter>",
         "\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>", "</arg_value>",
         "</arg_value>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="b">',
         "</parameter>", "</parameter>\n</invoke>\n</minimax:tool_call>"),
    ],
)  # fmt: skip
def test_an_argument_may_contain_its_own_closing_mark(form, opened, mark, closed):
    """Files about such formats are written whole; a mark that is only repeated is none of it."""
    text = f"it ends with {mark} here, <p>{mark}</p>"
    (call,) = summarize(check_cuts(form, opened + text + closed))[2]
    assert json.loads(call[1]) == {"b": text}
    (call,) = summarize(check_cuts(form, opened + "x" + mark + closed))[2]
    assert json.loads(call[1]) == {"b": "x"}


def test_lists_and_objects_may_be_written_as_python_writes_them():
    """Where the tool's schema wants one; what Python alone has, and what is no literal, is text."""
    both = frozenset({"array", "object"})
    for text, kinds, wanted in (
        ("{'a': None, 'b': [True, 'x\"y']}", both, {"a": None, "b": [True, 'x"y']}),
        ("('a', 1)", both, ["a", 1]),
        ("{'a': 1}", both | {"string"}, "{'a': 1}"),
        ("{'a': 1}", None, "{'a': 1}"),
        ("{1, 2}", both, "{1, 2}"),
        ("{'a': 1e999}", both, "{'a': 1e999}"),
        ("[b'x']", both, "[b'x']"),
        ("[open('x')]", both, "[open('x')]"),
        ("'abc'", both, "'abc'"),
        ("[" * 9999, both, "[" * 9999),
        ("{'a': '\\d'}", both, {"a": "\\d"}),
    ):
        assert json.loads(write_json_value(text, kinds)) == wanted, text


def test_marked_arguments_are_what_their_marks_say():
    """DeepSeek and Gemma mark text; what they write without a mark is JSON."""
    dsml = "".join(
        f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for name, is_text, value in (
            ("maybe", "false", '"x"'), ("maybe", "true", "null"), ("size", "false", "1e999"),
            ("count", "false", ""), ("text", "false", "12"), ("data", "false", "12"),
        )
    )  # fmt: skip
    text = f'<｜DSML｜invoke name="say">\n{dsml}</｜DSML｜invoke>'
    found = summarize(check_cuts("deepseek_v32", text))[2]
    assert found == [
        ["say", '{"maybe": "x", "maybe": "null", "size": 1e999, "text": "12", "data": "12"}']
    ]
    text = (
        '<|tool_call>call:say{maybe:<|"|>x<|"|>,size:1e999,count:,code:12,data:[1.50,]}<tool_call|>'
    )
    found = summarize(check_cuts("gemma4", text))[2]
    assert found == [["say", '{"maybe": "x", "size": 1e999, "code": "12", "data": [1.50]}']]


CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
ONE, EMPTY = ["add", '{"a": 1}'], ["now", "{}"]
BOTH = ["add", '{"a": 1, "b": "x"}']


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        # </function>, </parameter> and the opening <tool_call> are left out.
        ("qwen_xml", f"{CALL}</tool_call>\n{CALL}</function>\n</tool_call>", "", [ONE, ONE]),
        ("qwen_xml", CALL * 2, "", [ONE, ONE]),
        ("qwen_xml", f"{CALL}<function=now>\n</function>", "", [ONE, EMPTY]),
        (
            "qwen_xml",
            "<function=add>\n<parameter=a>\n1\n<parameter=b>\nx\n</function>\n</tool_call> bye",
            "bye",
            [BOTH],
        ),
        (
            "qwen_xml",
            f"<tool_call>\n<function=add>\n<parameter=b>\nx\n</tool_call>\n{CALL}</function>",
            "",
            [["add", '{"b": "x"}'], ONE],
        ),
        (
            "qwen_xml",
            "<function=add>\n<parameter=b>\nx\n<function=now>\n</function>",
            "",
            [["add", '{"b": "x"}'], EMPTY],
        ),
        ("qwen_xml", "<function=add>\n<parameter=b>\nx", "", [["add", '{"b": "x"}']]),
        (
            "qwen_xml",
            '<function=add>\n<parameter=c>\n["</parameter>", "<function=now>"]\n</parameter>\n'
            "</function>",
            "",
            [["add", '{"c": ["</parameter>", "<function=now>"]}']],
        ),
        (
            "qwen_xml",
            "<function=add>\n<parameter=c>\n[1\n</parameter>\n</function>",
            "",
            [["add", '{"c": "[1"}']],
        ),
        # With its closing mark, an argument may contain the others.
        (
            "qwen_xml",
            "<function=add>\n<parameter=b>\n</function> </tool_call> <tool_call> <parameter=z>\n"
            "</parameter>\n</function>",
            "",
            [["add", '{"b": "</function> </tool_call> <tool_call> <parameter=z>"}']],
        ),
        (
            "glm",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1<arg_key>b</arg_key>\n"
            "<arg_value>x</tool_call><tool_call>now\n</tool_call>",
            "",
            [BOTH, EMPTY],
        ),
        (
            "minimax_m2",
            '<invoke name="add">\n<parameter name="a">1\n<parameter name="b">x\n'
            "</minimax:tool_call> bye",
            "bye",
            [BOTH],
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
            '<｜DSML｜parameter name="b" string="true">x</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="now">',
            "",
            [BOTH, EMPTY],
        ),
        (
            "deepseek_v31",
            '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}",
            "",
            [ONE, EMPTY],
        ),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}\nbye",
            "bye",
            [ONE, EMPTY],
        ),
        ("gemma4", "<|tool_call>call:add{a:1}<|tool_call>call:now{}", "", [ONE, EMPTY]),
        ("qwen", '{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [ONE]),
        (
            "qwen",
            '<think>Hm.</think>\n\n{ "name": "add", "arguments": {"a": 1}}\n</tool_call>\n',
            "",
            [ONE],
        ),
        ("qwen", '{"name": "Bob", "arguments": {"a": 1}}', None, []),
        # A mark too many.
        ("qwen_xml", f"<tool_call>\n{CALL}</function>\n</tool_call>\n</tool_call>", "", [ONE]),
        # No arguments are an empty object.
        ("qwen", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [EMPTY]),
        ("qwen", '<tool_call>{"arguments": "", "name": "now"}</tool_call>', "", [EMPTY]),
        ("mistral", "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]{}", "", [EMPTY, EMPTY]),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>null<|tool_call_end|>",
            "",
            [EMPTY],
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|><|call|>",
            "",
            [EMPTY],
        ),
        (
            "qwen",
            '<tool_call>{"arguments": {"a": 1e999}, "name": "add"}</tool_call>',
            "",
            [["add", '{"a": 1e999}']],
        ),
        # Text around calls stays apart.
        ("qwen_xml", f"One.\n\n{CALL}</function>\n</tool_call>\nTwo.", "One.\n\nTwo.", [ONE]),
        ("qwen_xml", f"One.{CALL}</function></tool_call> Two.", "One. Two.", [ONE]),
        ("qwen_xml", f"One.{CALL}</function></tool_call>Two.", "One.\nTwo.", [ONE]),
        (
            "harmony",
            "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Two.",
            "One.\nTwo.",
            [],
        ),
    ],
)
def test_left_out_marks_change_nothing(form, text, said, calls):
    found = summarize(check_cuts(form, text))
    assert found[0] == (text if said is None else said)
    assert found[2] == calls


def test_what_max_tokens_cuts_off_is_left_open():
    """The client sees that it is incomplete; of a forced call no mark is text."""
    for form, text, arguments in (
        ("qwen_xml", CALL, '{"a": 1'),
        ("qwen_xml", "<function=add><parameter=b>x", '{"b": "x'),
        ("qwen_xml", "<function=add><parameter=b>x</function>", '{"b": "x</function>'),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1', '{"a": 1'),
        ("kimi_k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>", ""),
    ):
        assert summarize(check_cuts(form, text, is_cut=True)) == ("", "", [["add", arguments]])
    for form, sample in SAMPLES.items():
        for end in range(1, sample[0].index("add") + 3):
            cut = {"is_cut": True, "is_forced": True}
            said, reasoning, _ = summarize(read(form, [sample[0][:end]], **cut))
            assert (said, reasoning) == ("", ""), sample[0][:end]
    assert summarize(check_cuts("harmony", HARMONY[:20], is_cut=True)) == ("", "", [])


def test_schemas_that_lead_nowhere_cost_no_time():
    """What is not understood says nothing of an argument."""
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}
    wide = {"anyOf": [{"$ref": "#/$defs/a"}] * 9, "$defs": {"a": {"allOf": [{"$ref": "#"}] * 9}}}
    odd = [{"$ref": "#/x/y"}, {"$ref": 7}, {"properties": [1]}, {"anyOf": {"a": 1}}, True, None]
    for schema in (loop, wide, *odd, {"properties": {"x": {"type": [7]}}}, {"allOf": odd}):
        assert find_kinds(schema, "x") is None
        assert list_names(schema) in ([], ["x"])
    assert find_kinds({"properties": {"x": False}}, "x") == set()
    several = {"allOf": [{"properties": {"x": {"type": ["string", "null"]}}},
                         {"properties": {"x": {"type": "string"}}}]}  # fmt: skip
    assert find_kinds(several, "x") == {"string"}


def test_reasoning_may_stay_in_the_text():
    text = "<think>\nI think.\n</think>\n\nHello"
    whole = check_cuts("qwen", text, splits_reasoning=False)
    assert summarize(whole) == (text, "", [])
    assert summarize(check_cuts("think", text, tools=None)) == ("Hello", "I think.", [])


FRAGMENTS = [
    *(mark for form in FORMATS.values() for mark in form.marks),
    *('{"name": "add", "arguments": {"a": "', "</function>", '"}', "{", "}", "[", ",", ";"),
    *(" ", "\n", "x", "add", "call:add", "functions.add:0", "to=functions.add", '"', "\\", "1"),
    *("<parameter=b>", '<parameter name="b">', ">", "<", "assistant", "analysis", "<arg_key>"),
]


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=20, deadline=None)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    is_thinking=st.booleans(),
)
def test_any_text_cut_anyhow_reads_the_same(form, parts, cuts, is_thinking):
    text = "".join(parts)
    pieces, position, number = [], 0, 0
    while position < len(text):
        size = cuts[number % len(cuts)]
        pieces.append(text[position : position + size])
        position, number = position + size, number + 1
    whole = read(form, [text], is_thinking=is_thinking)
    assert read(form, pieces, is_thinking=is_thinking) == whole
    assert read(form, list(text), is_thinking=is_thinking) == whole


def test_plain_text_comes_through_as_it_is():
    for form in FORMATS:
        text = "  Hello, a < b and {x}\n\nbye \n"
        assert summarize(check_cuts(form, text)) == (text, "", [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }} <think>", "qwen"),
        ("<tool_call>\n<function=example>", "qwen_xml"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("'<｜tool▁sep｜>' + '```json'", "deepseek_v3"),
        ("'<｜tool▁sep｜>'", "deepseek_v31"),
        ("<｜DSML｜invoke", "deepseek_v32"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|tool_call>", "gemma4"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>ipython", "llama3"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("{{ content.split('</think>') }}", "think"),
        ("<|im_start|>", None),
    ],
)
def test_form_is_read_from_the_template(template, form):
    assert detect_format(template) == form


@pytest.mark.parametrize("form", WRITTEN_CALLS)
@pytest.mark.parametrize("is_free", [False, True], ids=["forced", "free"])
def test_what_a_grammar_of_calls_writes_its_parser_reads(form, is_free):
    """Random walks through the grammar of two tools, all of which are calls that fit."""
    tokenizer = make_byte_level_tokenizer()
    written = WRITTEN_CALLS[form]
    begin = written.begin + written.head
    known = (*FORMATS[form].skipped, *(FORMATS[form].calls or ()))
    trigger = next((mark for mark in known if begin.startswith(mark)), "") if is_free else ""
    schemas = {
        "add": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "maximum": 99},
                "b": {"type": "string", "maxLength": 4},
                "c": {"type": "string", "enum": ["x", "y"]},
                "d": {"type": "array", "items": {"enum": ["p", 1]}, "maxItems": 2},
            },
            "required": ["a", "c"],
            "additionalProperties": False,
        },
        "now": {"type": "object", "additionalProperties": False},
    }
    grammar = write_calls(
        written,
        lambda text: write_literal(tokenizer, text),
        schemas,
        split,
        is_parallel=not is_free,
        trigger=trigger,
        is_forced=not is_free,
    )
    table = make_token_table(list_vocabulary(tokenizer, tokenizer.vocab_size, [0]), tokenizer)
    assert find_fault(table, grammar) == ""
    chance, num_calls = random.Random(form), 0
    for _ in range(6):
        matcher, ids = make_matcher(table, grammar), []
        if is_free:
            head = begin.partition("{name}")[0]
            ids = tokenizer.encode(f"Well, {trigger}" if trigger else head)
            assert matcher.consume_tokens(ids)
        while not matcher.is_stopped() and len(ids) < 400:
            mask = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            allowed = [int(i) for i in np.nonzero(mask)[0]]
            # Texts end soon: the marks behind them are what is looked at.
            forced = matcher.compute_ff_tokens()
            ends = [i for i in allowed if i == 0 or tokenizer.token_text(i)[:1] in '<"\n']
            token = forced[0] if forced else chance.choice(ends or allowed)
            if token == 0:
                break
            assert matcher.consume_token(token)
            ids.append(token)
        text = tokenizer.decode(ids)
        if matcher.is_accepting():
            said, _, calls = summarize(read(form, [text], tools=schemas))
            assert said in ("", "Well,") or is_free, text
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[name])
            num_calls += len(calls)
    assert num_calls > 0


TEXT = {"type": "string"}
STRICT = [
    {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}]}, "b": {"type": ["string", "null"]},
                    "c": {"enum": ["x", "1", None, 2]}}, "required": ["a", "b", "c"]},
    {"$ref": "#/$defs/q", "$defs": {"s": {**TEXT, "minLength": 2, "maxLength": 4}, "q": {
        "properties": {"s": {"$ref": "#/$defs/s"}, "n": {"type": "integer"}}, "required": ["s"]}}},
    {"anyOf": [
        {"properties": {"k": {"const": "12"}, "x": TEXT}, "required": ["k", "x"]},
        {"properties": {"k": {"const": "b"}, "y": {"type": "number"}}, "required": ["k", "y"]}]},
    {"allOf": [{"properties": {"p": {**TEXT, "pattern": "^[a-c]+$"}}, "required": ["p"]},
               {"properties": {"q": {"type": "boolean"}}, "required": ["q"]}]},
    {"required": ["z"]},
    {"additionalProperties": {**TEXT, "maxLength": 3}, "type": "object"},
    {"properties": {"a": TEXT}, "additionalProperties": {"type": "integer"}, "required": ["a"]},
    {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"properties": {"d": {**TEXT, "format": "date"}, "e": {**TEXT, "pattern": "a|/b$"},
                    "f": {**TEXT, "pattern": "(?i)^x", "maxLength": 3}},
     "required": ["d", "e", "f"]},
    {"properties": {"v": {"type": ["string", "integer", "boolean", "array"]},
                    "w": {"anyOf": [{**TEXT, "minLength": 3}, {"minimum": 100, "type": "integer"}]},
                    "x": {"oneOf": [{**TEXT, "maxLength": 2}, {"type": "integer"}]}},
     "required": ["v", "w", "x"]},
    {"properties": {"v": {}, "w": True}, "required": ["v", "w"]},
    {"properties": {"v": {**TEXT, "minLength": 1, "maxLength": 2}}, "required": ["v"]},
    {"properties": {"o": {"anyOf": [{"$ref": "#/$defs/i"}, TEXT]}}, "required": ["o"], "$defs": {
        "i": {"type": "object", "properties": {"k": TEXT}, "additionalProperties": False}}},
    {"properties": {"a": {"enum": ["x", "y"]}, "b": TEXT}, "required": ["a"],
     "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
]  # fmt: skip
"""Schemas of arguments of which text is restricted, or which do not list their properties."""
ODD_TEXTS = (
    "<parameter=b>", "</function>", "</tool_call>", "<function=now>", "</parameter>", "\n", "12",
    "null", '"x"', "true", "[1]", "2024-02-03", "xa",
    "<arg_key>b</arg_key>\n<arg_value>", "<tool_call>now\n", "{}",
)  # fmt: skip


@pytest.mark.parametrize("form", [name for name, each in WRITTEN_CALLS.items() if each.key])
def test_arguments_written_one_by_one_satisfy_their_schema(form):
    """Random walks that write odd texts where they may, each schema until it was called twice."""
    tokenizer, chance = make_byte_level_tokenizer(), random.Random(form)
    vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size, [0])
    table = make_token_table(vocabulary, tokenizer)
    written = WRITTEN_CALLS[form]
    odd = [*ODD_TEXTS, *[written.text_end or written.value_end] * len(ODD_TEXTS)]
    for schema in STRICT:
        tools = {"say": schema, "now": {"properties": {}}}
        grammar = write_calls(
            WRITTEN_CALLS[form],
            lambda text: write_literal(tokenizer, text),
            tools,
            split,
            is_parallel=False,
        )
        assert find_fault(table, grammar) == "", schema
        num_calls = 0
        for _ in range(80):
            text = walk(tokenizer, make_matcher(table, grammar), chance, odd)
            if text is None:
                continue
            said, _, [[name, arguments]] = summarize(read(form, [text], tools=tools))
            assert said == ""
            checker = jsonschema.FormatChecker(["date"])
            jsonschema.validate(json.loads(arguments), tools[name], format_checker=checker)
            num_calls += name == "say"
            if num_calls == 2:
                break
        assert num_calls, schema


def walk(tokenizer, matcher, chance, odd_texts=()):
    """Return a text that a grammar allows; None if it does not end soon."""
    ids, odd = [], []
    while len(ids) < 600 and not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(i) for i in np.nonzero(mask)[0]]
        assert not matcher.is_error()
        if odd_texts and not odd and chance.random() < 0.3:
            odd = tokenizer.encode(chance.choice(odd_texts))
        if odd and odd[0] in allowed:
            token = odd.pop(0)
        else:
            odd = []
            ends = [i for i in allowed if i == 0 or tokenizer.token_text(i)[:1] in '<"\n}]']
            token = chance.choice(ends if ends and chance.random() < 0.5 else allowed)
        if token == 0:
            break
        assert matcher.consume_token(token)
        ids.append(token)
    return tokenizer.decode(ids) if matcher.is_accepting() else None


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "string"}, "type: the arguments of a tool are an object"),
        ({"properties": {"a": {**TEXT, "maxLength": 1, "minLength": 2}}, "required": ["a"]}, "'a'"),
        ({"properties": {"a": TEXT}, "minProperties": 1}, "minProperties"),
        ({"properties": {"a": TEXT, "b": TEXT}, "maxProperties": 1}, "maxProperties"),
        ({"properties": {"a>b": TEXT}, "required": ["a>b"]}, "named 'a>b'"),
        ({"properties": {"a": {**TEXT, "pattern": "x(?i)y"}}}, "pattern: options within it"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "enum"),
        ({"$ref": "http://localhost/x.json"}, "\\$ref"),
    ],
)
def test_arguments_that_cannot_be_written_are_refused_by_keyword(schema, what):
    with pytest.raises((RefusedError, ValueError), match=what):
        write_calls(WRITTEN_CALLS["qwen_xml"], json.dumps, {"x": schema}, split, is_parallel=False)


def test_patterns_are_found_anywhere_in_a_text():
    """Alternatives keep their own anchors; what is escaped is none."""
    for pattern, texts, others in (
        ("b", ["b", "abc", "a\nb"], ["a"]),
        ("^a|b$", ["ax", "xb", "a"], ["xa", "bx"]),
        ("a\\$", ["a$", "xa$y"], ["a"]),
        ("a\\\\$", ["a\\", "xa\\"], ["a\\x"]),
        ("(a|b)[|$]", ["xa|", "b$y"], ["a"]),
        ("(?i)AB", ["xabx"], ["a"]),
        ("^$", [""], ["a"]),
    ):
        whole = re.compile(anchor_pattern(pattern))
        for text in texts + others:
            assert bool(whole.fullmatch(text)) == (text in texts), (pattern, text)


def test_patterns_of_formats_allow_what_the_grammar_library_allows():
    """Of texts drawn from them; they are narrower."""
    chance, tokenizer = random.Random(7), make_byte_level_tokenizer()
    vocabulary = list_vocabulary(tokenizer, tokenizer.vocab_size, [0])
    table = make_token_table(vocabulary, tokenizer)
    for name, pattern in FORMAT_PATTERNS.items():
        quoted = write_grammar("json_schema", json.dumps({"type": "string", "format": name}))
        grammar = "start: /" + pattern.replace("/", "\\/") + "/"
        drawn = [walk(tokenizer, make_matcher(table, grammar), chance) for _ in range(20)]
        texts = [text for text in drawn if text]
        assert len(texts) > 3, name
        for text in texts:
            ids = tokenizer.encode(json.dumps(text))
            matcher = make_matcher(table, quoted)
            is_taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_taken, (name, text)


@pytest.mark.parametrize("form", ["llama3", "harmony"])
def test_strict_calls_stand_beside_free_answers(form):
    """Where no mark tells a call at once, an answer may be text, and a call must fit."""
    tokenizer = make_byte_level_tokenizer(more=("<|python_tag|>", *FORMATS["harmony"].inner))
    schemas = {"add": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    grammar = write_calls(
        WRITTEN_CALLS[form],
        lambda text: write_literal(tokenizer, text),
        schemas,
        split,
        is_parallel=True,
        is_forced=False,
    )
    table = make_token_table(list_vocabulary(tokenizer, tokenizer.vocab_size, [0]), tokenizer)
    assert find_fault(table, grammar) == ""
    head = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    end = "<|end|><|start|>assistant"
    texts = {
        "llama3": [
            ("Plain {text}.", True),
            ("", True),
            ('{"name": "add", "parameters": {"a": 1}}', True),
            ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', True),
            ('{"name": "add", "parameters": {"a": "x"}}', False),
            (' {"name": "add", "parameters": {"a": "x"}}', False),
            ('<|python_tag|>{"name": "other", "parameters": {}}', False),
        ],
        "harmony": [
            ("<|channel|>final<|message|>Plain {text}.", True),
            (f"<|channel|>analysis<|message|>Hm.{end}<|channel|>final<|message|>Yes.", True),
            (f'<|channel|>commentary<|message|>I look.{end}{head}{{"a": 1}}', True),
            (f'{head}{{"a": "x"}}', False),
            (f'<|channel|>analysis<|message|>Hm.{end}{head}{{"b": 1}}', False),
        ],
    }
    for text, is_allowed in texts[form]:
        matcher = make_matcher(table, grammar)
        fits = matcher.try_consume_tokens(tokenizer.encode(text)) == len(tokenizer.encode(text))
        assert (fits and matcher.is_accepting()) == is_allowed, text
