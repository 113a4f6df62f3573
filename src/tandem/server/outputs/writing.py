"""Grammars of tool calls, in the formats in which models write them.

These grammars are the counterpart of the output parsers: a text that such a grammar allows is
parsed as calls of the given tools, with arguments that their schemas allow.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.models.tokenizing.schemas.arguments import Argument, Arguments
from tandem.models.tokenizing.schemas.formats import FORMAT_PATTERNS
from tandem.models.tokenizing.schemas.kinds import list_names
from tandem.models.tokenizing.schemas.patterns import anchor_pattern
from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.server.outputs.formats import DSML_MARKS, GLM_MARKS, MINIMAX_MARKS, QWEN_MARKS
from tandem.server.outputs.parameters import ParameterMarks, write_json_value

__all__ = ["WRITTEN_CALLS", "WrittenCalls", "write_calls"]

Literal = Callable[[str], str]
"""Function that writes a text as a sequence of terminals of a Lark grammar, with special tokens by
their ids.
"""
Split = Callable[[Mapping[str, Any]], Sequence[Arguments]]
"""Function that returns what a schema allows as arguments that are written one by one; see
``list_arguments``.
"""
_ANY = "(?s:.*)"
_LOOKS = {
    "null": r"\s*null\s*",
    "boolean": r"\s*(?:true|false)\s*",
    "integer": r"\s*-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\s*",
    "number": r"\s*-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\s*",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}
"""Patterns of all texts that may be read as a JSON value, by the value's type."""
_NAME = "[A-Za-z0-9_.-]{1,64}"
"""Pattern of an argument's name that the schema does not mention."""


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
        marks: marks by which such arguments are read; None: they are read in another way.
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
    marks: ParameterMarks | None = None
    answer: str = ""


_DSML_KEY = '<｜DSML｜parameter name="{key}" string="'

