"""POST /generate, SGLang's native API.

Answers have the form of SGLang 0.5: one object for one prompt, a list for a list of prompts or for
``n`` > 1. Each event of a stream has the whole text so far, and the ``index`` of its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.logs import current_request_id
from tandem.core.wire import TokenLogprob
from tandem.server.api.grammars import read_grammar
from tandem.server.api.prompts import count_prompts, fit_max_tokens, read_prompts
from tandem.server.api.sampling import choice_seed, make_sampling
from tandem.server.context import (
    ChoicePlan,
    RequestOptions,
    ServedModel,
    ServerContext,
    TextOptions,
)
from tandem.server.dialects.dialect import Dialect, Task
from tandem.server.dialects.options import REFUSED_FIELDS, check_ids, make_stops
from tandem.server.edge.sse import DONE, encode_event
from tandem.server.generation import Generation, Piece, measure_prompt_logprobs
from tandem.server.protocol.decode import refuse_unsupported
from tandem.server.protocol.sglang import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerateRequest,
    GenerateResponse,
    LogprobRow,
    MetaInfo,
    SglangSampling,
)

__all__ = ["answer_generate"]

_T = TypeVar("_T")

_REFUSED_FIELDS = {name: why for name, why in REFUSED_FIELDS.items() if name != "lora_path"}

_encode = msgspec.json.Encoder().encode


class _RawSampling(msgspec.Struct):
    """The fields of a body that are examined before they are decoded."""

    sampling_params: Raw = Raw(b"null")


_raw_sampling = msgspec.json.Decoder(_RawSampling)
_raw_list = msgspec.json.Decoder(list[Raw])


@dataclass(slots=True)
class _Progress:
    """The output so far of one choice (generation) of a request."""

    rid: str
    wants_logprobs: bool
    first_logprob: int
    """Position in the prompt from which log-probabilities of prompt tokens were asked for; -1: none
    were.
    """
    has_texts: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_ended: bool = False


@dataclass(slots=True)
class _Answer:
    """The renderer of SGLang's answers; each event has the whole text so far."""

    context: ServerContext
    progress: Sequence[_Progress]
    """Output so far of each generation, by its index."""
    is_list: bool
    """True if the client sent a list of prompts."""
    is_cumulative: bool = True

    def measure(self, generation: Generation, piece: Piece) -> int:
        """Return about how many bytes of the answer a piece (new output of a generation) takes."""
        size = piece.size_bytes
        if not self.progress[generation.index].ids:
            size += measure_prompt_logprobs(generation.prompt_logprobs)
        return size

    def add(self, generation: Generation, piece: Piece) -> None:
        """Add a piece (new output of a generation) to an answer that is sent as a whole."""
        state = self.progress[generation.index]
        state.text += piece.text
        state.ids += piece.token_ids
        state.has_ended = piece.finish_reason is not None
        if state.wants_logprobs:
            state.logprobs += piece.logprobs

    def make_document(self, generations: Sequence[Generation]) -> object:
        """Return the whole answer, as an object that msgspec encodes."""
        responses = [
            _make_response(self.context, each, self.progress[each.index]) for each in generations
        ]
        return responses if self.is_list or len(responses) > 1 else responses[0]

    def make_events(self, generation: Generation, piece: Piece) -> list[bytes]:
        """Return the encoded stream events for a piece (new output of a generation)."""
        self.add(generation, piece)
        response = _make_response(self.context, generation, self.progress[generation.index])
        response.index = generation.index
        return [encode_event(_encode(response))]

    def end_events(self, generations: Sequence[Generation]) -> list[bytes]:
        """Return the encoded events that end a stream."""
        return [DONE]


async def answer_generate(context: ServerContext, http: Request) -> Response:
    """Continue one or several prompts, whole or as a stream."""
    return await _DIALECT.answer(context, http)


