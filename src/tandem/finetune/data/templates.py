"""Renders conversations into the tokens of each turn.

Without a template name the checkpoint's own chat template is used; a name selects a text of
LLaMA-Factory. Each answer is tokenized separately from its prompt, as it is when a server generates
it.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.finetune.data.named_templates import (
    CONTENT,
    EOS,
    LATER_NAMES,
    NAMED_TEXTS,
    NamedText,
    Part,
)
from tandem.finetune.data.records import Conversation
from tandem.models.families import Checkpoint
from tandem.models.tokenizing import tokenizer as served

__all__ = [
    "CheckpointTemplate",
    "NamedTemplate",
    "Template",
    "Turn",
    "differs_from_checkpoint",
    "list_ends",
    "load_tokenizer",
    "make_template",
]

WHERE = "finetune.make_template"
ENDS = ("bos_token", "eos_token")
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange of a conversation in token ids: a question with the template's text around it,
    and its answer.
    """

    source: list[int]
    target: list[int]
    num_learned: int
    """Number of leading target tokens that are learned; the rest is white space after the answer's
    end.
    """


class Template(Protocol):
    """A chat template, which renders conversations as token ids for training."""

    tail: list[int]
    """Token ids that follow the whole conversation, and are learned."""
    starts: list[int]
    """Token ids that are learned at the beginning of every question but the first, in place of its
    own tokens; empty for most templates.
    """
    stop_ids: list[int]
    """Token ids that end an answer, in addition to those that the checkpoint names."""
    num_left_out: int
    """Number of turns so far that could not be rendered together with the last one and were left
    out.
    """
    is_history_reduced: bool
    """True if an earlier answer was rendered differently from how it was generated."""

    def encode_turns(
        self, conversation: Conversation, *, is_history_shown: bool = False
    ) -> list[Turn]:
        """Return the turns (question and answer in token ids) of a conversation in order.

        Args:
           conversation: ends with an answer.
           is_history_shown: True renders earlier answers as the prompt of the last answer shows
               them; False renders each answer as it was generated.
        """
        ...

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the token ids after which the model generates the answer."""
        ...


class CheckpointTemplate:
    """The chat template of a checkpoint.

    A template may render an earlier answer differently from the last one, for example without its
    reasoning. Every answer is then learned as the template renders it in last place, followed by
    the text that the template writes after an earlier answer.

    Args:
       tokenizer: the checkpoint's tokenizer, of transformers.
       system: system message for conversations without one.
       options: further arguments of the chat template.
    """

    def __init__(
        self, tokenizer: Any, *, system: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._options = options or {}
        self.tail: list[int] = []
        self.starts: list[int] = []
        self.stop_ids: list[int] = []
        self.num_left_out = 0
        self.is_history_reduced = False

    def encode_turns(
        self, conversation: Conversation, *, is_history_shown: bool = False
    ) -> list[Turn]:
        """Return the turns (question and answer in token ids) of a conversation in order; see
        ``Template``.
        """
        turns: list[Turn] = []
        for prompt, answer in self.render(conversation, is_history_shown=is_history_shown):
            # White space after the answer's end mark is not learned as part of the answer.
            kept = answer.rstrip() or answer
            target, rest = self._tokenize(kept), self._tokenize(answer[len(kept) :])
            turns.append(Turn(self._tokenize(prompt), target + rest, len(target)))
        return turns

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the token ids after which the model generates the answer."""
        return self._tokenize(self._render(messages, is_prompt=True))

    def render(
        self, conversation: Conversation, *, is_history_shown: bool = False
    ) -> list[tuple[str, str]]:
        """Return (text before an answer, answer with its end) for each turn, in order."""
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns: list[tuple[str, str]] = []
        done, is_even = "", True
        for number, i in enumerate(places):
            prompt = self._render(messages[:i], is_prompt=True)
            whole = self._render(messages[: i + 1])
            answer = whole[len(prompt) :] if whole.startswith(prompt) else messages[i]["content"]
            source = prompt[len(done) :]
            if not prompt.startswith(done):
                is_even = False
                # ``done`` is the previous prompt with its answer as it was generated; the template
                # now renders that answer in another way.
                seam = self._find_seam(messages[:i], places[number - 1], done)
                if seam is None:
                    self.num_left_out += len(turns)
                    turns, source = [], prompt
                else:
                    self.is_history_reduced = True
                    source = seam
            turns.append((source, answer))
            done = prompt + answer
        return turns if is_even or not is_history_shown else self._show(messages, places, turns)

    def _probe(self, messages: Messages, place: int) -> tuple[str, str]:
        """Return the texts that the template writes before and after the content of an earlier
        answer.
        """
        # The two probe answers differ in their first and last characters, so that the equal parts
        # around them are the template's text.
        probes = [{"role": "assistant", "content": word} for word in ("1 left 1", "2 right 2")]
        first, second = (
            self._render([*messages[:place], probe, *messages[place + 1 :]], is_prompt=True)
            for probe in probes
        )
        num_before = _count_equal(first, second)
        num_behind = _count_equal(first[::-1], second[::-1])
        return first[:num_before], first[len(first) - num_behind :]

    def _find_seam(self, messages: Messages, place: int, done: str) -> str | None:
        """Return the text between an answer as it was generated and the next one.

        Returns None if the template changes more than the answer.
        """
        before, behind = self._probe(messages, place)
        prompt = self._render(messages, is_prompt=True)
        is_same = prompt.startswith(before) and prompt.endswith(behind) and done.startswith(before)
        return _cut_overlap(done, behind) if is_same else None

    def _show(
        self, messages: Messages, places: list[int], turns: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Return the turns, with earlier answers as the template renders them in the prompt of the
        last one.
        """
        whole = self._render(messages[: places[-1]], is_prompt=True)
        shown: list[tuple[str, str]] = []
        at = 0
        for place in places[len(places) - len(turns) : -1]:
            before, behind = self._probe(messages[: places[-1]], place)
            end = len(whole) - len(behind)
            if not whole.startswith(before) or not whole.endswith(behind) or len(before) < at:
                return [(whole, turns[-1][1])]
            # All answers end with the same mark: the last answer shows which part of the text
            # behind an answer is that mark.
            end += len(behind) - len(_cut_overlap(turns[-1][1], behind))
            shown.append((whole[at : len(before)], whole[len(before) : end]))
            at = end
        return [*shown, (whole[at:], turns[-1][1])]

    def _render(self, messages: Messages, *, is_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_prompt, **self._options
        )

    def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text in which the template has written all special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _count_equal(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))


def _cut_overlap(done: str, behind: str) -> str:
    """Return ``behind``, the text that follows an answer, without the beginning with which ``done``
    already ends.
    """
    most = min(len(done), len(behind))
    size = next((n for n in range(most, 0, -1) if done.endswith(behind[:n])), 0)
    return behind[size:]


class NamedTemplate:
    """A text of LLaMA-Factory, tokenized part by part as there.

    Args:
       tokenizer: the checkpoint's tokenizer, of transformers.
       text: the format of messages.
       system: system message for conversations without one; None takes the text's own.
       is_thinking: True learns answers without reasoning with an empty reasoning before them; False
           removes reasoning and puts an empty one into the prompt.
    """

    def __init__(
        self, tokenizer: Any, text: NamedText, *, system: str | None = None, is_thinking: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._system = text.default_system if system is None else system
        self._is_thinking = is_thinking
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.tail = end if text.has_late_end else []
        self.starts = self.tail
        self.stop_ids = self._list_stops()
        self.num_left_out = 0
        self.is_history_reduced = False

    def encode_turns(
        self, conversation: Conversation, *, is_history_shown: bool = False
    ) -> list[Turn]:
        """Return the turns (question and answer in token ids) of a conversation in order; see
        ``Template``.
        """
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        system, messages = self._split_system(messages)
        turns: list[Turn] = []
        for i in range(0, len(messages), 2):
            is_last = i + 2 == len(messages)
            answer = messages[i + 1]["content"]
            source = self._encode_question(messages[i]["content"], system if i == 0 else None)
            target: list[int] = []
            if self._text.thought is not None:
                if not self._is_thinking or (is_history_shown and not is_last):
                    answer = self._drop_thought(answer)
                is_bare = not any(word.strip() in answer for word in self._text.thought)
                if is_bare and (is_last or not is_history_shown):
                    empty = self._encode("".join(self._text.thought))
                    source, target = (source, empty) if self._is_thinking else (source + empty, [])
            target = target + self._fill(self._text.assistant, answer)
            turns.append(Turn(source, target, len(target)))
        return turns

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the token ids after which the model generates the answer."""
        system, messages = self._split_system(messages)
        ids: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                ids += self._fill(self._text.assistant, self._drop_thought(message["content"]))
            else:
                ids += self._encode_question(message["content"], system if i == 0 else None)
        if self._text.thought is not None and not self._is_thinking:
            ids += self._encode("".join(self._text.thought))
        return ids

    def _split_system(self, messages: Messages) -> tuple[str, Messages]:
        if messages[0]["role"] == "system":
            return messages[0]["content"], messages[1:]
        return self._system, messages

    def _encode_question(self, question: str, system: str | None) -> list[int]:
        """Return a question's token ids. A system message, even an empty one, marks the first
        question.
        """
        ids: list[int] = []
        if system is not None:
            ids += self._fill(self._text.prefix, "")
            if system and self._text.is_system_asked:
                question = str(self._text.system[0]).replace(CONTENT, system) + question
            elif system:
                ids += self._fill(self._text.system, system)
        return ids + self._fill(self._text.user, question)

    def _fill(self, parts: tuple[Part, ...], content: str) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += self._encode(part.replace(CONTENT, content))
                continue
            tokens = self._tokenizer
            token_id = tokens.eos_token_id if part.is_end else tokens.bos_token_id
            ids += [] if token_id is None else [token_id]
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _drop_thought(self, answer: str) -> str:
        if self._text.thought is None:
            return answer
        first, last = (re.escape(word) for word in self._text.thought)
        return re.sub(f"{first}(.*?){last}", "", answer, flags=re.DOTALL).lstrip("\n")

    def _list_stops(self) -> list[int]:
        """Return the ids of special tokens that the template writes after an answer, at which
        generation stops.
        """
        ids = self._fill(self._text.assistant, "") + self.tail
        special = set(self._tokenizer.all_special_ids)
        return [i for i in ids if i in special]


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer of a checkpoint with transformers.

    Raises: UnsupportedError (it is missing, or would run code from the checkpoint).
    """
    from transformers import AutoTokenizer

    if served.find_gguf_vocabulary(checkpoint.folder) is not None:
        tokenizer = _load_gguf_tokenizer(checkpoint.folder)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            what = f"no tokenizer in {checkpoint.folder}: {error}"
            raise UnsupportedError("finetune.load_tokenizer", what) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_gguf_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a GGUF file's metadata in transformers' form.

    transformers reads GGUF metadata too, but not of every architecture, and splits text by its own
    tables: the server's reader decides here as well.
    """
    from transformers import PreTrainedTokenizerFast

    own = served.load_tokenizer(folder)
    # Which tokens frame a text is in the backend; plain texts (stage pt) ask for them by name.
    framed, special = own.encode(""), own.special_tokens
    bos, eos = (own.backend.token_to_id(special.get(name, "")) for name in ENDS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own.backend,
        add_bos_token=bos is not None and framed[:1] == [bos],
        add_eos_token=eos is not None and framed[-1:] == [eos],
        **special,
    )
    template = own.chat_template
    if template is not None and own.tool_template is not None:
        tokenizer.chat_template = {"default": template, "tool_use": own.tool_template}
    elif template is not None:
        tokenizer.chat_template = template
    return tokenizer


def list_ends(of_model: Sequence[int], template: Template, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: the model's, and those that end a turn in the template.

    Args:
       of_model: end ids that the checkpoint names.
       template: renders the conversation.
       tokenizer: tokenizer of transformers.
    """
    ends = {*of_model, *template.stop_ids}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    ends |= {vocabulary[name] for name in ("<|im_end|>", "<|eot_id|>") if name in vocabulary}
    return sorted(ends)


def make_template(
    tokenizer: Any,
    name: str | None = None,
    *,
    system: str | None = None,
    is_thinking: bool = True,
) -> Template:
    """Return the template of a checkpoint, or the named one of LLaMA-Factory.

    Args:
       tokenizer: tokenizer of transformers.
       name: a name of LLaMA-Factory; None takes the checkpoint's chat template.
       system: default system message.
       is_thinking: LLaMA-Factory's ``enable_thinking``.

    Raises:
       ConfigError: an unknown name, a checkpoint without a template, or one without the tokens of a
           named template.
       UnsupportedError: a template of LLaMA-Factory that is not included here.
    """
    if name is None:
        if not tokenizer.chat_template:
            what = "the checkpoint has no chat template: name one of LLaMA-Factory's, as chatml"
            raise ConfigError(WHERE, what, field="template")
        options = {} if is_thinking else {"enable_thinking": False}
        return CheckpointTemplate(tokenizer, system=system, options=options)
    if name in LATER_NAMES:
        what = f"template {name}: LLaMA-Factory's text of that name is not here: leave it out for"
        raise UnsupportedError(WHERE, f"{what} the checkpoint's own", field="template")
    if name not in NAMED_TEXTS:
        close = difflib.get_close_matches(name, [*NAMED_TEXTS, *LATER_NAMES], n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out."
        what = f"unknown template {name!r}: {hint} The checkpoint's own is the default"
        raise ConfigError(WHERE, what, field="template")
    text = NAMED_TEXTS[name]
    vocabulary = tokenizer.get_vocab()
    _require_tokens(name, [token for token in text.tokens if token not in vocabulary])
    if tokenizer.eos_token_id is None and (EOS in text.assistant or text.has_late_end):
        _require_tokens(name, ["an end token (eos_token)"])
    return NamedTemplate(tokenizer, text, system=system, is_thinking=is_thinking)


def differs_from_checkpoint(template: Template, tokenizer: Any) -> bool:
    """Return True if a named template renders a prompt differently from the checkpoint's chat
    template, which servers use.
    """
    if not isinstance(template, NamedTemplate) or not tokenizer.chat_template:
        return False
    messages = [{"role": "user", "content": "Hello!"}]
    return template.encode_prompt(messages) != CheckpointTemplate(tokenizer).encode_prompt(messages)


def _require_tokens(name: str, missing: Sequence[str]) -> None:
    if missing:
        what = f"template {name} is of tokens that the tokenizer does not have: "
        what += f"{', '.join(missing)}: leave it out for the checkpoint's own"
        raise ConfigError(WHERE, what, field="template")
