"""Validation of requests: a request that the model cannot serve is refused, with the field's
name.
"""

from collections.abc import Sequence

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.wire import AddRequest, Continuation, Pooling, PrefillKv, SamplingParams

__all__ = ["RequestChecks"]

MAX_LOGIT_BIAS = 1024
"""Largest number of logit biases of a request; each costs a Python operation per token."""
MAX_BIAS = 1e6
"""Largest absolute logit bias; a larger value would have the same effect as this one."""


class RequestChecks:
    """Checks of requests against the abilities of a model.

    Args:
        vocab_size: number of token ids; larger ids are refused.
        num_labels: number of classes of a classification model; 0 for a model that generates text.
        gives_vectors: True if the model can return hidden states (embeddings).
    """

    def __init__(self, vocab_size: int, num_labels: int = 0, *, gives_vectors: bool = True) -> None:
        self._vocab_size = vocab_size
        self._num_labels = num_labels
        self._gives_vectors = gives_vectors

    def check(self, message: AddRequest, *, can_read_instances: bool) -> None:
        """Check a new request.

        Raises: ConfigError (a token id, a logit bias, or the request's fields together are not
            valid; ``field`` names the field); UnsupportedError (the model does not give what is
            asked for, or its KV is to be read from another instance, but ``can_read_instances`` is
            False).
        """
        params = message.sampling
        self._check_tokens(message.prompt_ids, "prompt")
        self._check_pooling(message)
        if message.continuation is not None:
            self.check_continuation(message.continuation, params)
        if isinstance(message.kv_source, PrefillKv) and not can_read_instances:
            raise UnsupportedError(
                "engine.add",
                f"this instance cannot read the blocks of {message.kv_source.instance}: send it "
                "the request without a prefill instance",
                field="kv_source",
            )
        if message.awaits_continuation and (
            message.continuation is not None or not isinstance(message.kv_source, PrefillKv)
        ):
            raise ConfigError(
                "engine.add",
                "a continuation is awaited that is there, or comes from nobody: name the prefill "
                "instance as kv_source and give no continuation",
                field="awaits_continuation",
            )
        if len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise ConfigError(
                "engine.add",
                f"{len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are taken",
                field="logit_bias",
            )
        for token_id, bias in params.logit_bias.items():
            # The comparison is negated so that NaN, which is in no range, is refused.
            if not 0 <= token_id < self._vocab_size or not abs(bias) <= MAX_BIAS:
                raise ConfigError(
                    "engine.add",
                    f"entry {token_id}: {bias} needs a token id below {self._vocab_size} and a "
                    f"bias of at most {MAX_BIAS:g}",
                    field="logit_bias",
                )

    def _check_pooling(self, message: AddRequest) -> None:
        params = message.sampling
        if params.pooling is None:
            if self._num_labels:
                what = "the model classifies and generates no text: use /v1/rerank or /v1/score"
                raise UnsupportedError("engine.add", what, field="model")
            return
        if params.pooling is Pooling.SCORE and not self._num_labels:
            what = "the model has no head that classifies, so it gives no scores"
            raise UnsupportedError("engine.add", what, field="model")
        if not self._gives_vectors:
            what = "transformers' own modules run the model, of which no vectors are taken"
            raise UnsupportedError("engine.add", what, field="model")
        is_prefill = message.prefill_lease_s is not None or message.continuation is not None
        if params.max_tokens or params.prompt_logprobs is not None or is_prefill:
            what = "a request for a vector generates nothing and is computed by one instance"
            raise ConfigError("engine.add", what, field="pooling")

    def _check_tokens(self, token_ids: Sequence[int], field: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ConfigError(
                    "engine.add",
                    f"token id {token_id} is outside the vocabulary of {self._vocab_size}",
                    field=field,
                )

    def check_continuation(self, continuation: Continuation, params: SamplingParams) -> None:
        """Check the tokens with which another instance's request is continued here.

        Raises: ConfigError (a token is outside the vocabulary, or ``max_tokens`` leaves none to
            generate).
        """
        self._check_tokens(continuation.token_ids, "continuation")
        if len(continuation.token_ids) >= params.max_tokens:
            raise ConfigError(
                "engine.add",
                f"{len(continuation.token_ids)} tokens are there, of max_tokens "
                f"{params.max_tokens}: nothing is left to generate",
                field="continuation",
            )
