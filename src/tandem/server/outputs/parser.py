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
    """Text of one kind (answer or reasoning), from which white space next to marks is dropped.
    Where a mark stands between two parts of the text, so does the white space beside it, or else a
    line break.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._is_at_mark = False
        """True if no text has come since the mark that began the passage."""
        self._has_text = False
        self._before = ""
        """White space before the mark."""
        self._held = ""

    def add(self, text: str) -> None:
        """Add text; white space at its end is held back until more follows."""
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not kept:
            return
        if self._is_at_mark:
            begun = kept.lstrip()
            space = kept[: len(kept) - len(begun)]
            kept = ((self._before or space or "\n") if self._has_text else "") + begun
        self._is_at_mark, self._has_text = False, True
        self._before = ""
        self._emit(kept)

    def cut(self) -> None:
        """Hold back the white space at the end, because a mark of the format follows the text."""
        self._before = self._before or self._held
        self._held = ""
        self._is_at_mark = True

    def end(self) -> None:
        """Emit the white space that was held back, because the whole text has ended."""
        held, self._held = self._held, ""
        if held and not self._is_at_mark:
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
        is_forced: True if a grammar allows nothing but calls beside reasoning: of one that was cut
            off before its name, nothing is text.
    """

    def __init__(
        self,
        form: OutputFormat,
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        splits_reasoning: bool = True,
        is_thinking: bool = False,
        is_forced: bool = False,
    ) -> None:
        self._form = form
        self._is_forced = is_forced
        self._tools = tools
        self._splits_reasoning = splits_reasoning
        self._source = TextSource()
        self._deltas: list[Delta] = []
        self._reader = CallReader(self._source, self._deltas.append, tools or {})
        self._text = _Passage(self._emit_text)
        self._reasoning = _Passage(lambda text: self._deltas.append(ReasoningDelta(text)))
        self._is_thinking = is_thinking and splits_reasoning and form.think is not None
        self._run: Generator[None, None, None] | None
        self._run = self._parse_harmony() if form.is_harmony else self._parse()

    def feed(self, text: str) -> list[Delta]:
        """Add text; return the parts of the answer that are now certain."""
        self._source.push(text)
        return self._advance()

    def flush(self, *, is_cut: bool) -> list[Delta]:
        """End the text; return the parts that were held back. See ``OutputParser.flush``."""
        self._source.end(is_cut=is_cut)
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

    def _emit_text(self, text: str) -> None:
        # Where only calls are allowed, text at the end of what was cut off is the head of a call.
        if not (self._is_forced and self._source.is_cut):
            self._deltas.append(TextDelta(text))

    def _parse(self) -> Reading[None]:
        form, source = self._form, self._source
        if self._is_thinking:
            self._reasoning.cut()
        calls = form.calls if self._tools is not None and form.calls is not None else {}
        skipped = form.skipped if calls else ()
        think = form.think if self._splits_reasoning else None
        may_think = think is not None
        may_be_bare = bool(calls and form.bare_start)
        while True:
            if think is not None and may_think and not self._is_thinking:
                # The opening mark of reasoning counts only at the start of the answer: later on, an
                # answer may speak about the mark itself.
                yield from self._open_reasoning(think[0])
            may_think = False
            if may_be_bare and not self._is_thinking:
                may_be_bare = False
                yield from self._read_bare()
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
                yield from self._skip_again(mark)
                is_call = yield from calls[mark](self._reader)
                if is_call:
                    passage.cut()
                    may_think = think is not None
                self._take_left(passage)
                if is_call:
                    yield from self._skip_closers(passage)
                continue
            passage.cut()
            if think is not None and mark == think[1]:
                self._is_thinking = False
                self._text.cut()

    def _skip_again(self, mark: str) -> Reading[None]:
        """Skip a mark that begins a call where it stands twice."""
        while True:
            yield from self._source.skip_space()
            if not (yield from self._source.starts_with(mark)):
                return
            self._source.take(len(mark))

    def _skip_closers(self, passage: _Passage) -> Reading[None]:
        """Skip marks that end a call, behind a call."""
        source = self._source
        while True:
            source.record("")
            yield from source.skip_space()
            for closer in self._form.closers:
                if (yield from source.starts_with(closer)):
                    source.take(len(closer))
                    break
                if source.is_cut and source.text and closer.startswith(source.text):
                    # The text was cut off within the mark.
                    source.take(len(source.text))
                    break
            else:
                self._take_left(passage)
                return

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
        """Read a call that has no mark before it, if the answer begins with one."""
        source, start = self._source, self._form.bare_start
        source.record("")
        yield from source.skip_space()
        while True:
            begun = re.sub(r"\s", "", source.text)[: len(start)]
            if begun == start:
                break
            if source.is_ended or not start.startswith(begun):
                self._take_left(self._text)
                return
            yield
        is_call = yield from read_json_call(self._reader, self._form.closers, only_known=True)
        if is_call:
            yield from read_more_llama(self._reader)
            self._text.cut()
        self._take_left(self._text)
        if is_call:
            yield from self._skip_closers(self._text)

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
                if not source.is_cut:
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
            self._reader.finish()
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
