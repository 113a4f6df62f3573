"""Conversion of request fields to the engine's ``SamplingParams``.

Values come, in this order, from the request, the defaults of its kind (``server/defaults.py``) and
the neutral value.
"""

import hashlib
from typing import Protocol, TypeVar

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.wire import SamplingParams
from tandem.server.defaults import SamplingDefaults

__all__ = [
    "SamplingSource",
    "check_best_of",
    "choice_seed",
    "derive_seed",
    "make_sampling",
]

_T = TypeVar("_T")

_SMALLEST_TOP_P = 1e-9
"""Stands for 0, which clients send for the likeliest token alone."""


class SamplingSource(Protocol):
    """The request fields of sampling that have the same name in all dialects (the APIs that are
    served).
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: dict[int, float] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None


def make_sampling(
    request: SamplingSource,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    max_tokens: int,
    min_tokens: int | None,
    seed: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
    prefix: str = "",
    min_field: str = "min_tokens",
) -> SamplingParams:
    """Return the engine's sampling parameters of one choice.

    Args:
        request: decoded request, whose fields are within their bounds.
        defaults: values for fields that the request leaves out.
        vocab_size: number of token ids; larger ids are refused.
        max_tokens: largest number of tokens to generate, fitted to the context.
        min_tokens: least number of tokens. It, ``seed`` and the two counts of log-probabilities are
            arguments because their fields have other names in each API.
        seed: seed of this choice.
        logprobs: number of likeliest tokens to report with each generated one; None: none.
        prompt_logprobs: the same for the prompt.
        grammar: grammar that the answer must match; empty: none.
        prefix: path of ``request`` in the body, for errors.
        min_field: name of the field of ``min_tokens``, for errors.

    Raises:
        ConfigError: a token id outside the vocabulary, or min_tokens above max_tokens.
    """
    bias = request.logit_bias if request.logit_bias is not None else {}
    stop_ids = request.stop_token_ids if request.stop_token_ids is not None else []
    for field, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
        highest = max(ids, default=0)
        if highest >= vocab_size:
            raise ConfigError(
                "server.make_sampling",
                f"{prefix}{field} names token {highest}, the vocabulary has {vocab_size}",
                field=f"{prefix}{field}",
            )
    if min_tokens is not None and min_tokens > max_tokens:
        raise ConfigError(
            "server.make_sampling",
            f"{prefix}{min_field} is {min_tokens}, more than the {max_tokens} tokens of the answer",
            field=f"{prefix}{min_field}",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_first(min_tokens, None, 0),
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=max(_first(request.top_p, defaults.top_p, 1.0), _SMALLEST_TOP_P),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=_first(request.frequency_penalty, None, 0.0),
        presence_penalty=_first(request.presence_penalty, None, 0.0),
        logit_bias=bias,
        seed=seed,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=_first(request.ignore_eos, None, False),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def derive_seed(request_id: str, index: int) -> int:
    """Return the seed of a generation without a seed of its own, derived from the request's id.

    So a retry of the request gets the same seed on any server.

    Args:
        request_id: id that the client gave the request or was told; otherwise unique.
        index: index of the generation in the request.
    """
    digest = hashlib.sha256(f"{index}/{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of the choice (generation) with index ``choice``: for the first, the
    request's own; None without one.

    The others are mixed with the index, so that requests with neighbouring seeds do not get equal
    answers. Source: the finaliser of SplitMix64, Steele et al., OOPSLA 2014.
    """
    if seed is None or choice == 0:
        return seed
    mask = 2**64 - 1
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def check_best_of(best_of: int | None, n: int) -> None:
    """Check that ``best_of`` does not ask to generate more answers than are returned.

    Raises UnsupportedError if it does.
    """
    if best_of is not None and best_of != n:
        raise UnsupportedError(
            "server.check_best_of",
            f"best_of is {best_of} and n is {n}: ranking answers is not supported",
            field="best_of",
        )


def _first(asked: _T | None, recommended: _T | None, neutral: _T) -> _T:
    if asked is not None:
        return asked
    return recommended if recommended is not None else neutral
