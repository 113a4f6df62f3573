"""Requests and answers of SGLang's native API.

Names and defaults are those of SGLang 0.5. As there, many fields take one value, or a list with one
entry for each prompt.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.protocol import fields

__all__ = ["AbortRequest", "GenerateRequest", "GenerateResponse", "MetaInfo", "SglangSampling"]

DEFAULT_MAX_NEW_TOKENS = 128


class SglangSampling(msgspec.Struct, kw_only=True):
    """The object ``sampling_params`` of a request."""

    max_new_tokens: fields.Count | None = None
    min_new_tokens: fields.Count | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    frequency_penalty: fields.FrequencyPenalty | None = None
    presence_penalty: fields.FrequencyPenalty | None = None
    logit_bias: fields.LogitBias | None = None
    sampling_seed: fields.Seed | None = None
    seed: fields.Seed | None = None
    n: fields.NumChoices | None = None
    stop: fields.Stop | None = None
    stop_token_ids: fields.StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: fields.Schema | None = None
    regex: fields.Pattern | None = None
    ebnf: fields.Pattern | None = None
    """Grammar in GBNF or Lark."""


_Adapter = Annotated[fields.Name, Meta(min_length=1)]
_Many = Meta(max_length=2**16)


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of POST /generate."""

    text: str | Annotated[list[str], _Many] | None = None
    input_ids: list[Any] | None = None
    """Token ids, or a list of lists of them; ``prompts.read_prompts`` checks them."""
    sampling_params: SglangSampling | Annotated[list[SglangSampling], _Many] | None = None
    stream: bool | None = None
    return_logprob: bool | Annotated[list[bool], _Many] | None = None
    logprob_start_len: fields.TopK | Annotated[list[fields.TopK], _Many] | None = None
    top_logprobs_num: fields.LogprobCount | Annotated[list[fields.LogprobCount], _Many] | None = (
        None
    )
    return_text_in_logprobs: bool | None = None
    rid: fields.Name | Annotated[list[fields.Name], _Many] | None = None
    model: fields.Name | None = None
    lora_path: _Adapter | Annotated[list[_Adapter | None], _Many] | None = None
    """Name of an adapter; a list must have the same for all prompts."""
    priority: fields.Priority | None = None
    cache_salt: fields.Name | None = None
    extra_key: fields.Name | None = None
    """SGLang's name of ``cache_salt``."""
    timeout: fields.Timeout | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """The body of POST /abort_request."""

    rid: fields.Name | None = None
    abort_all: bool = False


LogprobRow = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    """The object ``meta_info`` of an answer."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    """Seconds from arrival to the end; only in the last event."""
    input_token_logprobs: list[LogprobRow] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobRow] | None] | UnsetType = UNSET
    output_token_logprobs: list[LogprobRow] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobRow] | None] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The result of one prompt; in a stream, the whole output so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """Index among the prompts; only in a stream."""
