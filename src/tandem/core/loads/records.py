"""Records of a load test: what was asked, when its tokens came, and the figures over all of it.

``tandem bench serve`` writes them. Times are seconds of one monotonic clock, from the start of the
run.
"""

from itertools import pairwise

import msgspec

__all__ = ["Distribution", "LoadReport", "RequestRecord"]


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it."""

    index: int
    conversation: int = -1
    """Requests of one conversation follow each other; -1 is a request of its own."""
    input_length: int
    """Tokens of the prompt, by the server's count where it gives one."""
    output_length: int
    """Tokens that were asked for."""
    due_s: float = 0.0
    """The arrival that the load planned."""
    sent_s: float = 0.0
    event_times_s: list[float] = []
    """Arrival of each event that brought text."""
    done_s: float = 0.0
    output_tokens: int = 0
    """Tokens that came, by the server's count where it gives one, else events."""
    cached_tokens: int = 0
    text: str = ""
    error: str = ""
    """Empty where the request succeeded."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.event_times_s[0] - self.sent_s if self.event_times_s else 0.0

    @property
    def latency_s(self) -> float:
        """Time to the end of the answer."""
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 of an answer of one token."""
        if self.output_tokens < 2 or not self.event_times_s:
            return 0.0
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.output_tokens - 1)

    @property
    def tbt_s(self) -> float:
        """Mean of the longest tenth of the times between events, as the Mooncake paper has it."""
        gaps = sorted(self.gaps_s, reverse=True)
        longest = gaps[: max(len(gaps) // 10, 1)]
        return sum(longest) / len(longest) if longest else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed that the user saw after the first token.

        Of an answer that came in few events, as text that is held back until it is whole, the
        first token's time says nothing: then it is that of the whole request.
        """
        events, tokens = len(self.event_times_s), self.output_tokens
        if tokens == 0:
            return 0.0
        if events < 2 or 2 * events < tokens:
            return tokens / max(self.latency_s, 1e-9)
        return (tokens - 1) / max(self.done_s - self.event_times_s[0], 1e-9)

    @property
    def gaps_s(self) -> list[float]:
        """Times between events: inter-token latencies."""
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
    """The figures of a run; names as in the JSON of SGLang's client, where it has them."""

    backend: str
    dataset_name: str
    request_rate: float | None
    """Requests a second that were asked for; None is all at once."""
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
    """Tokens in the fullest second."""
    max_concurrent_requests: int
    concurrency: float
    """Requests under way on average."""
    e2e_latency_ms: Distribution | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    goodput: float | None
    """Requests a second that kept every objective; None where none was set."""
    attained: float | None
    """Share of all requests that kept every objective."""
    errors: dict[str, int] = {}
    """First lines of errors, and how many requests had each."""
