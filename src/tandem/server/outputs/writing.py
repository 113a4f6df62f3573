"""Grammars of tool calls, in the formats in which models write them.

These grammars are the counterpart of the output parsers: a text that such a grammar allows is
parsed as calls of the given tools, with arguments that their schemas allow.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["WRITTEN_CALLS", "WrittenCalls", "write_calls"]

Literal = Callable[[str], str]
"""Function that writes a text as a sequence of terminals of a Lark grammar, with special tokens by
their ids.
"""


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """The texts around calls and their arguments; ``{name}`` and ``{key}`` stand for names.

    Args:
        head: before the arguments of a call.
        tail: after the arguments.
        begin: before the first call.
        between: between two calls; None if only one is possible.
        end: after the last call.
        key: before an argument, if arguments are written one by one; None: they are a JSON object.
        text_key: before an argument that is text; None: as ``key``.
        value_end: after an argument.
        text_end: after an argument that is text; None: as ``value_end``.
        comma: between arguments.
        answer: Lark for an answer that may be text or calls, in a format where no mark begins a
            call; it refers to the rule ``calls``, and has texts between « and ».
    """

    head: str
    tail: str
    begin: str = ""
    between: str | None = "\n"
    end: str = ""
    key: str | None = None
    text_key: str | None = None
    value_end: str = ""
    text_end: str | None = None
    comma: str = ""
    answer: str = ""


_DSML_KEY = '<｜DSML｜parameter name="{key}" string="'

WRITTEN_CALLS: Mapping[str, WrittenCalls] = {
    "qwen": WrittenCalls('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    "qwen_xml": WrittenCalls(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        key="<parameter={key}>\n",
        value_end="\n</parameter>\n",
    ),
    "glm": WrittenCalls(
        "<tool_call>{name}\n",
        "</tool_call>",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    "minimax_m2": WrittenCalls(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        begin="<minimax:tool_call>\n",
        between="",
        end="</minimax:tool_call>",
        key='<parameter name="{key}">',
        value_end="</parameter>\n",
    ),
    "deepseek_v32": WrittenCalls(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        begin="<｜DSML｜function_calls>\n",
        between="",
        end="</｜DSML｜function_calls>",
        key=_DSML_KEY + 'false">',
        text_key=_DSML_KEY + 'true">',
        value_end="</｜DSML｜parameter>\n",
    ),
    "deepseek_v3": WrittenCalls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": WrittenCalls(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": WrittenCalls(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        between="",
        end="<|tool_calls_section_end|>",
    ),
    "gemma4": WrittenCalls(
        "<|tool_call>call:{name}{",
        "}<tool_call|>",
        between="",
        key="{key}:",
        text_key='{key}:<|"|>',
        text_end='<|"|>',
        comma=",",
    ),
    "mistral": WrittenCalls(
        '{"name": "{name}", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]"
    ),
    "llama3": WrittenCalls(
        '{"name": "{name}", "parameters": ',
        "}",
        between="; ",
        # The grammar takes an answer that begins with "{" for a call: free text must begin with
        # another character.
        answer="start: «<|python_tag|>»? calls | text?\ntext: /[ \\n]*[^{ \\n](.|\\n)*/",
    ),
    "harmony": WrittenCalls(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
        between=None,
        answer="start: note* (calls | final)\n"
        "note: (analysis | preamble) /(.|\\n)*/ «<|end|><|start|>assistant»\n"
        "analysis: «<|channel|>analysis<|message|>»\n"
        "preamble: «<|channel|>commentary<|message|>»\n"
        "final: «<|channel|>final<|message|>» /(.|\\n)*/",
    ),
}
"""Texts around tool calls that each output format writes, by the format's name in ``FORMATS``."""


def write_calls(
    written: WrittenCalls,
    literal: Literal,
    tools: Mapping[str, Mapping[str, Any]],
    *,
    is_parallel: bool,
    trigger: str = "",
    is_forced: bool = True,
) -> str:
    """Return a grammar in Lark whose texts are calls of the tools.

    Args:
        written: texts around calls.
        literal: see ``Literal``.
        tools: JSON Schema of the parameters, by name of each tool that may be called.
        is_parallel: True if there may be more than one call.
        trigger: mark that begins calls, for a grammar that also allows text beside or instead of
            calls;
            empty: there is none.
        is_forced: without a trigger, True allows calls only, and False what ``answer`` allows.
    """
    rules = _Rules(written, literal, trigger)
    calls = [rules.add_call(name, schema) for name, schema in tools.items()]
    call = f"({' | '.join(calls)})"
    parts = [call]
    # In a grammar with a trigger, calls without a mark around all of them are repeated by repeating
    # the trigger, so one call is enough here.
    repeats = written.between is not None and (written.begin or not trigger)
    if is_parallel and repeats and written.between is not None:
        parts.append(f"({literal(written.between)} {call})*" if written.between else f"{call}*")
    block = " ".join(
        [*filter(None, [rules.open(written.begin)]), *parts, *filter(None, [literal(written.end)])]
    )
    if not trigger and is_forced:
        return "\n".join([f"start: {block}", *rules.lines])
    if not trigger:
        assert written.answer, "this form has a mark"
        around = re.sub("«(.*?)»", lambda found: literal(found[1]), written.answer)
        return "\n".join([around, f"calls: {block}", *rules.lines])
    rules.lines.append("FREE: /(.|\\n)*/")
    return "\n".join([f"start: (free {block})* FREE", *rules.lines])


