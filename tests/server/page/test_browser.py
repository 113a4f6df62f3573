"""The page as a person uses it, in a headless Chromium.

Method: real servers over the fake engine, whose model says what a test gives it, as slowly as the
test needs; each test ends with a look at the console and at what was asked of other hosts.
"""

import time

import pytest
from fake_engine import FakeEngine, make_info
from serving import LiveServers, wait_until
from vocabularies import CALL, TOOL_TEMPLATE, make_byte_level_tokenizer

from browser import PHONE, STEP_MS, start_chromium, visit
from tandem.models.loading.hub import DEMO_FOLDER, DEMO_NOTE
from tandem.server.defaults import DefaultSampling, SamplingDefaults

pytestmark = pytest.mark.slow

MARKDOWN = """\
# Reading a file

Open it, then read **line by line**:

```python
def read(path):
    with open(path) as file:
        return [line.rstrip() for line in file]  # one string a line
```

| call | reads |
|---|---|
| `read()` | all |
| `readline()` | one line |

<img src=x onerror=alert(1)> ![picture](http://example.org/x.png) [go](javascript:alert(1))
"""
TOOLS = (
    '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
)


@pytest.fixture(scope="module")
def browser():
    with start_chromium() as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_level_tokenizer(TOOL_TEMPLATE)


@pytest.fixture(scope="module")
def live(tokenizer):
    with LiveServers(tokenizer) as servers:
        yield servers.start(FakeEngine(info=make_info(320, max_model_len=4096)))


@pytest.fixture
def say(live, tokenizer):
    """Have the model say a text, at so many seconds a token."""
    live.renew()

    def say(text: str, step_s: float = 0.0) -> None:
        live.engine.answer = tokenizer.encode(text)
        live.engine.stop_token_id = 0
        live.engine.step_s = step_s

    return say


def send(page, text: str) -> None:
    page.locator("#model option").first.wait_for(state="attached")
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_label(chart, is_wanted) -> None:
    """Wait for the words of a chart: the policy of the page lets no test evaluate one there."""
    deadline_s = time.monotonic() + STEP_MS / 1e3
    while not is_wanted(label := chart.get_attribute("aria-label")):
        assert time.monotonic() < deadline_s, label
        chart.page.wait_for_timeout(50)


def test_an_answer_is_shown_and_nothing_in_it_runs(browser, live, say):
    say(f"<think>\nHow to read?\n</think>\n\n{MARKDOWN}")
    with visit(browser, live.url) as seen:
        page = seen.page
        send(page, "How do I read a file?")
        page.get_by_role("button", name="Regenerate").wait_for()
        answer = page.locator(".turn.assistant")
        assert answer.locator("h1").inner_text() == "Reading a file"
        assert answer.locator("pre .hljs-keyword").first.inner_text() == "def"
        assert answer.locator("table td").count() == 4
        assert not answer.locator("img").count()
        assert [link.get_attribute("href") for link in answer.locator("a").all()] == [
            "http://example.org/x.png"
        ]
        thought = answer.locator("details.thought")
        assert not thought.evaluate("each => each.open")
        thought.locator("summary").click()
        assert "How to read?" in thought.inner_text()
        answer.locator(".code-head button").click()
        answer.get_by_text("Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("def read(path):")
        seen.check_access()
        seen.check()


def test_stop_edit_and_regenerate(browser, live, say):
    say("slow " * 400, step_s=0.02)
    with visit(browser, live.url) as seen:
        page = seen.page
        send(page, "Go on for long")
        page.locator(".turn.assistant .prose").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("You stopped this answer.").wait_for()
        wait_until(lambda: live.engine.num_held == 0)
        assert live.engine.cancelled
        say("short")
        page.get_by_role("button", name="Regenerate").click()
        page.locator(".turn.assistant .prose").get_by_text("short", exact=True).wait_for()
        assert page.locator(".turn").count() == 2
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the message").fill("Something else")
        page.get_by_role("button", name="Ask again").click()
        page.locator(".bubble").get_by_text("Something else").wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".turn").count() == 2
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0
        seen.check()


def test_settings_are_sent_and_a_wrong_one_is_named(browser, live, say):
    say("fine")
    with visit(browser, live.url) as seen:
        page = seen.page
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Longest answer").fill("7")
        send(page, "hello")
        page.get_by_role("button", name="Regenerate").wait_for()
        (request,) = live.engine.requests
        assert request.sampling.temperature == 0.5
        assert request.sampling.max_tokens == 7
        page.get_by_label("Temperature").fill("9")
        page.get_by_role("button", name="Regenerate").click()
        alert = page.get_by_role("alert").filter(has_text="Temperature")
        assert alert.inner_text() == "Temperature must be a number from 0 to 2."
        assert len(live.engine.requests) == 1
        seen.check()


def test_a_chat_begins_with_what_holds(browser, tokenizer):
    """The sampling of whoever sets none, and what the demo is for."""
    names = ("temperature", "top_p", "top_k", "min_p")
    with LiveServers(tokenizer) as servers:
        for folder, note, values in (
            (None, "", SamplingDefaults(temperature=0.6, top_k=20)),
            (DEMO_FOLDER, DEMO_NOTE, SamplingDefaults()),
        ):
            live = servers.start(FakeEngine(info=make_info(320)), folder=folder)
            live.app.state.context.defaults = DefaultSampling(values, values, values)
            with visit(browser, live.url) as seen:
                page = seen.page
                page.locator("#model option").first.wait_for(state="attached")
                shown = [page.locator(f"#sampling-{n}").get_attribute("placeholder") for n in names]
                assert shown == (["1", "1", "all", "0"] if note else ["0.6", "1", "20", "0"])
                told = page.locator("#model-warning")
                assert told.count() == bool(note)
                if note:
                    assert told.inner_text() == note
                seen.check_access()
                seen.check()


