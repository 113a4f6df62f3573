"""Conversion of a client's prompt or conversation to token ids.

Everything runs on the server's threads (``WorkThreads``). A text that cannot fit the context even
with the longest possible tokens is refused before it is encoded.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError, TandemError, UnsupportedError
from tandem.models.tokenizing.tokenizer import Tokenizer
from tandem.server.api.messages import plain_messages, plain_tools, tell_tools
from tandem.server.outputs.formats import FORMATS, OutputFormat
from tandem.server.protocol.decode import round_integral
from tandem.server.protocol.openai import InputMessage, Tool
from tandem.server.text.chat_template import ChatTemplate
from tandem.server.text.work_threads import WorkThreads

__all__ = ["PromptEncoder", "count_prompts", "fit_max_tokens", "read_prompts"]

_logger = logging.getLogger(__name__)

_LONGEST_TOKEN_CHARS = 512
"""Upper bound of a token's length in characters; the longest known ones are runs of 256 spaces."""

_END_MARK = "END-OF-THE-FINAL-MESSAGE-d41f6c0e"
"""Text that stands for the end of a message to be continued while it is rendered; letters, digits
and hyphens, which no filter of a template changes."""


def count_prompts(value: str | list[Any]) -> int:
    """Return how many prompts a field has, without checking them."""
    is_one = isinstance(value, str) or not value or not isinstance(value[0], str | list)
    return 1 if is_one else len(value)


def read_prompts(
    value: str | list[Any], vocab_size: int, field: str
) -> tuple[list[str] | list[list[int]], bool]:
    """Return the prompts in a field, which may be a text, token ids, or a list of either.

    Args:
        value: value decoded from JSON.
        vocab_size: number of token ids; larger ids are refused.
        field: name of the field, for errors.

    Returns: the prompts, and True if the client sent a list of them.

    Raises:
        ConfigError: anything else, an empty list, or an id out of range.
    """
    if isinstance(value, str):
        return [value], False
    if not value:
        raise ConfigError("server.read_prompts", f"{field} is empty", field=field)
    ids = list[Annotated[int, Meta(ge=0, lt=vocab_size)]]
    try:
        return _convert_prompts(value, ids)
    except msgspec.ValidationError as error:
        if "got `float`" in str(error):
            with contextlib.suppress(msgspec.ValidationError):
                return _convert_prompts(round_integral(value), ids)
        what = str(error).replace("`$", f"`{field}")
        raise ConfigError("server.read_prompts", what, field=field) from error


def _convert_prompts(value: list[Any], ids: Any) -> tuple[list[str] | list[list[int]], bool]:
    if isinstance(value[0], str):
        return msgspec.convert(value, list[str]), True
    if isinstance(value[0], list):
        return msgspec.convert(value, list[ids]), True
    return [msgspec.convert(value, ids)], False


