"""The parser and the grammar that a request's answers need."""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tandem.core.errors import ConfigError
from tandem.models.tokenizing.schemas.arguments import Arguments
from tandem.models.tokenizing.schemas.refused import RefusedError
from tandem.server.api.grammars import join_grammars, read_grammar, write_literal
from tandem.server.api.prompts import PromptEncoder
from tandem.server.context import ServerContext
from tandem.server.outputs.deltas import OutputParser
from tandem.server.outputs.formats import OutputFormat
from tandem.server.outputs.parser import FormatParser
from tandem.server.outputs.writing import WRITTEN_CALLS, write_calls
from tandem.server.protocol.openai import ChatRequest, NamedChoice, Tool, ToolChoice

__all__ = [
    "Parsing",
    "list_active_tools",
    "make_call_id",
    "plan_grammar",
    "plan_parsing",
]


@dataclass(frozen=True, slots=True)
class Parsing:
    """A factory of parsers of an answer's text, and the special tokens that the parsers must see as
    text.
    """

    make_parser: Callable[[], OutputParser]
    shown_ids: frozenset[int]


def list_active_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools that an answer may call, by the request's choice of tools."""
    return () if tools is None or choice == "none" else tools


def make_call_id() -> str:
    """Return a new id for a tool call; for models that write none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def plan_parsing(
    encoder: PromptEncoder,
    request: ChatRequest,
    prompt: str,
    tools: Sequence[Tool],
    begun: str = "",
) -> Parsing | None:
    """Return how answers to a prompt are split into text, reasoning and tool calls; None if all of
    it is text.

    Args:
        encoder: has the format in which the model writes.
        request: says if reasoning is to be separated from the answer, and if a call is forced.
        prompt: rendered prompt; its end shows if it has opened reasoning.
        tools: tools that may be called.
        begun: text of the final message, if the answer continues it.
    """
    splits_reasoning = request.separate_reasoning is not False
    form = encoder.call_form if tools else encoder.form
    if form is None or not (tools or splits_reasoning):
        return None
    is_thinking = _has_opened(form, prompt, begun)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}

    def make_parser() -> OutputParser:
        return FormatParser(
            form,
            schemas if tools else None,
            splits_reasoning=splits_reasoning,
            is_thinking=is_thinking,
            is_forced=_is_forced(request),
        )

    return Parsing(make_parser, encoder.mark_ids)


def plan_grammar(
    context: ServerContext,
    request: ChatRequest,
    prompt: str,
    tools: Sequence[Tool],
    begun: str = "",
) -> str:
    """Return the grammar that answers to a prompt must match; empty if they are free.

    Args:
        context: context of the server, which checks that the grammar compiles.
        request: request with a response format, a choice of tool, or strict tools.
        prompt: rendered prompt.
        tools: tools that may be called.
        begun: text of the final message, if the answer continues it.

    Raises:
        ConfigError: a grammar does not compile, or a tool does not exist.
    """
    info = context.ready_info()
    write = partial(context.grammars.write, info)
    grammar, field = read_grammar(request, write, request.response_format)
    calls = _write_tool_grammar(context, request, tools)
    is_forced = _is_forced(request)
    if grammar and is_forced:
        what = f"{field} and a forced tool_choice exclude each other"
        raise ConfigError("server.plan_grammar", what, field="tool_choice")
    if grammar:
        context.grammars.check(grammar, info, field)
        if tools:
            # The answer either has the form that the request prescribes, or consists of tool calls.
            forced = _write_tool_grammar(context, request, tools, is_forced=True)
            context.grammars.check(forced, info, "tools")
            grammar = join_grammars("start: @body | @calls", body=grammar, calls=forced)
    elif calls:
        context.grammars.check(calls, info, "tools")
        if not is_forced:
            return calls
        grammar = calls
    if not grammar:
        return ""
    return _allow_reasoning(context.encoder, prompt, begun, grammar, is_calls=is_forced)


def _is_forced(request: ChatRequest) -> bool:
    """Return True if the answer must be a call."""
    return request.tool_choice not in (None, "none", "auto")


def _write_tool_grammar(
    context: ServerContext, request: ChatRequest, tools: Sequence[Tool], *, is_forced: bool = False
) -> str:
    """Return the grammar of tool calls that are forced or strict; empty if they are neither."""
    encoder, info = context.encoder, context.ready_info()
    choice, called = request.tool_choice, list(tools)
    if isinstance(choice, NamedChoice):
        called = [tool for tool in tools if tool.function.name == choice.function.name]
        if not called:
            what = f"tool_choice names {choice.function.name!r}, which is not among the tools"
            raise ConfigError("server.plan_grammar", what, field="tool_choice")
    if choice == "required" and not called:
        what = "tool_choice is 'required' and there are no tools"
        raise ConfigError("server.plan_grammar", what, field="tool_choice")
    is_forced = is_forced or choice == "required" or isinstance(choice, NamedChoice)
    written, form = WRITTEN_CALLS[encoder.call_form_name], encoder.call_form
    trigger = ""
    if not is_forced:
        if not any(tool.function.strict is True for tool in called):
            return ""
        begin = written.begin + written.head
        marks = [mark for mark in (*form.skipped, *(form.calls or ())) if begin.startswith(mark)]
        trigger = marks[0] if marks else ""
    schemas = {
        tool.function.name: (tool.function.parameters or {})
        if is_forced or tool.function.strict is True
        else {}
        for tool in called
    }
    is_named = isinstance(choice, NamedChoice)

    def split(schema: Mapping[str, Any]) -> list[Arguments]:
        text = json.dumps(schema, ensure_ascii=False)
        listed = context.grammars.write(info, "arguments", text, "tools")
        return msgspec.json.decode(listed, type=list[Arguments])

    try:
        return write_calls(
            written,
            partial(write_literal, encoder.tokenizer),
            schemas,
            split,
            is_parallel=request.parallel_tool_calls is not False and not is_named,
            trigger=trigger,
            is_forced=is_forced,
        )
    except RefusedError as error:
        raise ConfigError("server.plan_grammar", f"tools: {error}", field="tools") from error


def _has_opened(form: OutputFormat, prompt: str, begun: str) -> bool:
    """Return True if the end of a prompt opens the reasoning of its answer, or if the text that the
    answer continues is reasoning that has not ended.
    """
    if form.think is None:
        return False
    open_mark, close_mark = (mark.strip() for mark in form.think)
    return prompt.rstrip().endswith(open_mark) or begun.rfind(open_mark) > begun.rfind(close_mark)


def _allow_reasoning(
    encoder: PromptEncoder, prompt: str, begun: str, grammar: str, *, is_calls: bool
) -> str:
    """Return a grammar that allows reasoning first, and then what ``grammar`` allows."""
    form, literal = encoder.form, partial(write_literal, encoder.tokenizer)
    if form is not None and form.is_harmony:
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        final = "" if is_calls else literal("<|channel|>final<|message|>")
        think = f"think: {literal(begin)} /(.|\\n)*/ {literal(end)}\n"
        return join_grammars(f"start: think? {final} @body\n{think}", body=grammar)
    if form is None or form.think is None:
        return grammar
    open_mark, close_mark = (mark.strip() for mark in form.think)
    if _has_opened(form, prompt, begun):
        begin, think = "think", ""
    elif encoder.may_think and not prompt.rstrip().endswith(close_mark):
        begin, think = "think?", f"{literal(open_mark)} "
    else:
        return grammar
    close = literal(close_mark)
    if close.startswith("<["):
        rest = f"rest: /(.|\\n)*/ {close}\n"
    else:
        pattern = re.escape(close_mark).replace("/", "\\/")
        rest = f"rest[lazy]: /(.|\\n)*{pattern}/\n"
    rules = f"start: {begin} @body\nthink: {think}rest /[ \\n]*/\n{rest}"
    return join_grammars(rules, body=grammar)