def test_a_call_is_shown_and_answered(browser, live, say, tokenizer):
    say(f"I look.\n{CALL}")
    with visit(browser, live.url) as seen:
        page = seen.page
        page.get_by_label("Tools, as JSON").fill(TOOLS)
        send(page, "Weather?")
        page.get_by_text("Calls get_weather").wait_for()
        assert '"city": "Bern 😀"' in page.locator(".call pre").inner_text()
        page.get_by_label("Result", exact=True).fill("sunny")
        seen.check_access()
        say("It is sunny.")
        page.get_by_role("button", name="Send results").click()
        page.locator(".prose").get_by_text("It is sunny.").wait_for()
        assert "[tool]sunny" in tokenizer.decode(live.engine.requests[-1].prompt_ids)
        seen.check()


def test_the_key_is_asked_for_and_kept_in_memory(browser, tokenizer):
    with LiveServers(tokenizer) as servers:
        live = servers.start(
            FakeEngine(info=make_info(320, max_model_len=4096)), api_key=("right-key",)
        )
        with visit(browser, live.url) as seen:
            page = seen.page
            dialog = page.get_by_role("dialog")
            dialog.wait_for()
            page.get_by_label("API key").fill("wrong")
            page.keyboard.press("Enter")
            dialog.get_by_text("The server does not know that key").wait_for()
            seen.check_access()
            page.get_by_label("API key").fill("right-key")
            page.keyboard.press("Enter")
            page.locator("#model option").first.wait_for(state="attached")
            assert "right-key" not in page.content()
            kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
            assert kept == [0, 0, ""]
            page.reload()
            dialog.wait_for()
            seen.check("401")


def test_an_error_is_a_sentence(browser, live, say):
    say("never")
    live.engine.max_running = 0
    with visit(browser, live.url) as seen:
        page = seen.page
        send(page, "hello")
        alert = page.locator(".turn [role=alert]")
        alert.wait_for()
        said = alert.inner_text()
        assert said.startswith("The server cannot answer now: ")
        assert said.endswith("Try again in 1 s.")
        live.engine.max_running = 8
        page.get_by_role("button", name="Try again").click()
        page.locator(".prose").get_by_text("never").wait_for()
        live.engine.die_after = 1
        page.get_by_role("button", name="Regenerate").click()
        alert.wait_for()
        assert alert.inner_text().startswith("The server ")
        seen.check("503")


def test_a_chart_moves_and_a_timeline_is_drawn(browser, live, say):
    say("word " * 50)
    with visit(browser, live.url) as seen:
        page = seen.page
        send(page, "hello")
        page.get_by_role("button", name="Regenerate").wait_for()
        page.get_by_role("button", name="Timeline").click()
        page.locator("svg.waterfall").wait_for()
        seen.check_access()
        page.get_by_role("tab", name="Live").click()
        page.locator("#card-speed canvas").wait_for()
        chart = page.locator("#card-speed .chart")
        still = "Tokens a second: generated 0, prompt 0"
        wait_for_label(chart, lambda label: label == still)
        assert live.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 40}}).ok
        wait_for_label(chart, lambda label: label != still)
        assert page.locator("#ttft svg.bars").count() == 1
        assert page.locator("#instances tbody tr").count() == 1
        seen.check_access()
        seen.check()


def test_the_keyboard_reaches_everything(browser, live, say):
    say("fine")
    with visit(browser, live.url) as seen:
        page = seen.page
        page.locator("#model option").first.wait_for(state="attached")
        wanted = set(
            page.evaluate(
                "[...document.querySelectorAll("
                "'button, input, select, textarea, summary, a[href]')]"
                ".filter((each) => each.offsetParent && each.tabIndex >= 0)"
                ".map((each) => each.id || each.textContent)"
            )
        )
        reached = set()
        for _ in range(3 * len(wanted)):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.textContent")
            )
        assert wanted <= reached
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("tab", name="Live").get_attribute("aria-selected") == "true"
        assert page.locator("#view-live").is_visible()
        page.keyboard.press("Home")
        assert page.locator("#view-chat").is_visible()
        seen.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone(browser, live, say, scheme):
    say(MARKDOWN)
    with visit(browser, live.url, size=PHONE, scheme=scheme) as seen:
        page = seen.page
        send(page, "How do I read a file whose name is very long and has no spaces " + "x" * 80)
        page.get_by_role("button", name="Regenerate").wait_for()
        seen.check_width()
        seen.check_access()
        page.get_by_role("tab", name="Live").click()
        page.locator("#instances table").wait_for()
        seen.check_width()
        seen.check_access()
        page.get_by_role("tab", name="Requests").click()
        page.locator(".sent button").first.click()
        picture = page.locator("svg.waterfall")
        picture.wait_for()
        # The bars and their times are seen without scrolling.
        assert picture.bounding_box()["width"] <= PHONE["width"]
        seen.check_width()
        seen.check()


def test_a_server_that_goes_away_is_told(browser, tokenizer):
    with LiveServers(tokenizer) as servers:
        live = servers.start(FakeEngine(info=make_info(320, max_model_len=4096)))
        with visit(browser, live.url) as seen:
            page = seen.page
            page.get_by_text("Ready").wait_for()
            live.stop()
            live.join()
            deadline_s = time.monotonic() + 60
            while "cannot be reached" not in page.locator("#state-text").inner_text():
                assert time.monotonic() < deadline_s
                page.wait_for_timeout(100)
            seen.check("ERR_CONNECTION", "503", "Failed to load")
