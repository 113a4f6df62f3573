"""The endpoint POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError
from tandem.server.api.grammars import read_grammar
from tandem.server.api.prompts import count_prompts, read_prompts
from tandem.server.context import ServerContext
from tandem.server.dialects.dialect import Dialect, Task
from tandem.server.dialects.openai_answer import OpenAIAnswer
from tandem.server.dialects.options import (
    REFUSED_FIELDS,
    TokenLimit,
    plan_choices,
    read_options,
)
from tandem.server.dialects.usage import (
    TextOffsets,
    add_completion_logprobs,
    check_prompt_logprobs,
    count_usage,
    make_prompt_logprobs,
)
from tandem.server.generation import Generation, Piece
from tandem.server.protocol.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from tandem.server.text.middle import find_middle_tokens

__all__ = ["answer_completion", "plan_completion"]

_DEFAULT_MAX_TOKENS = 16
"""Default number of output tokens, as at OpenAI's endpoint."""


@dataclass(slots=True)
class _Answer(OpenAIAnswer[CompletionRequest]):
    """The renderer of completions, which tracks the length of each choice's text."""

    echoes: list[str] | None
    """Texts of the prompts, if the client asked (``echo``) that they be repeated before the
    answers; otherwise None.
    """
    choices: list[CompletionChoice]
    """Choices by index, filled by ``add``."""
    offsets: list[TextOffsets | None]
    """By choice: count of the characters of its text; None before its first log-probability."""
    has_begun: list[bool]

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        size = OpenAIAnswer.measure(self, generation, piece)
        if self.echoes is not None and not self.has_begun[generation.index]:
            size += len(self.echoes[generation.index // self.n])
        return size

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        more = self._make_choice(generation, piece)
        choice = self.choices[generation.index]
        choice.text += more.text
        _extend(choice, more.logprobs)
        if more.prompt_logprobs is not UNSET:
            choice.prompt_logprobs = more.prompt_logprobs
        choice.finish_reason = more.finish_reason
        choice.stop_reason = more.stop_reason

    def make_document(self, generations: Sequence[Generation]) -> Completion:
        """Return the whole answer, as an object that msgspec encodes."""
        return self.make(Completion, self.choices, usage=count_usage(generations, self.n))

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        chunk = self.make(Completion, [self._make_choice(generation, piece)])
        return self.encode_chunks(generation, piece, [chunk])

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return self.encode_end(Completion, generations)

    def _make_choice(self, generation: Generation, piece: Piece) -> CompletionChoice:
        is_first = not self.has_begun[generation.index]
        self.has_begun[generation.index] = True
        text = piece.text
        if is_first and self.echoes is not None:
            text = self.echoes[generation.index // self.n] + text
        choice = CompletionChoice(
            generation.index,
            text,
            piece.finish_reason,
            self._make_logprobs(generation, piece, is_first=is_first),
        )
        if piece.finish_reason is not None and generation.stop_reason is not None:
            choice.stop_reason = generation.stop_reason
        num_top = self.request.prompt_logprobs
        if is_first and num_top is not None and generation.prompt_logprobs is not None:
            tokenizer = self.context.encoder.tokenizer
            choice.prompt_logprobs = make_prompt_logprobs(
                tokenizer, generation.prompt_logprobs, num_top
            )
        return choice

    def _make_logprobs(
        self, generation: Generation, piece: Piece, *, is_first: bool
    ) -> CompletionLogprobs | None:
        num_top = self.request.logprobs
        if num_top is None:
            return None
        lists = CompletionLogprobs()
        tokenizer = self.context.encoder.tokenizer
        prompt_ids = generation.request.prompt_ids
        echo = "" if self.echoes is None else self.echoes[generation.index // self.n]
        if is_first and self.echoes is not None and generation.prompt_logprobs is not None:
            add_completion_logprobs(
                lists,
                tokenizer,
                generation.prompt_logprobs.unpack(),
                prompt_ids,
                TextOffsets(tokenizer, tokenizer.detokenizer(), echo),
                num_top,
            )
        offsets = self.offsets[generation.index]
        if offsets is None:
            detokenizer = tokenizer.detokenizer(
                skip_special_tokens=self.request.skip_special_tokens is not False,
                context=prompt_ids[-8:],
                is_exact=bool(generation.request.sampling.grammar),
            )
            offsets = TextOffsets(tokenizer, detokenizer, None, len(echo))
            self.offsets[generation.index] = offsets
        ids = [entry.token_id for entry in piece.logprobs]
        add_completion_logprobs(lists, tokenizer, piece.logprobs, ids, offsets, num_top)
        return lists


async def answer_completion(context: ServerContext, http: Request) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    return await _DIALECT.answer(context, http)


def plan_completion(context: ServerContext, request: CompletionRequest) -> Task:
    """Return the generations and the renderer for a request of completions."""
    model = context.find_model(request.model)
    info = context.ready_info()
    write = partial(context.grammars.write, info)
    grammar, field = read_grammar(request, write, request.response_format)
    if grammar:
        context.grammars.check(grammar, info, field)
    n = request.n if request.n is not None else 1
    context.check_choices(n * count_prompts(request.prompt))
    check_prompt_logprobs(request.prompt_logprobs, is_stream=request.stream is True)
    prompts, _ = read_prompts(request.prompt, info.vocab_size, "prompt")
    encode = partial(context.encoder.encode, max_model_len=info.max_model_len)
    adds_special = request.add_special_tokens is not False
    if request.suffix:
        if request.echo is True:
            what = "echo and suffix exclude each other: the answer is not behind the prompt"
            raise ConfigError("server.completions", what, field="suffix")
        middle = find_middle_tokens(context.encoder.tokenizer)
        [suffix_ids] = encode([request.suffix], add_special_tokens=False, field="suffix")
        prompt_ids = [
            middle.join(prefix_ids, suffix_ids, adds_special=adds_special)
            for prefix_ids in encode(prompts, add_special_tokens=False, field="prompt")
        ]
    else:
        prompt_ids = encode(prompts, add_special_tokens=adds_special, field="prompt")
    plans = plan_choices(
        context,
        request,
        prompt_ids,
        limit=TokenLimit("max_tokens", request.max_tokens, _DEFAULT_MAX_TOKENS),
        prompt_field="prompt",
        logprobs=request.logprobs,
        prompt_logprobs=_count_prompt_logprobs(request),
        grammar=grammar,
        # Log-probabilities are those of the distribution that is sampled from.
        defaults=None if _is_read(request) else context.defaults.own,
    )
    options = read_options(request, "cmpl", model)
    answer = _Answer(
        context,
        request,
        options.name,
        model,
        _make_echoes(context, prompts) if request.echo is True else None,
        [CompletionChoice(index, "") for index in range(len(plans))],
        [None for _ in plans],
        [False for _ in plans],
    )
    return Task(plans, options, answer, request.stream is True)


def _is_read(request: CompletionRequest) -> bool:
    """Return True if somebody reads the texts, and no program works on their probabilities."""
    return request.logprobs is None and request.prompt_logprobs is None


def _count_prompt_logprobs(request: CompletionRequest) -> int | None:
    echoed = request.logprobs if request.echo is True else None
    asked = [num_top for num_top in (echoed, request.prompt_logprobs) if num_top is not None]
    return max(asked, default=None)


def _make_echoes(context: ServerContext, prompts: Sequence[str] | Sequence[list[int]]) -> list[str]:
    decode = context.encoder.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


def _extend(choice: CompletionChoice, more: CompletionLogprobs | None) -> None:
    if more is None:
        return
    if choice.logprobs is None:
        choice.logprobs = more
        return
    choice.logprobs.tokens += more.tokens
    choice.logprobs.token_logprobs += more.token_logprobs
    choice.logprobs.top_logprobs += more.top_logprobs
    choice.logprobs.text_offset += more.text_offset


_DIALECT = Dialect(msgspec.json.Decoder(CompletionRequest), plan_completion, REFUSED_FIELDS)
