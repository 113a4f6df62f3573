"""The conversion of fields that all OpenAI requests share to plans of generations.

Owns the list of known fields that are not supported; they are refused by name, because ignoring
them would change the answer.
"""

from collections.abc import Sequence
from dataclasses import replace

from tandem.core.errors import ConfigError
from tandem.core.logs import current_request_id
from tandem.server.api.prompts import fit_max_tokens
from tandem.server.api.sampling import check_best_of, choice_seed, make_sampling
from tandem.server.context import (
    ChoicePlan,
    RequestOptions,
    ServedModel,
    ServerContext,
    TextOptions,
)
from tandem.server.defaults import SamplingDefaults
from tandem.server.dialects.parsing import Parsing
from tandem.server.protocol.openai import SamplingFields
from tandem.server.text.stop_strings import StopStrings

__all__ = [
    "CHAT_REFUSED_FIELDS",
    "REFUSED_FIELDS",
    "TokenLimit",
    "plan_choices",
    "read_options",
]

_TOOLS = "tools are for /v1/chat/completions, functions have become its tools"
_INPUTS = "only text and token ids are supported as input"
_BEAM = "beam search is not supported"
_PROCESSORS = "logit processors are not supported"
_ADAPTER = "name the adapter as model"
_VOCABULARY = "restricting the vocabulary is not supported: use logit_bias"

REFUSED_FIELDS = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "structural_tag": "structural tags are not supported: use guided_grammar",
    "grammar": "name it guided_grammar",
    "stop_regex": "stop patterns are not supported: use stop",
    "logits_processors": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "use_beam_search": _BEAM,
    "beam_width": _BEAM,
    "bad_words": _VOCABULARY,
    "allowed_token_ids": _VOCABULARY,
    "prompt_embeds": _INPUTS,
    "input_embeds": _INPUTS,
    "image_data": _INPUTS,
    "audio_data": _INPUTS,
    "video_data": _INPUTS,
    "audio": "audio is not supported",
    "documents": "documents are not supported: put them into the messages",
    "chat_template": "only the checkpoint's own chat template is used",
    "lora_path": _ADAPTER,
    "session_params": "sessions are not supported",
    "truncate_prompt_tokens": "prompts are not truncated: shorten it",
    "token_ids_logprob": "log-probabilities of chosen ids are not supported",
    "return_hidden_states": "hidden states are not returned",
    "moderation": "nothing is moderated",
    "verbosity": "say in the messages how long an answer is to be",
    "web_search_options": "searching is not supported",
}
"""Reason by field name; values that ask for nothing (null, false, empty) are accepted."""


CHAT_REFUSED_FIELDS = {name: why for name, why in REFUSED_FIELDS.items() if name != "tools"} | {
    "suffix": "the middle of a text is filled in by /v1/completions",
}


class TokenLimit:
    """The limit of output tokens that a client asked for, with the name of its field.

    Args:
        asked: limit that the client asked for; None: it asked for none.
        default: limit in that case; None: all that fits the context.
    """

    def __init__(self, field: str, asked: int | None, default: int | None) -> None:
        self.field = field
        self.asked = asked
        self.default = default


def read_options(request: SamplingFields, prefix: str, model: ServedModel) -> RequestOptions:
    """Return the options of a request as a whole; ``prefix`` begins the id if the server makes
    one.
    """
    name = request.request_id if request.request_id is not None else request.rid
    return RequestOptions(
        name=name if name is not None else f"{prefix}-{current_request_id.get()}",
        model=model,
        priority=request.priority if request.priority is not None else 0,
        cache_salt=request.cache_salt if request.cache_salt is not None else "",
        timeout_s=request.timeout,
    )


def plan_choices(
    context: ServerContext,
    request: SamplingFields,
    prompts: Sequence[list[int]],
    *,
    limit: TokenLimit,
    prompt_field: str,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    parsing: Parsing | None = None,
    grammar: str = "",
    defaults: SamplingDefaults | None = None,
) -> list[ChoicePlan]:
    """Return the plans of ``n`` generations for each prompt, those of one prompt next to each
    other. ``defaults`` are sampling values where the request names none; None: those of
    conversations.

    Raises:
        ConfigError: a prompt or limit beyond the context, or a token id beyond the vocabulary.
        UnsupportedError: ``best_of`` would have to rank answers.
    """
    info = context.ready_info()
    n = request.n if request.n is not None else 1
    check_best_of(request.best_of, n)
    text = read_text_options(request)
    if parsing is not None:
        text = replace(text, make_parser=parsing.make_parser, shown_ids=parsing.shown_ids)
    plans: list[ChoicePlan] = []
    for prompt_ids in prompts:
        check_ids(prompt_ids, info.vocab_size, prompt_field)
        max_tokens = fit_max_tokens(
            limit.asked,
            limit.default,
            prompt_len=len(prompt_ids),
            max_model_len=info.max_model_len,
            prompt_field=prompt_field,
            max_field=limit.field,
            is_cut=context.config.cut_max_tokens,
        )
        for choice in range(n):
            sampling = make_sampling(
                request,
                context.defaults.chat if defaults is None else defaults,
                vocab_size=info.vocab_size,
                max_tokens=max_tokens,
                min_tokens=request.min_tokens,
                seed=choice_seed(request.seed, choice),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
            )
            plans.append(ChoicePlan(prompt_ids, sampling, text))
    return plans


def read_text_options(request: SamplingFields) -> TextOptions:
    """Return the options of converting tokens to text."""
    keep = request.include_stop_str_in_output is True or request.no_stop_trim is True
    return TextOptions(make_stops(request.stop), keep, request.skip_special_tokens is not False)


def make_stops(stop: str | Sequence[str] | None) -> StopStrings | None:
    """Return the automaton of the stop strings in a field; None if there are none."""
    if stop is None or len(stop) == 0:
        return None
    return StopStrings([stop] if isinstance(stop, str) else list(stop))


def check_ids(prompt_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Check that the model has an embedding for all ids; a tokenizer may have more ids than the
    model.

    Raises ConfigError, which names ``field``.
    """
    highest = max(prompt_ids, default=0)
    if highest >= vocab_size:
        raise ConfigError(
            "server.check_ids",
            f"{field} has token {highest}, the model's vocabulary ends at {vocab_size}",
            field=field,
        )
