"""Take the picture of the page that the README shows: a real server's live view, in Chromium.

    python tools/page/picture.py docs/images/page.png

A prefill and a decode instance of the demo model share a store; eight clients ask meanwhile, so
that the charts have something to show. Needs Debian's chromium and playwright.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

SERVER = (
    "serve demo --port 0 --prefill 1 --decode 1 --store.memory 64MiB --engine.block-size 16 "
    "--server.access-log false"
)
WIDTH, HEIGHT = 1360, 860
NUM_CLIENTS = 8
NUM_READINGS = 12
"""Readings of the page, one every two seconds, before the picture is taken."""
START_S, WAIT_S, STEP_MS = 240, 60, 60_000


@contextmanager
def serve(words: str = SERVER) -> Iterator[tuple[str, int]]:
    """Run a server; yield its address and process."""
    command = [sys.executable, "-m", "tandem", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        timer = threading.Timer(START_S, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            url = next((m[0] for line in lines if (m := re.search(r"http://\S+", line))), None)
            timer.cancel()
            if url is None:
                sys.exit("tandem serve demo did not start")
            yield url, server.pid
        finally:
            timer.cancel()
            server.send_signal(signal.SIGTERM)
            server.wait(WAIT_S)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep clients asking, each about a file that grows by what it was answered."""
    stop = threading.Event()

    def ask(number: int) -> None:
        text = f'"""Module {number}."""\n\nimport os\n\n\ndef read_{number}(path):\n'
        while not stop.is_set():
            body = {"model": "demo", "prompt": text, "max_tokens": 64, "ignore_eos": True}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
                text += json.load(reply)["choices"][0]["text"]
            text = text[:3000]

    clients = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(WAIT_S)


def take_picture(url: str, file: Path) -> None:
    """Open the live view, let its charts fill, and write what is seen."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
            )
            page.set_default_timeout(STEP_MS)
            readings = 0

            def count(url: str) -> None:
                nonlocal readings
                readings += url.endswith("/server_info")

            page.on("requestfinished", lambda request: count(request.url))
            page.goto(url)
            page.get_by_role("tab", name="Live").click()
            page.locator("#instances tbody tr").first.wait_for()
            for _ in range(NUM_READINGS):
                with page.expect_request_finished(lambda r: r.url.endswith("/server_info")):
                    pass
            page.screenshot(path=file)
        finally:
            browser.close()


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description="Take the picture of the page.")
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    with serve() as (url, _), load(url):
        take_picture(url, file)
    sys.stdout.write(f"{file}: {file.stat().st_size >> 10} KiB\n")


if __name__ == "__main__":
    main()
