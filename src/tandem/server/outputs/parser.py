"""The parser of a generation's text, according to the output format of its model."""

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from tandem.server.outputs.call_reader import CallReader, read_json_call, read_value
from tandem.server.outputs.deltas import Delta, ReasoningDelta, TextDelta, join_deltas
from tandem.server.outputs.formats import OutputFormat, read_more_llama
from tandem.server.outputs.source import Reading, TextSource

__all__ = ["FormatParser"]

_CHANNEL = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")
_RECIPIENT = re.compile(r"to=(?P<name>[^\s<]+)")


class _Passage:
    """Text of one kind (answer or reasoning), from which white space next to marks is dropped."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._is_at_mark = False
        """True if no text has come since the mark that began the passage, so that leading white
        space is dropped.
        """
        self._held = ""

    def add(self, text: str) -> None:
        """Add text; white space at its end is held back until more follows."""
        if self._is_at_mark:
            text = text.lstrip()
        if not text:
            return
        self._is_at_mark = False
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)

    def cut(self) -> None:
        """Drop the white space that was held back, because a mark of the format follows the
        text.
        """
        self._held = ""
        self._is_at_mark = True

    def end(self) -> None:
        """Emit the white space that was held back, because the whole text has ended."""
        held, self._held = self._held, ""
        if held:
            self._emit(held)


class FormatParser:
    """A parser that splits a text into answer, reasoning and tool calls.

    A call whose name is malformed is treated as text; one that is incomplete later is a call with
    the arguments that came. Calls are also found in reasoning, because models forget to end it.

    Args:
        form: output format of the model.
        tools: JSON Schema of the parameters by name of the tool; None: calls are treated as text.
        splits_reasoning: True if reasoning is separated from the answer.
        is_thinking: True if the text begins inside reasoning, which the prompt has opened.
    """

    def __init__(
        self,
        form: OutputFormat,
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        splits_reasoning: bool = True,
        is_thinking: bool = False,
    ) -> None:
        self._form = form
        self._tools = tools
        self._splits_reasoning = splits_reasoning
        self._source = TextSource()
        self._deltas: list[Delta] = []
        self._reader = CallReader(self._source, self._deltas.append, tools or {})
        self._text = _Passage(lambda text: self._deltas.append(TextDelta(text)))
        self._reasoning = _Passage(lambda text: self._deltas.append(ReasoningDelta(text)))
        self._is_thinking = is_thinking and splits_reasoning and form.think is not None
        self._run: Generator[None, None, None] | None
        self._run = self._parse_harmony() if form.is_harmony else self._parse()

    def feed(self, text: str) -> list[Delta]:
        """Add text; return the parts of the answer that are now certain."""
        self._source.push(text)
        return self._advance()

    def flush(self) -> list[Delta]:
        """End the text; return the parts that were held back."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Delta]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        deltas = join_deltas(self._deltas)
        self._deltas.clear()
        return deltas

    def _parse(self) -> Reading[None]:
        form, source = self._form, self._source
        if self._is_thinking:
            self._reasoning.cut()
        elif self._tools is not None and form.is_bare:
            yield from self._read_bare()
        calls = form.calls if self._tools is not None and form.calls is not None else {}
        skipped = form.skipped if calls else ()
        think = form.think if self._splits_reasoning else None
        may_think = think is not None
        while True:
            if think is not None and may_think and not self._is_thinking:
                # The opening mark of reasoning counts only at the start of the answer: later on, an
                # answer may speak about the mark itself.
                yield from self._open_reasoning(think[0])
            may_think = False
            marks = [*calls, *skipped]
            if think is not None and self._is_thinking:
                marks.append(think[1])
            passage = self._reasoning if self._is_thinking else self._text
            if not marks:
                marks.append("\0")  # Without marks all text is plain text.
            mark = yield from source.read_until(marks, passage.add)
            if mark is None:
                passage.end()
                return
            if mark in calls:
                source.record(mark)
                is_call = yield from calls[mark](self._reader)
                if is_call:
                    passage.cut()
                    may_think = think is not None
                self._take_left(passage)
                continue
            passage.cut()
            if think is not None and mark == think[1]:
                self._is_thinking = False
                self._text.cut()

    def _open_reasoning(self, mark: str) -> Reading[None]:
        source = self._source
        source.record("")
        yield from source.skip_space()
        if (yield from source.starts_with(mark)):
            source.take(len(mark))
            source.recall()
            self._is_thinking = True
            self._reasoning.cut()
        else:
            self._take_left(self._text)

    def _take_left(self, passage: _Passage) -> None:
        """Treat text that was read as a call, and turned out to be none, as text of the passage."""
        text = self._source.recall() + self._reader.left
        self._reader.left = ""
        passage.add(text)

    def _read_bare(self) -> Reading[None]:
        source = self._source
        source.record("")
        yield from source.skip_space()
        if (yield from source.starts_with("{")):
            is_call = yield from read_json_call(self._reader, only_known=True)
            if is_call:
                yield from read_more_llama(self._reader)
                self._text.cut()
        self._take_left(self._text)

    def _parse_harmony(self) -> Reading[None]:
        """Read messages in the Harmony format: a header with channel and recipient,
        ``<|message|>``, text, an end mark.
        """
        source = self._source
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        while True:
            source.record("")
            yield from source.skip_space()
            is_header = False
            for sign in ("<|channel|>", "<|start|>", "<|message|>", "assistant", "to="):
                is_header = is_header or (yield from source.starts_with(sign))
            if not is_header:
                # Text without a Harmony header is plain text: the model does not use this format,
                # or its output ended.
                self._take_left(self._text)
                mark = yield from source.read_until((*ends, "<|channel|>"), self._text.add)
                if mark is None:
                    self._text.end()
                    return
                if mark == "<|channel|>":
                    source.give_back(mark)
                continue
            header, mark = yield from source.collect_until(("<|message|>",))
            if mark is None:
                self._take_left(self._text)
                self._text.end()
                return
            source.recall()
            yield from self._read_message(header, ends)

    def _read_message(self, header: str, ends: tuple[str, ...]) -> Reading[None]:
        source = self._source
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient["name"] if recipient is not None else ""
        if name.startswith("functions.") and self._tools is not None:
            self._reader.start(name.removeprefix("functions."))
            yield from read_value(self._reader, ends)
            rest, _ = yield from source.collect_until(ends)
            self._reader.add(rest.strip())
            self._text.cut()
            return
        is_reasoning = channel is not None and channel["name"] == "analysis"
        passage = self._text
        if is_reasoning and self._splits_reasoning:
            passage = self._reasoning
        passage.cut()
        mark = yield from source.read_until(ends, passage.add)
        if mark is None:
            passage.end()
        else:
            passage.cut()
