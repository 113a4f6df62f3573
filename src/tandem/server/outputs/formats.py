"""The formats in which families of models write reasoning and tool calls, as one table.

A checkpoint's format is detected from the text of its chat template, which writes earlier tool
calls with the same marks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.server.outputs.call_reader import CallReader, read_json_call, read_value
from tandem.server.outputs.gemma import read_gemma_call
from tandem.server.outputs.parameters import ParameterMarks, read_parameters
from tandem.server.outputs.source import Reading

__all__ = [
    "DSML_MARKS",
    "FORMATS",
    "GLM_MARKS",
    "MINIMAX_MARKS",
    "QWEN_MARKS",
    "OutputFormat",
    "detect_format",
    "read_more_llama",
]

CallSyntax = Callable[[CallReader], Reading[bool]]
"""Parser of a tool call after the mark that begins it; it returns False, with nothing emitted, if
the text is no call.
"""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The output format of a family of models.

    Args:
        signs: texts all of which its chat templates contain; empty for a format that no template
            shows.
        think: the marks around reasoning; None: the format has none.
        calls: syntax of a call, by the mark that begins it.
        skipped: marks around calls that carry no information and are dropped.
        inner: marks inside calls.
        closers: marks that end a call; one too many is dropped.
        bare_start: text with which, white space left out, an answer may begin that is a call
            without a mark; empty: there is none.
        is_harmony: True for messages with channels; see ``HarmonyParser``.
        has_text_arguments: True if templates take the arguments of earlier calls as text, not as
            object.
        empty_content: content of an assistant's message that has only calls.
    """

    signs: tuple[str, ...] = ()
    think: tuple[str, str] | None = ("<think>", "</think>")
    calls: Mapping[str, CallSyntax] | None = None
    skipped: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    bare_start: str = ""
    is_harmony: bool = False
    has_text_arguments: bool = False
    empty_content: str | None = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts with a meaning in this format (marks), some of which are special tokens."""
        return (*(self.think or ()), *(self.calls or ()), *self.skipped, *self.inner)


QWEN_MARKS = ParameterMarks(
    "<parameter=",
    (">",),
    "</parameter>",
    "</function>",
    "<function=",
    ">",
    outer=("<tool_call>", "</tool_call>"),
)
GLM_MARKS = ParameterMarks(
    "<arg_key>",
    ("</arg_key>\n<arg_value>", "</arg_key><arg_value>"),
    "</arg_value>",
    "</tool_call>",
    "<tool_call>",
    "\n",
    is_on_lines=False,
)
MINIMAX_MARKS = ParameterMarks(
    '<parameter name="',
    ('">',),
    "</parameter>",
    "</invoke>",
    '<invoke name="',
    '">',
    outer=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_DSML_AROUND = (
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
)
_DSML_TEXT = '" string="true">'
DSML_MARKS = ParameterMarks(
    '<｜DSML｜parameter name="',
    (_DSML_TEXT, '" string="false">'),
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    '<｜DSML｜invoke name="',
    '">',
    outer=_DSML_AROUND,
    text_open=_DSML_TEXT,
    is_on_lines=False,
)


def _read_qwen(reader: CallReader) -> Reading[bool]:
    """Read a call in JSON or XML form; models with one template have been seen to write both."""
    yield from reader.source.skip_space()
    if (yield from reader.source.starts_with("<function=")):
        reader.source.take(len("<function="))
        return (yield from _read_qwen_function(reader))
    return (yield from read_json_call(reader, ("</tool_call>",)))


def _read_qwen_function(reader: CallReader) -> Reading[bool]:
    return (yield from _read_invoke(reader, QWEN_MARKS))


def _read_invoke(reader: CallReader, marks: ParameterMarks) -> Reading[bool]:
    """Read the name of a call and its parameters; return False if no name is there."""
    end = marks.call_name_end
    name, mark = yield from reader.source.collect_until((end, "\n", marks.close))
    if mark != end or not name.strip():
        return False
    reader.start(name.strip())
    yield from read_parameters(reader, marks)
    return True


def _read_minimax(reader: CallReader) -> Reading[bool]:
    return (yield from _read_invoke(reader, MINIMAX_MARKS))


def _read_dsml(reader: CallReader) -> Reading[bool]:
    return (yield from _read_invoke(reader, DSML_MARKS))


def _read_glm(reader: CallReader) -> Reading[bool]:
    source, close = reader.source, "</tool_call>"
    yield from source.skip_space()
    # In GLM's form a function's name ends at a line break, at the first argument's mark or at the
    # end of the call.
    name = ""
    while True:
        for mark in (GLM_MARKS.open, close, "\n"):
            if (yield from source.starts_with(mark)):
                break
        else:
            if not (yield from source.wait_for(1)):
                return False
            name += source.take(1)
            continue
        break
    if not name.strip() or "{" in name:
        return False
    reader.start(name.strip())
    yield from read_parameters(reader, GLM_MARKS)
    return True


_DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI_ENDS = ("<|tool_call_end|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>")


def _read_deepseek_v3(reader: CallReader) -> Reading[bool]:
    """Read ``function<｜tool▁sep｜>NAME``, a fence and the arguments."""
    source, close = reader.source, "<｜tool▁call▁end｜>"
    _, mark = yield from source.collect_until(("<｜tool▁sep｜>", close))
    if mark is None or mark == close:
        return False
    name, mark = yield from source.collect_until(("\n", close))
    if mark != "\n" or not name.strip():
        return False
    reader.start(name.strip())
    yield from source.skip_space()
    if (yield from source.starts_with("```json")):
        source.take(len("```json"))
    yield from read_value(reader, _DEEPSEEK_ENDS)
    yield from _pass_rest(reader, _DEEPSEEK_ENDS, dropped="`")
    return True


def _read_deepseek_v31(reader: CallReader) -> Reading[bool]:
    """Read ``NAME<｜tool▁sep｜>`` and the arguments."""
    head_end, close = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    name, mark = yield from reader.source.collect_until((head_end, close))
    if mark != head_end or not name.strip():
        return False
    reader.start(name.strip())
    yield from read_value(reader, _DEEPSEEK_ENDS)
    yield from _pass_rest(reader, _DEEPSEEK_ENDS)
    return True


def _read_kimi(reader: CallReader) -> Reading[bool]:
    """Read ``functions.NAME:INDEX``, which is the id, and the arguments."""
    source, close = reader.source, "<|tool_call_end|>"
    head, mark = yield from source.collect_until(("<|tool_call_argument_begin|>", close))
    name = head.strip().removeprefix("functions.").rpartition(":")[0] or head.strip()
    if mark is None or mark == close or not name:
        return False
    reader.start(name, head.strip())
    yield from read_value(reader, _KIMI_ENDS)
    yield from _pass_rest(reader, _KIMI_ENDS)
    return True


def _pass_rest(reader: CallReader, ends: tuple[str, ...], dropped: str = " ") -> Reading[None]:
    """Append the text between a call's arguments and its closing mark to the arguments, without
    white space.

    Args:
        reader: its source is positioned behind the arguments.
        ends: the closing mark, and marks that follow it where it has been left out.
        dropped: characters that are no part of the arguments.
    """
    source = reader.source
    rest, mark = yield from source.collect_until(ends)
    if mark is None and reader.has_arguments:
        # Without any mark, text after the arguments belongs to no call. At its end the text may
        # have been cut within the closing mark.
        left = rest.strip(dropped + " \n")
        if left and not ends[0].startswith(left):
            source.give_back(rest)
        return
    rest = rest.strip().strip(dropped).strip()
    if rest != "null":
        reader.add(rest)
    reader.finish()
    if mark is not None and mark != ends[0]:
        source.give_back(mark)


def _read_mistral(reader: CallReader) -> Reading[bool]:
    """Read a list of JSON calls, or one call written as ``NAME[ARGS]{...}``."""
    source = reader.source
    yield from source.skip_space()
    if (yield from source.starts_with("[{")):
        source.take(1)
        num_calls = reader.num_calls
        while (yield from read_json_call(reader)):
            yield from source.skip_space()
            if not (yield from source.starts_with(",")):
                break
            source.take(1)
        if reader.num_calls == num_calls:
            return False
        yield from source.skip_space()
        if (yield from source.starts_with("]")):
            source.take(1)
        return True
    name, mark = yield from source.collect_until(("[ARGS]", "[CALL_ID]", "{", "\n"))
    call_id = ""
    if mark == "[CALL_ID]":
        call_id, mark = yield from source.collect_until(("[ARGS]", "{"))
    if mark not in ("[ARGS]", "{") or not name.strip():
        return False
    if mark == "{":
        source.give_back(mark)
    reader.start(name.strip(), call_id.strip() or None)
    yield from read_value(reader, ("[TOOL_CALLS]",))
    reader.finish()
    return True


def _read_llama(reader: CallReader) -> Reading[bool]:
    """Read JSON calls separated by semicolons, as Llama writes them; return False if there is
    none.
    """
    if not (yield from read_json_call(reader)):
        return False
    yield from read_more_llama(reader)
    return True


def read_more_llama(reader: CallReader) -> Reading[None]:
    """Read the calls after the first one, separated by semicolons."""
    while True:
        yield from reader.source.skip_space()
        if not (yield from reader.source.starts_with(";")):
            return
        reader.source.record(reader.source.take(1))
        if not (yield from read_json_call(reader)):
            left = reader.source.recall()
            reader.left = "" if left.strip() == ";" else left
            return


FORMATS: Mapping[str, OutputFormat] = {
    "harmony": OutputFormat(
        ("<|channel|>", "<|message|>"),
        think=None,
        inner=(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ),
        is_harmony=True,
    ),
    "deepseek_v32": OutputFormat(
        ("｜DSML｜",),
        calls={'<｜DSML｜invoke name="': _read_dsml},
        skipped=_DSML_AROUND,
        closers=("</｜DSML｜invoke>", "</｜DSML｜parameter>"),
    ),
    "deepseek_v3": OutputFormat(
        ("<｜tool▁sep｜>", "```json"),
        calls={"<｜tool▁call▁begin｜>": _read_deepseek_v3},
        skipped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        closers=("<｜tool▁call▁end｜>",),
        has_text_arguments=True,
        empty_content=None,
    ),
    "deepseek_v31": OutputFormat(
        ("<｜tool▁sep｜>",),
        calls={"<｜tool▁call▁begin｜>": _read_deepseek_v31},
        skipped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        inner=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        closers=("<｜tool▁call▁end｜>",),
        has_text_arguments=True,
        empty_content=None,
    ),
    "kimi_k2": OutputFormat(
        ("<|tool_calls_section_begin|>",),
        calls={"<|tool_call_begin|>": _read_kimi},
        skipped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        closers=("<|tool_call_end|>",),
        has_text_arguments=True,
    ),
    "glm": OutputFormat(
        ("<arg_key>",),
        calls={"<tool_call>": _read_glm},
        inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        closers=("</tool_call>", "</arg_value>"),
    ),
    "minimax_m2": OutputFormat(
        ("<minimax:tool_call>",),
        calls={'<invoke name="': _read_minimax},
        skipped=("<minimax:tool_call>", "</minimax:tool_call>"),
        closers=("</invoke>", "</parameter>"),
    ),
    "gemma4": OutputFormat(
        ("<|tool_call>",),
        think=("<|channel>thought\n", "<channel|>"),
        calls={"<|tool_call>": read_gemma_call},
        inner=('<|"|>', "<tool_call|>"),
        closers=("<tool_call|>",),
    ),
    "qwen_xml": OutputFormat(
        ("<function=",),
        calls={"<tool_call>": _read_qwen, "<function=": _read_qwen_function},
        inner=("</tool_call>",),
        closers=("</tool_call>", "</function>", "</parameter>"),
        bare_start='{"name":"',
    ),
    "qwen": OutputFormat(
        ("<tool_call>",),
        calls={"<tool_call>": _read_qwen},
        inner=("</tool_call>",),
        closers=("</tool_call>", "</function>", "</parameter>"),
        bare_start='{"name":"',
    ),
    "mistral": OutputFormat(
        ("[TOOL_CALLS]",),
        think=("[THINK]", "[/THINK]"),
        calls={"[TOOL_CALLS]": _read_mistral},
        inner=("[ARGS]", "[CALL_ID]"),
    ),
    "llama3": OutputFormat(
        ("<|start_header_id|>", "ipython"),
        calls={"<|python_tag|>": _read_llama},
        bare_start="{",
    ),
    "think": OutputFormat(("</think>",)),
}
"""Formats by name, the more specific first: a template's format is the first whose signs it
contains."""


def detect_format(template: str) -> str | None:
    """Return the name of the format that a chat template writes; None if it has no known one."""
    for name, form in FORMATS.items():
        if all(sign in template for sign in form.signs):
            return name
    return None
