"""Conversion of a conversation's messages and tools to the form that chat templates take."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.tokenizing.schemas.json_text import parse_begun_object, parse_json
from tandem.server.outputs.formats import OutputFormat
from tandem.server.protocol.openai import InputCall, InputMessage, Tool

__all__ = ["plain_messages", "plain_tools", "tell_tools"]


def plain_messages(
    messages: Sequence[InputMessage], form: OutputFormat, *, knows_tools: bool = True
) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect: dictionaries with text content.

    Text parts are joined by line breaks. The role "developer" becomes "system", its older name,
    which templates know.

    Args:
        messages: messages of the conversation.
        form: format in which the model writes tool calls.
        knows_tools: True if the template can write earlier tool calls; otherwise they become text.

    Raises:
        ConfigError: a message without content, or a text part without text.
        UnsupportedError: a part that is not text.
    """
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = "system" if message.role == "developer" else message.role
        calls = message.tool_calls or []
        if calls and not message.content:
            content = form.empty_content if knows_tools else ""
        else:
            content = _plain_content(message, place)
        entry: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                entry[name] = value
        reasoning = message.reasoning_content
        if reasoning is None:
            reasoning = message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if calls:
            names |= {call.id: call.function.name for call in calls if call.id is not None}
            written = [_plain_call(call, as_text=form.has_text_arguments) for call in calls]
            if knows_tools:
                entry["tool_calls"] = written
            else:
                entry["content"] = "\n".join([*filter(None, [content]), *map(_write_call, written)])
        if role == "tool" and message.tool_call_id in names:
            # Chat templates of some families print the tool's name, which OpenAI's clients leave
            # out of tool messages: the name is copied from the call.
            entry.setdefault("name", names[message.tool_call_id])
        plain.append(entry)
    return plain


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates expect."""
    return [msgspec.to_builtins(tool) for tool in tools]


def tell_tools(plain: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> None:
    """Describe the tools in the system message, for a chat template without support for tools.

    The wording is that of Hermes and Qwen, on which many models were trained.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
        f"provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n"
        "</tools>\n\nFor each function call, return a json object with function name and arguments "
        'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
        '"arguments": <args-json-object>}\n</tool_call>'
    )
    if plain and plain[0]["role"] == "system":
        plain[0] = plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}
    else:
        plain.insert(0, {"role": "system", "content": text})


def _plain_call(call: InputCall, *, as_text: bool) -> dict[str, Any]:
    arguments = _read_given(call.function.arguments, as_text=as_text)
    entry: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        entry["id"] = call.id
    return entry


def _read_given(
    given: str | dict[str, Any] | list[Any] | None, *, as_text: bool
) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as an object, which is what templates iterate over,
    or as its JSON.

    No arguments are written in many ways: as nothing, null or an empty list, itself or as JSON. Of
    a text that is no object, as of a call that was cut off at the token limit, the object is what
    is whole, and the JSON the text itself.
    """
    arguments = given if isinstance(given, dict) else {}
    if isinstance(given, str) and given.strip() not in ("", "null", "[]"):
        if as_text and not _is_object(given):
            return given
        arguments = parse_begun_object(given)
    return json.dumps(arguments, ensure_ascii=False) if as_text else arguments


def _is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def _write_call(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"


def _plain_content(message: InputMessage, place: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    field = f"{place}.content"
    if not content:
        raise ConfigError("server.plain_messages", f"{field} is missing or empty", field=field)
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedError(
                "server.plain_messages",
                f"{field}[{index}].type is {part.type[:100]!r}: only text is supported",
                field=f"{field}[{index}].type",
            )
        if part.text is None:
            raise ConfigError(
                "server.plain_messages",
                f"{field}[{index}].text is missing",
                field=f"{field}[{index}].text",
            )
        texts.append(part.text)
    return "\n".join(texts)