WRITTEN_CALLS: Mapping[str, WrittenCalls] = {
    "qwen": WrittenCalls('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    "qwen_xml": WrittenCalls(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        key="<parameter={key}>\n",
        value_end="\n</parameter>\n",
        marks=QWEN_MARKS,
    ),
    "glm": WrittenCalls(
        "<tool_call>{name}\n",
        "</tool_call>",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        marks=GLM_MARKS,
    ),
    "minimax_m2": WrittenCalls(
        '<invoke name="{name}">\n',
        "</invoke>\n",
        begin="<minimax:tool_call>\n",
        between="",
        end="</minimax:tool_call>",
        key='<parameter name="{key}">',
        value_end="</parameter>\n",
        marks=MINIMAX_MARKS,
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
        marks=DSML_MARKS,
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
    split: Split,
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
        split: see ``Split``.
        is_parallel: True if there may be more than one call.
        trigger: mark that begins calls, for a grammar that also allows text beside or instead of
            calls;
            empty: there is none.
        is_forced: without a trigger, True allows calls only, and False what ``answer`` allows.

    Raises: RefusedError (arguments that cannot be written so that they are read as they are).
    """
    rules = _Rules(written, literal, trigger, tools, split)
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

    def __init__(
        self,
        written: WrittenCalls,
        literal: Literal,
        trigger: str,
        tools: Mapping[str, Mapping[str, Any]],
        split: Split,
    ) -> None:
        self._written = written
        self._literal = literal
        self._tools = tools
        self._split = split
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
        taken = self._list_taken(schema)
        ways = [self._add_way(way, taken) for way in self._split(schema)]
        return ways[0] if len(ways) == 1 else f"({' | '.join(map(self._add, ways))})"

    def _add_way(self, way: Arguments, taken: Sequence[str]) -> str:
        names: list[tuple[str, bool]] = []
        for key, each in way.named.items():
            is_needed = key in way.required
            if self._can_read(key):
                names.append((self._add_parameter(self._literal_key(key), each, taken), is_needed))
            elif is_needed:
                what = f"an argument named {key[:100]!r} cannot be written in this form"
                raise RefusedError("properties", what)
        more = self._add_more(way, taken)
        if not self._written.comma:
            parts = [name if needed else f"{name}?" for name, needed in names]
            return " ".join([*parts, f"{more}*" if more else ""]).strip()
        # In formats with commas the required parameters are written first and the optional ones
        # after them, so that each optional one brings its own comma.
        comma = self._literal(self._written.comma)
        needed = [name for name, is_needed in names if is_needed]
        others = [name for name, is_needed in names if not is_needed]
        tail = f" ({comma} {more})*" if more else ""
        rest = " ".join(f"({comma} {name})?" for name in others)
        if needed:
            return f" {comma} ".join(needed) + f" {rest}{tail}"
        options = [
            " ".join([name, *(f"({comma} {each})?" for each in others[index + 1 :])]) + tail
            for index, name in enumerate(others)
        ]
        if more:
            options.append(f"{more}{tail}")
        return f"({' | '.join(options)})?" if options else ""

    def _add_more(self, way: Arguments, taken: Sequence[str]) -> str:
        """Add the rules of arguments that the schema does not name; return what stands for one of
        them, or nothing if there are none.
        """
        known = "|".join(map(re.escape, [*way.named, *way.forbidden]))
        unknown = f"/{_NAME}/" + (f" & ~{_slash(known)}" if known else "")
        rules: list[str] = []
        for pattern, argument in way.patterns:
            name = self._add_terminal(f"{unknown} & {_slash(anchor_pattern(pattern))}")
            rules.append(
                self._add_parameter(lambda key, n=name: self._around(key, n), argument, taken)
            )
            unknown += f" & ~{_slash(anchor_pattern(pattern))}"
        if way.rest is not None:
            name = self._add_terminal(unknown)
            rules.append(self._add_parameter(lambda key: self._around(key, name), way.rest, taken))
        return f"({' | '.join(rules)})" if rules else ""

    def _can_read(self, name: str) -> bool:
        """Return True if the name of an argument is read as it is written."""
        marks = self._written.marks
        if marks is None:
            return re.search(r'[\s:{}\[\],"<]', name) is None and bool(name)
        ends = (*marks.value_opens, marks.close, marks.call_open, *marks.outer)
        return name == name.strip() and not any(end in name for end in ends)

    def _literal_key(self, name: str) -> Callable[[str], str]:
        return lambda key: self._literal(key.replace("{key}", name))

    def _around(self, key: str, name: str) -> str:
        """Return the text before an argument with a terminal in place of its name."""
        before, _, after = key.partition("{key}")
        return " ".join(filter(None, [self._literal(before), name, self._literal(after)]))

    def _add_parameter(
        self, write_key: Callable[[str], str], argument: Argument, taken: Sequence[str]
    ) -> str:
        """Add the rule of an argument.

        Args:
            write_key: returns the terminals of a text before the argument, with its name.
            argument: what the argument may be.
            taken: texts that end an argument.
        """
        written = self._written
        assert written.key is not None
        options: list[str] = []
        if argument.other is not False:
            value, end = self._write_json(argument.other, {}), self._literal(written.value_end)
            options.append(" ".join(filter(None, [write_key(written.key), value, end])))
        text_key = written.key if written.text_key is None else written.text_key
        for each in argument.strings:
            options += [
                f"{write_key(text_key)} {text}" for text in self._add_texts(each, argument, taken)
            ]
        if not options:
            raise RefusedError("enum", "no value of an argument can be written in this form")
        return self._add(" | ".join(options))

    def _add_texts(
        self, constraints: Mapping[str, Any], argument: Argument, taken: Sequence[str]
    ) -> list[str]:
        """Return the ways to write a string, each with the mark behind it."""
        written = self._written
        text_end = written.value_end if written.text_end is None else written.text_end
        end, is_marked = self._literal(text_end), written.text_key is not None
        if "enum" in constraints:
            kinds = None if argument.kinds is None else frozenset(argument.kinds)
            texts = [
                text
                for text in constraints["enum"]
                if not any(mark in text for mark in taken)
                and (is_marked or kinds == {"string"} or _is_read_as_text(text, kinds))
            ]
            written_texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return [f"({written_texts}) {end}"] if texts else []
        parts = [_slash(_ANY)]
        low, high = constraints.get("minLength", 0), constraints.get("maxLength", "")
        if low or high != "":
            parts.append(_slash(f"(?s:.{{{low},{high}}})"))
        patterned = [constraints, *constraints.get("allOf", ())]
        parts += [
            _slash(anchor_pattern(each["pattern"])) for each in patterned if "pattern" in each
        ]
        if "format" in constraints:
            parts.append(_slash(FORMAT_PATTERNS[constraints["format"]]))
        parts += [f"~{_slash(pattern)}" for pattern in self._list_refused(argument, taken)]
        # The terminal holds the text and as much of the mark behind it as is no special token, so
        # that it ends there and not before.
        behind, token, rest = end.partition("<[")
        text = self._add_terminal(f"({' & '.join(parts)}) {behind}".rstrip())
        return [f"{text} {token}{rest}".rstrip()]

    def _list_refused(self, argument: Argument, taken: Sequence[str]) -> list[str]:
        """Return patterns of texts that would not be read as they are written."""
        found: list[str] = []
        if taken:
            found.append(f"{_ANY}(?:{'|'.join(map(re.escape, taken))}){_ANY}")
        written = self._written
        if written.marks is not None and written.marks.is_on_lines and written.value_end[0] != "\n":
            found += [rf"\n{_ANY}", rf"{_ANY}\n"]
        if written.text_key is None:
            kinds = list(_LOOKS) if argument.kinds is None else argument.kinds
            looks = [_LOOKS[kind] for kind in kinds if kind in _LOOKS]
            found += dict.fromkeys(looks)
            if argument.kinds is None:
                found.append(rf'\s*"{_ANY}')
        return found

    def _list_taken(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the texts that end an argument of a call when it is read."""
        written, marks = self._written, self._written.marks
        if marks is None:
            return [written.value_end if written.text_end is None else written.text_end]
        openings = [
            marks.open + name + end for name in list_names(schema) for end in marks.value_opens
        ]
        calls = [marks.call_open + name + marks.call_name_end for name in self._tools]
        return [marks.value_close, *openings, *calls]

    def _add_terminal(self, body: str) -> str:
        self._num += 1
        name = f"TEXT_{self._num}"
        self.lines.append(f"{name}: {body}")
        return name

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


def _slash(pattern: str) -> str:
    """Return a regular expression as Lark writes it."""
    escaped = re.sub(r"\\(?s:.)|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)
    escaped = escaped.replace("\\\n", "\n").replace("\\\r", "\r")
    return f"/{escaped}/".replace("\n", "\\n").replace("\r", "\\r")


def _is_read_as_text(text: str, kinds: frozenset[str] | None) -> bool:
    return write_json_value(text, kinds) == json.dumps(text, ensure_ascii=False)
