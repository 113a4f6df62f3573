"""Each form of tool calls and reasoning is read, however its text is cut.

Method: texts as the models' templates write them, with the parts that they stand for. Each is read
whole, character by character, and cut in two at every place; the joined deltas must be the same.
"""

import json
import random

import jsonschema
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
)
from tandem.server.api.grammars import write_literal
from tandem.server.outputs.deltas import (
    ArgumentsDelta,
    CallStart,
    ReasoningDelta,
    TextDelta,
    join_deltas,
)
from tandem.server.outputs.formats import FORMATS, detect_format
from tandem.server.outputs.parser import FormatParser
from tandem.server.outputs.writing import WRITTEN_CALLS, write_calls

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
}


def read(form, pieces, *, tools=TOOLS, **options):
    parser = FormatParser(FORMATS[form], tools, **options)
    deltas = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return join_deltas(deltas + parser.flush())


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
        deltas = read(form, [text[:end]])
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


@pytest.mark.parametrize("form", ["llama3", "harmony"])
def test_strict_calls_stand_beside_free_answers(form):
    """Where no mark tells a call at once, an answer may be text, and a call must fit."""
    tokenizer = make_byte_level_tokenizer(more=("<|python_tag|>", *FORMATS["harmony"].inner))
    schemas = {"add": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    grammar = write_calls(
        WRITTEN_CALLS[form],
        lambda text: write_literal(tokenizer, text),
        schemas,
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