def _plan_request(context: ServerContext, request: GenerateRequest) -> Task:
    """Return the task of a request: its generations, and the renderer of its answer."""
    model = _find_model(context, request)
    prompt_field, prompts, is_list = _read_prompts(context, request)
    samplings = _per_prompt(request.sampling_params, len(prompts), "sampling_params")
    num_choices = [1 if s is None or s.n is None else s.n for s in samplings]
    context.check_choices(sum(num_choices))
    prompt_ids = context.encoder.encode(
        prompts,
        field=prompt_field,
        add_special_tokens=True,
        max_model_len=context.ready_info().max_model_len,
    )
    plans, progress = _plan(context, request, prompt_ids, samplings, prompt_field)
    salt = request.cache_salt if request.cache_salt is not None else request.extra_key
    options = RequestOptions(
        request.rid if isinstance(request.rid, str) else current_request_id.get(),
        model,
        request.priority if request.priority is not None else 0,
        salt if salt is not None else "",
        request.timeout,
    )
    return Task(plans, options, _Answer(context, progress, is_list), request.stream is True)


def _find_model(context: ServerContext, request: GenerateRequest) -> ServedModel:
    """Return the model or adapter named by ``model``, or by ``lora_path``, SGLang's field for
    adapters.
    """
    names = request.lora_path if isinstance(request.lora_path, list) else [request.lora_path]
    adapters = set(names) or {None}
    if len(adapters) > 1:
        what = "lora_path names several adapters: send a request for each"
        raise UnsupportedError("server.generate", what, field="lora_path")
    base, wanted = context.find_model(request.model), adapters.pop()
    if wanted is None:
        return base
    found = context.find_model(wanted)
    if found.adapter is None:
        what = f"lora_path {wanted!r} is the model itself: leave it out"
        raise ConfigError("server.generate", what, field="lora_path")
    return found


def _refuse_unsupported(body: bytes) -> None:
    refuse_unsupported(body, _REFUSED_FIELDS)
    raw = _raw_sampling.decode(body).sampling_params
    if bytes(raw).startswith(b"{"):
        refuse_unsupported(raw, REFUSED_FIELDS, "sampling_params.")
    if not bytes(raw).startswith(b"["):
        return
    for index, each in enumerate(_raw_list.decode(raw)):
        refuse_unsupported(each, REFUSED_FIELDS, f"sampling_params[{index}].")


def _read_prompts(
    context: ServerContext, request: GenerateRequest
) -> tuple[str, list[str] | list[list[int]], bool]:
    if (request.text is None) == (request.input_ids is None):
        raise ConfigError(
            "server.generate", "send either text or input_ids, not both or none", field="text"
        )
    info = context.ready_info()
    if request.input_ids is not None:
        context.check_choices(count_prompts(request.input_ids))
        prompts, is_list = read_prompts(request.input_ids, info.vocab_size, "input_ids")
        if isinstance(prompts[0], str):
            raise ConfigError("server.generate", "input_ids holds text", field="input_ids")
        return "input_ids", prompts, is_list
    assert request.text is not None
    texts = [request.text] if isinstance(request.text, str) else request.text
    if not texts:
        raise ConfigError("server.generate", "text is an empty list", field="text")
    return "text", texts, isinstance(request.text, list)


def _per_prompt(value: _T | list[_T] | None, count: int, name: str) -> list[_T | None]:
    """Return a field's value for each prompt; the field has one value for all, or a list of
    them.
    """
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            "server.generate", f"{name} has {len(value)} entries for {count} prompts", field=name
        )
    return list(value)


