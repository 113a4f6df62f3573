"""Serve the demo model and ask it two prompts that share a long prefix; `make demo` runs this.

Prints what the model writes as it arrives, tokens per second, time to first token of both, and how
many prompt tokens of the second were found in the cache.
"""

import sys
import time

import httpx

from tandem.cli.asking.local_server import connect
from tandem.cli.asking.stream import StreamResult, stream_events
from tandem.core.errors import TandemError

MAX_TOKENS = 96

PREFIX = '''"""Small statistics helpers."""

import math


def mean(values):
    """Return the arithmetic mean of values."""
    if not values:
        raise ValueError("mean requires at least one value")
    return sum(values) / len(values)


def variance(values, sample=True):
    """Return the variance of values."""
    n = len(values)
    if n < 2:
        raise ValueError("variance requires at least two values")
    m = mean(values)
    total = 0.0
    for value in values:
        total += (value - m) ** 2
    return total / (n - 1 if sample else n)


class Histogram:
    """Count values by bucket."""

    def __init__(self, bounds):
        self.bounds = sorted(bounds)
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value):
        """Add one value to its bucket."""
        for i, bound in enumerate(self.bounds):
            if value < bound:
                self.counts[i] += 1
                return
        self.counts[-1] += 1


'''
PROMPTS = [
    PREFIX + 'def median(values):\n    """Return the median of values."""\n',
    PREFIX + 'def read_values(path):\n    """Read one number per line from a file."""\n',
]


def main() -> int:
    """Run the demo; return 0 if both answers came and the second met a warm cache."""
    print("$ tandem serve demo", flush=True)
    try:
        with connect("demo", None, None, []) as (client, _):
            print(f"serving at {client.base_url}\n")
            first, second = [
                ask(client, number, prompt) for number, prompt in enumerate(PROMPTS, start=1)
            ]
    except (TandemError, httpx.HTTPError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    print("=" * 78)
    print(f"{'':24}{'first prompt':>16}{'second prompt':>16}")
    print(f"{'prompt tokens':24}{first.prompt_tokens:>16}{second.prompt_tokens:>16}")
    print(f"{'of these cached':24}{first.cached_tokens:>16}{second.cached_tokens:>16}")
    print(f"{'time to first token':24}{first_ms(first):>13.0f} ms{first_ms(second):>13.0f} ms")
    print(f"{'tokens per second':24}{rate(first):>16.0f}{rate(second):>16.0f}")
    return 0 if second.cached_tokens > 0 else 1


def first_ms(result: StreamResult) -> float:
    """Time to first token, milliseconds."""
    return (result.first_token_s or result.total_s) * 1e3


def rate(result: StreamResult) -> float:
    """Tokens per second after the first."""
    seconds = result.total_s - (result.first_token_s or 0.0)
    return (result.completion_tokens - 1) / max(seconds, 1e-9)


def ask(client: httpx.Client, number: int, prompt: str) -> StreamResult:
    """Stream one completion to the screen; return its figures."""
    print(f"--- prompt {number}: {len(prompt)} characters, the last lines are")
    print("\n".join(prompt.splitlines()[-2:]))
    # Greedy decoding of a small model falls into loops; a seed makes sampling repeatable as well.
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "seed": 5,
    }
    result = StreamResult()
    begin_s = time.perf_counter()
    for event in stream_events(client, "/v1/completions", body):
        print(result.take(event, time.perf_counter() - begin_s), end="", flush=True)
    result.total_s = time.perf_counter() - begin_s
    print("\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
