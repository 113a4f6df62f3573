"""A headless Chromium for tests of the page: skipped by name where it is not installed.

It may talk to the server under test alone; whatever it says on its console as a warning or an
error fails the test that asked for it (``Visit.check``).
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

STEP_MS = 20_000
"""For anything that a test waits for on the page."""
PHONE = {"width": 390, "height": 780}
DESK = {"width": 1360, "height": 860}


@dataclass
class Visit:
    """A page in a browser of its own, and what went wrong on it."""

    page: object
    origin: str
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def check(self, *expected: str) -> None:
        """Fail if the console has said anything but what contains one of ``expected``."""
        left = [line for line in self.complaints if not any(word in line for word in expected)]
        assert left == []
        assert self.strangers == []

    def check_access(self) -> None:
        """Fail if axe-core finds a violation on the page as it is now."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright")
        results = axe.Axe().run(self.page)
        found = [
            (each["id"], each["help"], [node["html"][:160] for node in each["nodes"]][:4])
            for each in results.response["violations"]
        ]
        assert found == []

    def check_width(self) -> None:
        """Fail if the page is wider than its window."""
        too_wide = self.page.evaluate(
            "() => [...document.querySelectorAll('body *')].filter((each) =>"
            " !each.closest('.scroll, pre, .unseen, .skip') &&"
            " each.getBoundingClientRect().right > innerWidth + 1 &&"
            " each.getBoundingClientRect().width > 0).map((each) => each.outerHTML.slice(0, 120))"
        )
        assert too_wide == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@contextlib.contextmanager
def start_chromium() -> Iterator[object]:
    """Start Debian's browser, headless."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def visit(
    browser, url: str, *, size=DESK, scheme: str = "light", path: str = "/"
) -> Iterator[Visit]:
    """Open a server's page in a window of its own."""
    context = browser.new_context(viewport=size, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    page = context.new_page()
    page.set_default_timeout(STEP_MS)
    seen = Visit(page, url)
    page.on(
        "console",
        lambda message: (
            seen.complaints.append(f"{message.type}: {message.text}")
            if message.type in ("error", "warning")
            else None
        ),
    )
    page.on("pageerror", lambda error: seen.complaints.append(f"thrown: {error}"))
    page.on(
        "request",
        lambda request: (
            seen.strangers.append(request.url)
            if not request.url.startswith((url, "data:", "blob:"))
            else None
        ),
    )
    try:
        page.goto(url + path)
        yield seen
    finally:
        context.close()