class _Rules:
    """A collector of the rules (in Lark) of a grammar whose texts are tool calls."""

    def __init__(self, written: WrittenCalls, literal: Literal, trigger: str) -> None:
        self._written = written
        self._literal = literal
        self._trigger = trigger
        self.lines: list[str] = []
        self._num = 0
        if trigger:
            mark = literal(trigger)
            is_token = mark.startswith("<[")
            self.lines.append(f"free: FREE {mark}" if is_token else f"free[lazy]: FREE {mark}")

    def open(self, text: str) -> str:
        """Return the literal of a text, without the trigger (the mark that begins calls) at its
        beginning, which the grammar has already.
        """
        return self._literal(text.removeprefix(self._trigger) if self._trigger else text)

    def add_call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add the rule for calls of one tool; return the rule's name."""
        written = self._written
        head = written.head.replace("{name}", name)
        before, has_index, after = head.partition("{index}")
        # The trigger (the mark from which on the grammar demands calls) is the mark before all
        # calls or, if the format has none, the mark before each call.
        parts = [self._literal(before) if written.begin else self.open(before)]
        if has_index:
            parts += ["/[0-9]{1,2}/", self._literal(after)]
        if written.key is None:
            parts.append(self._write_json(schema, schema))
        else:
            parts.append(self._add_parameters(schema))
        parts.append(self._literal(written.tail))
        return self._add(" ".join(filter(None, parts)))

    def _add_parameters(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping):
            return ""
        names = [
            (self._add_parameter(key, each, schema), key in required)
            for key, each in properties.items()
        ]
        if not self._written.comma:
            return " ".join(name if needed else f"{name}?" for name, needed in names)
        # In formats with commas the required parameters are written first and the optional ones
        # after them, so that each optional one brings its own comma.
        comma = self._literal(self._written.comma)
        needed = [name for name, is_needed in names if is_needed]
        others = [name for name, is_needed in names if not is_needed]
        rest = " ".join(f"({comma} {name})?" for name in others)
        if needed:
            return f" {comma} ".join(needed) + f" {rest}"
        options = [
            " ".join([name, *(f"({comma} {each})?" for each in others[index + 1 :])])
            for index, name in enumerate(others)
        ]
        return f"({' | '.join(options)})?" if options else ""

    def _add_parameter(self, key: str, schema: Any, whole: Mapping[str, Any]) -> str:
        written = self._written
        assert written.key is not None
        is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
        if not is_text:
            value = self._write_json(schema, whole)
            end = self._literal(written.value_end)
            before = self._literal(written.key.replace("{key}", key))
            return self._add(" ".join(filter(None, [before, value, end])))
        text_key = written.key if written.text_key is None else written.text_key
        text_end = written.value_end if written.text_end is None else written.text_end
        before = self._literal(text_key.replace("{key}", key))
        choices = schema.get("enum")
        if isinstance(choices, list) and choices:
            options = " | ".join(json.dumps(str(each), ensure_ascii=False) for each in choices)
            return self._add(f"{before} ({options}) {self._literal(text_end)}")
        end = self._literal(text_end)
        if end.startswith("<["):
            return self._add(f"{before} /(.|\\n)*/ {end}")
        self._num += 1
        text = f"text_{self._num}"
        pattern = re.escape(text_end.rstrip("\n")).replace("/", "\\/").replace("\\\n", "\\n")
        self.lines.append(f"{text}[lazy]: /(.|\\n)*{pattern}/")
        rest = text_end[len(text_end.rstrip("\n")) :]
        return self._add(f"{before} {text} {self._literal(rest)}".rstrip())

    def _write_json(self, schema: Any, whole: Mapping[str, Any]) -> str:
        if not isinstance(schema, Mapping):
            schema = {}
        if schema is whole and "type" not in schema:
            schema = {**schema, "type": "object"}
        shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
        # Chat templates write JSON arguments with one space after each colon and comma and no other
        # white space: the grammar asks for the same.
        spaces = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        text = json.dumps(shared | {**schema, "x-guidance": spaces}, ensure_ascii=False)
        return f"%json {text}"

    def _add(self, body: str) -> str:
        self._num += 1
        name = f"rule_{self._num}"
        self.lines.append(f"{name}: {body}")
        return name
