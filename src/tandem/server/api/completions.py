"""POST /v1/completions."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.server.api.answers import OpenAIAnswer, answer_stream, answer_whole, make_events
from tandem.server.api.options import (
    REFUSED_FIELDS,
    TokenLimit,
    check_format,
    plan_choices,
    read_options,
)
from tandem.server.api.prompts import count_prompts, read_prompts
from tandem.server.api.usage import add_completion_logprobs, count_usage
from tandem.server.context import ChoicePlan, ServedModel, ServerContext
from tandem.server.edge.connection import limit_time
from tandem.server.generation import Generation, GenerationGroup, Piece, measure_logprobs
from tandem.server.protocol.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)

__all__ = ["answer_completion", "plan_completion"]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""

_decoder = msgspec.json.Decoder(CompletionRequest)


@dataclass(slots=True)
class _Answer(OpenAIAnswer[CompletionRequest]):
    """An answer of completions, and how far the text of each choice has come."""

    echoes: list[str] | None
    """Texts of the prompts, if they are to be repeated."""
    offsets: list[int]

    def make_text(self, generation: Generation, piece: Piece, *, is_first: bool) -> str:
        if is_first and self.echoes is not None:
            return self.echoes[generation.index // self.n] + piece.text
        return piece.text

    def make_logprobs(
        self, generation: Generation, piece: Piece, *, is_first: bool
    ) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        lists = CompletionLogprobs()
        tokenizer = self.context.encoder.tokenizer
        offset = self.offsets[generation.index]
        if is_first and generation.prompt_logprobs is not None:
            offset = add_completion_logprobs(
                lists,
                tokenizer,
                generation.prompt_logprobs,
                generation.request.prompt_ids,
                offset,
            )
        ids = [entry.token_id for entry in piece.logprobs]
        offset = add_completion_logprobs(lists, tokenizer, piece.logprobs, ids, offset)
        self.offsets[generation.index] = offset
        return lists


async def answer_completion(context: ServerContext, http: Request) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    origin = context.note_arrival(http)
    request = await context.read_request(http, _decoder, REFUSED_FIELDS)
    model, plans, echoes = await context.prepare(
        http, origin, request.timeout, plan_completion, context, request
    )
    options = read_options(request, "cmpl", model.adapter)
    group = await context.start(plans, options, origin, http.receive)
    answer = _Answer(
        context,
        request,
        options.name,
        model,
        request.n if request.n is not None else 1,
        echoes,
        [0 for _ in plans],
    )
    if request.stream is True:
        return answer_stream(context, group, _events(answer, group))
    echo_bytes = answer.n * sum(map(len, echoes)) if echoes is not None else 0
    return await answer_whole(context, http, group, _collect(answer, group), echo_bytes=echo_bytes)


def plan_completion(
    context: ServerContext, request: CompletionRequest
) -> tuple[ServedModel, list[ChoicePlan], list[str] | None]:
    """Return what was asked for, and the texts of the prompts if they are to be repeated."""
    check_format(request)
    model = context.find_model(request.model)
    info = context.ready_info()
    n = request.n if request.n is not None else 1
    context.check_choices(n * count_prompts(request.prompt))
    prompts, _ = read_prompts(request.prompt, info.vocab_size, "prompt")
    prompt_ids = context.encoder.encode(
        prompts,
        field="prompt",
        add_special_tokens=request.add_special_tokens is not False,
        max_model_len=info.max_model_len,
    )
    plans = plan_choices(
        context,
        request,
        prompt_ids,
        limit=TokenLimit("max_tokens", request.max_tokens, _DEFAULT_MAX_TOKENS),
        prompt_field="prompt",
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo is True else None,
    )
    return model, plans, _make_echoes(context, prompts) if request.echo is True else None


def _make_echoes(context: ServerContext, prompts: Sequence[str] | Sequence[list[int]]) -> list[str]:
    decode = context.encoder.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


async def _collect(answer: _Answer, group: GenerationGroup) -> Completion:
    choices = [CompletionChoice(g.index, "") for g in group.generations]
    is_first = [True for _ in group.generations]
    async with limit_time(group.time_limit_s), aclosing(group.pieces()) as pieces:
        async for generation, piece in pieces:
            choice = choices[generation.index]
            first, is_first[generation.index] = is_first[generation.index], False
            choice.text += answer.make_text(generation, piece, is_first=first)
            size = measure_logprobs(generation.prompt_logprobs) if first else 0
            make = partial(answer.make_logprobs, generation, piece, is_first=first)
            _extend(choice, await answer.context.shape(size, make))
            choice.finish_reason = piece.finish_reason
    for choice, generation in zip(choices, group.generations, strict=True):
        if generation.stop_reason is not None:
            choice.stop_reason = generation.stop_reason
    usage = count_usage(group.generations, answer.n)
    return answer.make(Completion, choices, usage=usage)


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


def _events(answer: _Answer, group: GenerationGroup) -> AsyncGenerator[bytes, None]:
    is_first = [True for _ in group.generations]

    def make_chunks(generation: Generation, piece: Piece) -> tuple[Completion]:
        first, is_first[generation.index] = is_first[generation.index], False
        choice = CompletionChoice(
            generation.index,
            answer.make_text(generation, piece, is_first=first),
            piece.finish_reason,
            answer.make_logprobs(generation, piece, is_first=first),
        )
        if piece.finish_reason is not None and generation.stop_reason is not None:
            choice.stop_reason = generation.stop_reason
        return (answer.make(Completion, [choice]),)

    return make_events(answer, group, Completion, make_chunks, answer.echoes or ())
