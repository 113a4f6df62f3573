"""Records of a load test: its requests, the times of their tokens, and the figures of a run.

``tandem bench serve`` writes them. Times are seconds on one monotonic clock, from the start of the
run.
"""

from itertools import pairwise

import msgspec

__all__ = ["Distribution", "LoadReport", "RequestRecord"]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it."""

    index: int
    conversation: int = -1
    """Number of the request's conversation, whose requests follow each other; -1: the request
    stands alone.
    """
    input_length: int
    """Number of tokens of the prompt, as the server counts them if it reports usage."""
    output_length: int
    """Number of output tokens that were requested."""
    due_s: float = 0.0
    """Time at which the workload planned to send it."""
    sent_s: float = 0.0
    event_times_s: list[float] = []
    """Times at which events with text arrived."""
    done_s: float = 0.0
    output_tokens: int = 0
    """Number of output tokens received, as the server counts them if it reports usage; otherwise
    number of events."""
    cached_tokens: int = 0
    text: str = ""
    error: str = ""
    """Text of the error; empty if the request succeeded."""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.event_times_s[0] - self.sent_s if self.event_times_s else 0.0

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 for an answer of one token."""
        if self.output_tokens < 2 or not self.event_times_s:
            return 0.0
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.output_tokens - 1)

    @property
    def tbt_s(self) -> float:
        """Mean of the longest tenth of the times between events in seconds, as the Mooncake paper
        defines it.
        """
        gaps = sorted(self.gaps_s, reverse=True)
        longest = gaps[: max(len(gaps) // 10, 1)]
        return sum(longest) / len(longest) if longest else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second after the first token.

        If the answer came in few events, for example because text is held back until it is
        complete, the time of the first token means nothing; then it is the rate over the whole
        request.
        """
        events, tokens = len(self.event_times_s), self.output_tokens
        if tokens == 0:
            return 0.0
        if events < 2 or 2 * events < tokens:
            return tokens / max(self.latency_s, 1e-9)
        return (tokens - 1) / max(self.done_s - self.event_times_s[0], 1e-9)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between successive events: inter-token latencies."""
        return [b - a for a, b in pairwise(self.event_times_s)]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a latency over requests or tokens, in milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run; named as in the JSON of SGLang's client, if it has them."""

    backend: str
    dataset_name: str
    request_rate: float | None
    """Requested rate in requests per second; None: all at once."""
    max_concurrency: int | None
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    peak_output_throughput: float
    """Largest number of output tokens in one second."""
    max_concurrent_requests: int
    concurrency: float
    """Mean number of requests in progress."""
    e2e_latency_ms: Distribution | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    goodput: float | None
    """Requests per second that kept all objectives; None if there were none."""
    attained: float | None
    """Share of all requests that kept all objectives; None if there were none."""
    errors: dict[str, int] = {}
    """Number of requests by the first line of their error."""
