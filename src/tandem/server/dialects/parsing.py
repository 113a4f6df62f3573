"""The parsers of a request's answers."""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.server.api.grammars import put_behind, write_literal
from tandem.server.api.prompts import PromptEncoder
from tandem.server.outputs.deltas import OutputParser
from tandem.server.outputs.formats import OutputFormat
from tandem.server.outputs.parser import FormatParser
from tandem.server.protocol.openai import Tool, ToolChoice

__all__ = ["Parsing", "allow_reasoning", "list_active_tools", "make_call_id", "plan_parsing"]


@dataclass(frozen=True, slots=True)
class Parsing:
    """What makes parsers, and the special tokens that they have to see."""

    make_parser: Callable[[], OutputParser]
    shown_ids: frozenset[int]


def list_active_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools that an answer may call."""
    return () if tools is None or choice == "none" else tools


def make_call_id() -> str:
    """Return a fresh id of a tool call, for a model that writes none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def plan_parsing(
    encoder: PromptEncoder, prompt: str, tools: Sequence[Tool], *, splits_reasoning: bool
) -> Parsing | None:
    """Return what the answers to a prompt need; None if all of them is text.

    Args:
        encoder: knows the form that the model writes.
        prompt: as rendered; its end tells whether it has opened reasoning.
        tools: those that may be called.
        splits_reasoning: whether reasoning is told apart.
    """
    form = encoder.call_form if tools else encoder.form
    if form is None or not (tools or splits_reasoning):
        return None
    is_thinking = _has_opened(form, prompt)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}

    def make_parser() -> OutputParser:
        return FormatParser(
            form,
            schemas if tools else None,
            splits_reasoning=splits_reasoning,
            is_thinking=is_thinking,
        )

    return Parsing(make_parser, encoder.mark_ids)


def _has_opened(form: OutputFormat, prompt: str) -> bool:
    """Return whether the end of a prompt has begun the reasoning of its answer."""
    return form.think is not None and prompt.rstrip().endswith(form.think[0].rstrip())


def allow_reasoning(encoder: PromptEncoder, prompt: str, grammar: str) -> str:
    """Return a grammar that holds for the answer behind the reasoning, if there is any."""
    form = encoder.form
    if form is None or form.think is None:
        return grammar
    open_mark, close_mark = (mark.strip() for mark in form.think)
    if _has_opened(form, prompt):
        begin, think = "think", ""
    elif encoder.may_think and not prompt.rstrip().endswith(close_mark):
        begin, think = "think?", write_literal(encoder.tokenizer, open_mark) + " "
    else:
        return grammar
    special = encoder.tokenizer.find_id(close_mark)
    if special in encoder.tokenizer.special_ids:
        rest = f"rest: /(.|\\n)*/ <[{special}]>\n"
    else:
        pattern = re.escape(close_mark).replace("/", "\\/")
        rest = f"rest[lazy]: /(.|\\n)*{pattern}/\n"
    rules = f"start: {begin} @body\nthink: {think}rest /[ \\n]*/\n{rest}"
    return put_behind(rules, grammar)