def fit_max_tokens(
    asked: int | None,
    default: int | None,
    *,
    prompt_len: int,
    max_model_len: int,
    prompt_field: str,
    max_field: str,
    is_cut: bool = True,
) -> int:
    """Return the largest number of tokens to generate.

    Args:
        asked: number that the client asked for, in the field ``max_field``.
        default: number if the client asked for none, reduced to what fits; None: all that fits.
        prompt_len: number of tokens of the prompt, which is in the field ``prompt_field``.
        max_model_len: largest number of prompt and output tokens.
        prompt_field: name of the prompt's field, for errors.
        max_field: name of the limit's field, for errors.
        is_cut: True if an ``asked`` that does not fit is reduced to what does.

    Raises:
        ConfigError: the prompt leaves no room for a token, or ``asked`` does not fit
            and is not reduced.
    """
    if prompt_len == 0:
        raise ConfigError(
            "server.fit_max_tokens", f"{prompt_field} holds no token", field=prompt_field
        )
    room = max_model_len - prompt_len
    # A request for no tokens (log-probabilities of the prompt alone) may fill the whole context.
    if room < (0 if asked == 0 else 1):
        raise ConfigError(
            "server.fit_max_tokens",
            f"{prompt_field} has {prompt_len} tokens and the context is {max_model_len}, of which "
            "at least one is for the answer: shorten it",
            field=prompt_field,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room and is_cut:
        return room
    if asked > room:
        raise ConfigError(
            "server.fit_max_tokens",
            f"{max_field} is {asked}, but {prompt_len} prompt tokens leave {room} of the context "
            f"of {max_model_len}: ask for at most {room}",
            field=max_field,
        )
    return asked


class PromptEncoder:
    """The encoder of texts and conversations to token ids; owned by the application.

    ``encode`` and ``render`` block: call them on ``threads``.

    Args:
        tokenizer: tokenizer of the model.
        threads: threads for blocking work; owned.
        template: chat template; owned. None if the checkpoint has none.
        form: format in which the model writes reasoning and tool calls; None if it is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        threads: WorkThreads,
        template: ChatTemplate | None,
        form: OutputFormat | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.threads = threads
        self.form = form
        self._template = template
        self._knows_tools = template is not None and "tools" in template.tool_source
        think = form.think if form is not None else None
        sources = [] if template is None else [template.source, template.tool_source]
        self.may_think = think is not None and any(think[1] in source for source in sources)
        """True if the template mentions the marks of reasoning, so that the model may write some
        unasked."""
        marks = self.call_form.marks
        self.mark_ids = tokenizer.find_special_ids(marks)
        """Ids of the special tokens that are marks of ``call_form``."""

    @property
    def template_source(self) -> str | None:
        """The text of the chat template; None if the checkpoint has none."""
        return None if self._template is None else self._template.source

    @property
    def knows_tools(self) -> bool:
        """True if the template itself describes tools to the model."""
        return self._knows_tools

    @property
    def call_form(self) -> OutputFormat:
        """Format of tool calls: the model's own, or the one that the server's prompt asks it to
        use.
        """
        own = self.form
        has_calls = own is not None and (own.calls is not None or own.is_harmony)
        return own if own is not None and has_calls else FORMATS["qwen"]

    @property
    def call_form_name(self) -> str:
        """Name of ``call_form``, the format in which the model writes tool calls."""
        return next(name for name, form in FORMATS.items() if form is self.call_form)

    def encode(
        self,
        prompts: Sequence[str] | Sequence[list[int]],
        *,
        add_special_tokens: bool,
        max_model_len: int | None,
        field: str,
    ) -> list[list[int]]:
        """Return the token ids of prompts; prompts that are ids already are returned as they are.

        Raises:
            ConfigError: a prompt is longer than ``max_model_len``.
        """
        return [
            prompt
            if isinstance(prompt, list)
            else self._encode(prompt, add_special_tokens, max_model_len, field)
            for prompt in prompts
        ]

    def _encode(
        self, text: str, add_special_tokens: bool, max_model_len: int | None, field: str
    ) -> list[int]:
        if max_model_len is not None and len(text) > max_model_len * _LONGEST_TOKEN_CHARS:
            raise ConfigError(
                "server.encode",
                f"{field} has {len(text)} characters, far beyond the context of {max_model_len} "
                "tokens: shorten it",
                field=field,
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render(
        self,
        messages: Sequence[InputMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        arguments: dict[str, Any] | None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Return the prompt of a conversation, by the checkpoint's chat template.

        Raises:
            ConfigError: the template refuses the conversation, or the flags contradict.
            UnsupportedError: the checkpoint has no chat template.
            PeerLostError: the process that renders did not answer in time.
        """
        if self._template is None:
            raise UnsupportedError(
                "server.render",
                "the checkpoint has no chat template: use /v1/completions",
                field="messages",
            )
        is_continued = continue_final_message is True
        if is_continued and add_generation_prompt is True:
            raise ConfigError(
                "server.render",
                "continue_final_message and add_generation_prompt exclude each other",
                field="continue_final_message",
            )
        if is_continued and messages[-1].tool_calls:
            raise ConfigError(
                "server.render",
                "the final message has tool calls, so its text cannot be continued",
                field="continue_final_message",
            )
        asks = not is_continued if add_generation_prompt is None else add_generation_prompt
        plain = plain_messages(messages, self.call_form, knows_tools=self._knows_tools)
        given = arguments if arguments is not None else {}
        # The caller's template arguments are merged before the server's, so that they cannot
        # replace the messages, the tools or add_generation_prompt.
        merged = {k: v for k, v in given.items() if k not in ("messages", "tools", "documents")}
        merged["add_generation_prompt"] = asks
        if tools:
            merged["tools"] = plain_tools(tools)
            if not self._knows_tools:
                tell_tools(plain, merged["tools"])
        if not is_continued:
            return self._template.render(plain, merged)
        end = _mark_end(plain[-1])
        return _cut_at_mark(self._template.render(plain, merged)) + end

    async def warm_up(self) -> None:
        """Start a process that renders the chat template, so that the first conversation does not
        wait for it. If the template fails, only log a warning.
        """
        if self._template is None:
            return
        try:
            await self.threads.run(self._template.start, 0)
        except TandemError as error:
            _logger.warning("event=chat_template_broken error=%s", error)

    def close(self) -> None:
        """End the processes of the template, for which threads may wait, and then the threads."""
        if self._template is not None:
            self._template.close()
        self.threads.close()


def _mark_end(final: dict[str, Any]) -> str:
    """Put a mark at the end of the final message, in place of its trailing white space, which is
    returned.

    The text itself cannot be looked for: a short one also occurs in the marks of turns, an empty
    one everywhere. Templates strip white space; the model must continue exactly the text that the
    client wrote, so it is added again after the mark was cut off.
    """
    content = final["content"] or ""
    text = content.rstrip()
    final["content"] = text + _END_MARK
    return content[len(text) :]


def _cut_at_mark(text: str) -> str:
    """Cut a rendered conversation at the mark of ``_mark_end``, so that the model continues the
    final message.
    """
    position = text.rfind(_END_MARK)
    if position < 0:
        raise ConfigError(
            "server.render",
            "the chat template leaves out the final message, so it cannot be continued",
            field="continue_final_message",
        )
    return text[:position]