def _plan(
    context: ServerContext,
    request: GenerateRequest,
    prompts: Sequence[list[int]],
    samplings: Sequence[SglangSampling | None],
    prompt_field: str,
) -> tuple[list[ChoicePlan], list[_Progress]]:
    info = context.ready_info()
    count = len(prompts)
    wants = _per_prompt(request.return_logprob, count, "return_logprob")
    starts = _per_prompt(request.logprob_start_len, count, "logprob_start_len")
    tops = _per_prompt(request.top_logprobs_num, count, "top_logprobs_num")
    rids = _per_prompt(request.rid, count, "rid") if isinstance(request.rid, list) else []
    plans: list[ChoicePlan] = []
    progress: list[_Progress] = []
    for index, prompt_ids in enumerate(prompts):
        given = samplings[index]
        sampling = given if given is not None else SglangSampling()
        prefix = _prefix(request, index)
        check_ids(prompt_ids, info.vocab_size, prompt_field)
        max_tokens = fit_max_tokens(
            sampling.max_new_tokens,
            DEFAULT_MAX_NEW_TOKENS,
            prompt_len=len(prompt_ids),
            max_model_len=info.max_model_len,
            prompt_field=prompt_field,
            max_field=f"{prefix}max_new_tokens",
            is_cut=context.config.cut_max_tokens,
        )
        num_top = (tops[index] or 0) if wants[index] is True else None
        start = starts[index]
        first = start if num_top is not None and start is not None else -1
        seed = sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed
        write = partial(context.grammars.write, info)
        grammar, field = read_grammar(sampling, write, prefix=prefix)
        if grammar:
            context.grammars.check(grammar, info, field)
        text = TextOptions(
            make_stops(sampling.stop),
            sampling.no_stop_trim is True,
            sampling.skip_special_tokens is not False,
        )
        for choice in range(sampling.n if sampling.n is not None else 1):
            params = make_sampling(
                sampling,
                context.defaults.own,
                vocab_size=info.vocab_size,
                max_tokens=max_tokens,
                min_tokens=sampling.min_new_tokens,
                seed=choice_seed(seed, choice),
                logprobs=num_top,
                prompt_logprobs=num_top if first >= 0 else None,
                grammar=grammar,
                prefix=prefix,
                min_field="min_new_tokens",
            )
            plans.append(ChoicePlan(prompt_ids, params, text))
            rid = rids[index] if rids else request.rid
            progress.append(
                _Progress(
                    rid if isinstance(rid, str) else current_request_id.get(),
                    num_top is not None,
                    first,
                    request.return_text_in_logprobs is True,
                )
            )
    return plans, progress


def _prefix(request: GenerateRequest, index: int) -> str:
    is_list = isinstance(request.sampling_params, list)
    return f"sampling_params[{index}]." if is_list else "sampling_params."


def _make_response(
    context: ServerContext, generation: Generation, state: _Progress
) -> GenerateResponse:
    meta = MetaInfo(
        id=state.rid,
        finish_reason=_finish(generation) if state.has_ended else None,
        prompt_tokens=generation.prompt_len,
        completion_tokens=len(state.ids),
        cached_tokens=generation.cached_len,
    )
    if state.has_ended:
        meta.e2e_latency = generation.timer.elapsed_s
    if state.wants_logprobs:
        _add_logprobs(context, generation, state, meta)
    return GenerateResponse(text=state.text, output_ids=state.ids, meta_info=meta)


def _finish(generation: Generation) -> dict[str, Any]:
    match generation.finish_reason:
        case "stop":
            matched = generation.stop_reason
            # SGLang reports the id of the end-of-sequence token that ended the text; OpenAI's
            # dialect reports nothing for it.
            return {
                "type": "stop",
                "matched": generation.stop_token_id if matched is None else matched,
            }
        case "length":
            return {"type": "length", "length": generation.num_tokens}
        case reason:
            return {"type": reason, "message": "the request was aborted"}


def _add_logprobs(
    context: ServerContext, generation: Generation, state: _Progress, meta: MetaInfo
) -> None:
    tokenizer = context.encoder.tokenizer

    def row(token_id: int, logprob: float | None) -> LogprobRow:
        return logprob, token_id, tokenizer.token_text(token_id) if state.has_texts else None

    output = state.logprobs
    meta.output_token_logprobs = [row(entry.token_id, entry.logprob) for entry in output]
    meta.output_top_logprobs = [[row(i, p) for i, p in entry.top] for entry in output]
    prompt = generation.prompt_logprobs
    if prompt is None or state.first_logprob < 0:
        meta.input_token_logprobs = UNSET
        return
    ids = generation.request.prompt_ids
    asked = list(zip(ids, prompt.unpack(), strict=True))[state.first_logprob :]
    meta.input_token_logprobs = [
        row(token_id, entry.logprob if entry is not None else None) for token_id, entry in asked
    ]
    meta.input_top_logprobs = [
        [row(i, p) for i, p in entry.top] if entry is not None else None for _, entry in asked
    ]


_DIALECT = Dialect(msgspec.json.Decoder(GenerateRequest), _plan_request, _refuse_unsupported)
