"""Conversion of the Responses API's items, tools and choices to those of chat completions."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.server.protocol import openai as oai
from tandem.server.protocol.responses import (
    InputItem,
    InputPart,
    OutputItem,
    ResponsesRequest,
    ResponseTool,
    ToolChoiceObject,
)

__all__ = ["hide_reasoning", "read_answer", "read_choice", "read_items", "read_tools"]

_BUILT_IN_ITEMS = frozenset(
    {
        "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call",
        "image_generation_call", "local_shell_call", "local_shell_call_output",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
        "web_search_call",
    }
)  # fmt: skip
"""Types of items of tools that run at OpenAI; they are dropped from a history."""
_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_HIDDEN = "tandem:"
"""Prefix of the ``encrypted_content`` of our reasoning items, followed by their text in base64.
Clients that store nothing on the server send it back instead of the text."""
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_encode = msgspec.json.Encoder().encode


def read_items(items: str | Sequence[InputItem]) -> list[oai.InputMessage]:
    """Return the chat messages for items; consecutive items of the model become one message.

    Raises:
        ConfigError: an item lacks a field that its type needs.
        UnsupportedError: an item, or a part of one, that is neither text nor of a tool.
    """
    if isinstance(items, str):
        return [oai.InputMessage("user", items)]
    turns = _Turns()
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    return turns.messages


def read_answer(items: Sequence[OutputItem]) -> list[oai.InputMessage]:
    """Return the chat messages for an answer's items, as part of the next request's history."""
    return read_items(_decode_items(_encode(items)))


class _Turns:
    """A collector that converts a conversation's items (Responses API) to chat messages."""

    def __init__(self) -> None:
        self.messages: list[oai.InputMessage] = []
        self._turn: oai.InputMessage | None = None
        """The model's message to which further items (text, reasoning, tool calls) may be added;
        None: none is open.
        """

    def add(self, item: InputItem, place: str) -> None:
        """Add an item of the conversation; ``place`` is its path in the body, for errors."""
        match item.type:
            case None | "message":
                self._add_message(item, place)
            case "reasoning":
                self._add_reasoning(item, place)
            case "function_call":
                self._add_call(item, item.arguments or "", place)
            case "custom_tool_call":
                text = json.dumps({"input": item.input or ""}, ensure_ascii=False)
                self._add_call(item, text, place)
            case "function_call_output" | "custom_tool_call_output":
                self._turn = None
                text = _join_texts(item.output, f"{place}.output")
                self.messages.append(oai.InputMessage("tool", text, tool_call_id=item.call_id))
            case kind if kind in _BUILT_IN_ITEMS:
                pass
            case kind:
                what = f"{place}.type is {kind!r}: messages, reasoning and tools alone are known"
                raise UnsupportedError("server.responses", what, field=f"{place}.type")

    def _add_message(self, item: InputItem, place: str) -> None:
        if item.role is None:
            field = f"{place}.role"
            raise ConfigError("server.responses", f"{field} is missing", field=field)
        if item.content is None:
            field = f"{place}.content"
            raise ConfigError("server.responses", f"{field} is missing", field=field)
        text = _join_texts(item.content, f"{place}.content")
        if item.role != "assistant":
            self._turn = None
            self.messages.append(oai.InputMessage(item.role, text))
            return
        turn = self._turn
        if turn is None or turn.tool_calls or turn.content:
            turn = self._begin()
        turn.content = text

    def _add_reasoning(self, item: InputItem, place: str) -> None:
        text = _join_texts(item.content, f"{place}.content") or _reveal(item.encrypted_content)
        text = text or _join_texts(item.summary, f"{place}.summary")
        if not text:
            return
        turn = self._turn
        if turn is None or turn.tool_calls or turn.content:
            turn = self._begin()
        known = turn.reasoning_content
        turn.reasoning_content = text if known is None else f"{known}\n{text}"

    def _add_call(self, item: InputItem, arguments: str, place: str) -> None:
        if not item.name:
            field = f"{place}.name"
            raise ConfigError("server.responses", f"{field} is missing", field=field)
        turn = self._begin() if self._turn is None else self._turn
        call = oai.InputCall(oai.InputFunction(item.name, arguments), item.call_id)
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _begin(self) -> oai.InputMessage:
        self._turn = oai.InputMessage("assistant", "")
        self.messages.append(self._turn)
        return self._turn


def _join_texts(content: str | Sequence[InputPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in _TEXTS:
            texts.append(part.text or "")
        else:
            field = f"{place}[{index}].type"
            what = f"{field} is {part.type!r}: only text is supported"
            raise UnsupportedError("server.responses", what, field=field)
    return "\n".join(texts)


def hide_reasoning(text: str) -> str:
    """Return reasoning as ``encrypted_content``, which clients send back without reading it."""
    return _HIDDEN + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _reveal(content: str | None) -> str:
    """Return the reasoning in ``encrypted_content``; empty if another server wrote it."""
    if content is None or not content.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""


def read_tools(tools: Sequence[ResponseTool] | None) -> list[oai.Tool]:
    """Return the tools that a model may call here; tools that run at OpenAI are left out.

    Raises:
        ConfigError: a tool has no name.
    """
    known: list[oai.Tool] = []
    for index, tool in enumerate(tools or ()):
        if tool.type not in ("function", "custom"):
            continue
        if tool.name is None:
            field = f"tools[{index}].name"
            raise ConfigError("server.responses", f"{field} is missing", field=field)
        if tool.type == "custom":
            known.append(oai.Tool(_write_custom(tool.name, tool)))
        else:
            parameters = tool.parameters or {"type": "object"}
            known.append(
                oai.Tool(oai.Function(tool.name, tool.description, parameters, tool.strict))
            )
    return known


def _write_custom(name: str, tool: ResponseTool) -> oai.Function:
    """Return a tool whose input is a text, as a function with one parameter."""
    form = tool.format or {}
    description = tool.description or ""
    if form.get("type") == "grammar":
        syntax, definition = form.get("syntax", "lark"), form.get("definition", "")
        description += f"\n\nThe input must match this grammar ({syntax}):\n{definition}"
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return oai.Function(name, description.strip() or None, parameters)


def read_choice(
    request: ResponsesRequest, tools: list[oai.Tool]
) -> tuple[oai.ToolChoice | None, list[oai.Tool]]:
    """Return the choice of tool in the form of chat completions (None without one, or without
    tools), and the tools that it allows.

    Raises:
        UnsupportedError: the choice is a tool that runs at OpenAI.
    """
    choice = request.tool_choice
    if not isinstance(choice, ToolChoiceObject):
        return (choice if tools else None), tools
    if choice.type in ("function", "custom"):
        return oai.NamedChoice(oai.NamedFunction(choice.name or "")), tools
    if choice.type == "allowed_tools":
        names = {tool.name for tool in choice.tools or ()}
        left = [tool for tool in tools if tool.function.name in names]
        return choice.mode or "auto", left
    what = f"tool_choice.type is {choice.type!r}: function, custom and allowed_tools are known"
    raise UnsupportedError("server.responses", what, field="tool_choice.type")
