"""Measure what an open page costs a server that has 16 live streams.

    python tools/page/cost.py [--rounds 8] [--seconds 4]

The demo model streams to 16 clients. Rounds come in pairs, in turn: without a page, and with what
the live view of one asks for (``/metrics`` and ``/server_info`` every two seconds), from a process
that draws nothing, as the browser of a user is on another machine. Printed are tokens/s of both,
the median of the pairs' ratios, and the server's CPU time of one reading, which other work on the
machine changes little; of it follows the share of a core that a page takes.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from picture import serve

NUM_STREAMS = 16
EVERY_S = 2.0
NUM_READINGS = 50
MODEL = "serve demo --port 0 --server.access-log false"
PAUSE_S = 0.2


class Streams:
    """Clients that stream answers and count their tokens."""

    def __init__(self, url: str) -> None:
        self.num_tokens = 0
        self._url, self._stop, self._lock = url, threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        body = {"model": "demo", "prompt": f"def f{number}(", "max_tokens": 512, "stream": True,
                "ignore_eos": True}  # fmt: skip
        while not self._stop.is_set():
            request = urllib.request.Request(
                f"{self._url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=60) as reply:
                for line in reply:
                    if line.startswith(b"data: {"):
                        with self._lock:
                            self.num_tokens += 1
                    if self._stop.is_set():
                        break

    def stop(self) -> None:
        """End them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def read_page(url: str) -> None:
    """Ask for what the live view asks for, once."""
    for path in ("/metrics", "/server_info"):
        with urllib.request.urlopen(url + path, timeout=30) as reply:
            reply.read()


def measure(url: str, streams: Streams, seconds: float, *, is_open: bool) -> float:
    """Return tokens/s of a round."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(EVERY_S):
            read_page(url)

    page = threading.Thread(target=poll, daemon=True)
    if is_open:
        page.start()
    begin_s, before = time.monotonic(), streams.num_tokens
    stop.wait(seconds)
    rate = (streams.num_tokens - before) / (time.monotonic() - begin_s)
    stop.set()
    if is_open:
        page.join(30)
    return rate


def read_cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Measure what an open page costs a server.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    with serve(MODEL) as (url, pid):
        before = read_cpu_s(pid)
        for _ in range(NUM_READINGS):
            read_page(url)
        reading_s = (read_cpu_s(pid) - before) / NUM_READINGS
        streams = Streams(url)
        while streams.num_tokens < NUM_STREAMS * 4:
            time.sleep(PAUSE_S)
        pairs = [
            (
                measure(url, streams, options.seconds, is_open=False),
                measure(url, streams, options.seconds, is_open=True),
            )
            for _ in range(options.rounds)
        ]
        streams.stop()
    without, beside = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    sys.stdout.write(
        f"{NUM_STREAMS} streams: {without:.0f} tokens/s without a page, {beside:.0f} with one, "
        f"ratio {statistics.median(ratios):.3f} [{ratios[len(ratios) // 4]:.3f}, "
        f"{ratios[-1 - len(ratios) // 4]:.3f}], n {len(pairs)}\n"
        f"a reading takes {reading_s * 1e3:.2f} ms of the server's CPU, "
        f"{reading_s / EVERY_S:.2%} of a core; load {os.getloadavg()[0]:.0f}\n"
    )


if __name__ == "__main__":
    main()
