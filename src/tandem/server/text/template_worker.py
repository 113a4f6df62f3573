"""The child process that renders a checkpoint's chat template; run as a file of its own.

A template is untrusted code from the internet. jinja2's sandbox keeps it from Python's internals,
and this process limits its memory and time: its address space is limited here, its parent kills it
at the deadline, its environment is empty. The first frame has two templates, the second for
conversations with tools, in msgpack; the variables of a conversation are JSON.
"""

import datetime
import json
import sys
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.server.text.worker_frames import answer, limit_memory, read_frame, write_answer

MAX_MEMORY_BYTES = 1 << 29
"""Limit of the address space in bytes; rendering takes a few MiB beside Python's own 100 or so."""


class GenerationBlock(Extension):
    """The tag ``{% generation %}``, which marks an assistant's text for training; it renders as its
    body.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set.

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the opening and the closing tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """Raise an error from a template, which refuses a conversation in this way."""
    raise jinja2.TemplateError(message)


def dump_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return a value as plain JSON; jinja2's own filter would escape it for HTML."""
    kept = {k: options[k] for k in ("separators", "sort_keys") if k in options}
    return json.dumps(value, ensure_ascii=options.get("ensure_ascii", False), indent=indent, **kept)


def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the settings and functions that checkpoints expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def render(
    template: jinja2.Template,
    variables: dict[str, Any],
    max_chars: int,
    now: datetime.datetime,
    zone: str,
) -> str:
    """Return the rendered text. Raises an error as soon as it is longer than ``max_chars``.

    Templates write the date ``now`` into the system prompt, by ``strftime_now(format)``; ``zone``
    is the name of its time zone.
    """
    now = now.replace(tzinfo=datetime.timezone(now.utcoffset() or datetime.timedelta(), zone))
    variables = {"strftime_now": now.strftime} | variables
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(**variables):
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            raise jinja2.TemplateError(f"the conversation is longer than {max_chars} characters")
    return "".join(parts)


def main() -> None:
    """Compile the templates that the first frame brings, then render one conversation for each
    further frame.
    """
    limit_memory(MAX_MEMORY_BYTES)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    compiled: list[jinja2.Template] = []

    def compile_first(first: bytes) -> str:
        sources = msgspec.msgpack.decode(first, type=list[str])
        compiled.extend([compile_template(source) for source in sources])
        return ""

    frame = read_frame(source)
    if frame is None:
        return
    text = frame
    reply = answer(lambda: compile_first(text))
    write_answer(target, reply)
    while compiled and (frame := read_frame(source)) is not None:
        given = msgspec.json.decode(
            frame, type=tuple[bool, dict[str, Any], int, datetime.datetime, str]
        )
        reply = answer(lambda g=given: render(compiled[g[0]], *g[1:]))
        write_answer(target, reply)


if __name__ == "__main__":
    main()
