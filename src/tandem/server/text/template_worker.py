"""The child process that renders a checkpoint's chat template; run as a file of its own.

A template is untrusted code from the internet. jinja2's sandbox keeps it from Python's internals,
and this process limits its memory and time: its address space is limited here, its parent kills it
at the deadline, its environment is empty. The first frame is the template, in msgpack; the
variables of a conversation are JSON.
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


def strftime_now(form: str) -> str:
    """Return the local time in the given format; templates write the date into the system
    prompt.
    """
    return datetime.datetime.now().astimezone().strftime(form)


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
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    """Return the rendered text. Raises an error as soon as it is longer than ``max_chars``."""
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(**variables):
        parts.append(part)
        num_chars += len(part)
        if num_chars > max_chars:
            raise jinja2.TemplateError(f"the conversation is longer than {max_chars} characters")
    return "".join(parts)


def main() -> None:
    """Compile the template that the first frame brings, then render one conversation for each
    further frame.
    """
    limit_memory(MAX_MEMORY_BYTES)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    compiled: list[jinja2.Template] = []

    def compile_first(first: bytes) -> str:
        compiled.append(compile_template(msgspec.msgpack.decode(first, type=str)))
        return ""

    frame = read_frame(source)
    if frame is None:
        return
    text = frame
    reply = answer(lambda: compile_first(text))
    write_answer(target, reply)
    while compiled and (frame := read_frame(source)) is not None:
        variables, max_chars = msgspec.json.decode(frame, type=tuple[dict[str, Any], int])
        reply = answer(lambda v=variables, m=max_chars: render(compiled[0], v, m))
        write_answer(target, reply)


if __name__ == "__main__":
    main()
