"""Finding out that an engine can answer nobody any more.

A step fails by what one request asks, or by what every request meets: a file of weights that is
gone, a lost device. After a few failures without a success between them the engine answers a
request of its own. If that fails too, the process should end: its supervisor starts another, and
until then nobody is told that the instance is healthy.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tandem.core.errors import TandemError
from tandem.core.wire import AddRequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tandem.engine.engine import Engine

__all__ = ["SelfTest"]

logger = logging.getLogger(__name__)

NAME = "self-test"
MAX_FAILURES = 3
"""Failures of requests in sequence after which the engine is tested."""
NUM_TOKENS = 32
"""Tokens of the test's prompt, spread over the vocabulary so that they choose many experts."""
URGENT = -(2**31)
FAULTS = {"internal", "corruption"}
"""Codes of the errors that a request need not have caused."""


class SelfTest:
    """The test of one engine. Used on the thread that calls ``Engine.step``.

    Args:
        engine: borrowed.
        vocab_size: number of token ids.
    """

    def __init__(self, engine: "Engine", vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_failures = 0
        self.failure = ""
        """Reason why the engine can answer nobody; empty: none is known."""

    def take(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Note what requests came to; return the outputs that are not the test's own."""
        kept: list[RequestOutput] = []
        for output in outputs:
            is_fault = output.error_code in FAULTS
            if output.request_id != NAME:
                kept.append(output)
                self._num_failures = self._num_failures + 1 if is_fault else 0
            elif is_fault:
                self.failure = output.error_text or "its own request failed"
            elif output.finish_reason is not None:
                logger.warning("event=self_test_passed")
        if self._num_failures >= MAX_FAILURES:
            self._num_failures = 0
            self._begin()
        return kept

    def _begin(self) -> None:
        step = max(self._vocab_size // NUM_TOKENS, 1)
        request = AddRequest(
            request_id=NAME,
            prompt_ids=[*range(0, self._vocab_size, step)][:NUM_TOKENS],
            # The prompt's own log-probabilities are wanted so that no part of it is taken from the
            # prefix cache.
            sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
            cache_salt=NAME,
            priority=URGENT,
        )
        try:
            self._engine.add(request)
        except TandemError as error:
            # Its own kind of requests is not for this model, or one is under way.
            logger.info("event=self_test_refused error=%s", error)
        else:
            logger.warning("event=self_test_begun failures=%d", MAX_FAILURES)
