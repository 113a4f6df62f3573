"""A template renders as checkpoints expect, and a hostile one reaches nothing.

Method: templates of the forms that real checkpoints use; and attacks on Python's internals, on
memory and on time, after each of which the next conversation renders.
"""

import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from fake_engine import FakeEngine, make_info
from serving import LiveServers
from vocabularies import CHAT_TEMPLATE, make_byte_level_tokenizer

from tandem.core.errors import ConfigError, PeerLostError
from tandem.server.api.prompts import PromptEncoder
from tandem.server.protocol.openai import ContentPart, InputCall, InputFunction, InputMessage
from tandem.server.text.chat_template import ChatTemplate
from tandem.server.text.work_threads import WorkThreads

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>&'\""}]


def render(source: str, **arguments) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, timeout_s=60.0, max_chars=10_000)
    try:
        return template.render(MESSAGES, arguments)
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{{ messages[1]['content'] }}", "<b>&'\""),
        ("{{ messages[1] | tojson }}", '{"role": "assistant", "content": "<b>&\'\\""}'),
        ("{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n{% endif %}{% endfor %}",
         "user\n"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}", "a2"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
        ("{{ strftime_now('%Y') | length }}{{ enable_thinking }}{{ tools is none }}", "4TrueTrue"),
        ("{{ messages[0].content.split('i')[0] ~ '世😀' }}", "h世😀"),
    ],
)  # fmt: skip
def test_forms_of_real_templates(source, expected):
    assert render(source, enable_thinking=True) == expected


def test_tools_have_a_template_of_their_own():
    template = ChatTemplate("plain", {}, tool_source="{{ tools[0] }}", timeout_s=60.0)
    try:
        assert template.render(MESSAGES, {}) == "plain"
        assert template.render(MESSAGES, {"tools": ["a tool"]}) == "a tool"
        assert template.render(MESSAGES, {"tools": []}) == "plain"
    finally:
        template.close()


def test_the_date_is_that_of_the_time_zone(monkeypatch):
    """Its process has no environment, so the zone comes with each conversation."""
    try:
        for zone, offset in (("XYZ-05:45", "+0545"), ("ABC+11", "-1100")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert render("{{ strftime_now('%Z %z') }}") == f"{zone[:3]} {offset}"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_large_integer_reaches_the_template():
    """A client's JSON may hold any; the frames are no reason to refuse one."""
    assert render("{{ budget + 1 }}", budget=10**40) == str(10**40 + 1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ messages.append(1) }}",
        "{{ 'x'.format.__self__.__class__.__base__ }}",
        "{{ '{0.__class__}'.format(messages) }}{{ ''.__class__.x.y }}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ raise_exception('no system role') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_an_attack_or_a_mistake_is_an_error(source):
    with pytest.raises(ConfigError) as caught:
        render(source)
    assert caught.value.field == "messages"
    assert "root:" not in str(caught.value)


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(ConfigError, match="no system role"):
        render("{{ raise_exception('no system role') }}")


HOSTILE = (
    "{% if messages[0].content == 'spin' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'grow' %}{{ 'x' * 10**10 }}"
    "{% elif messages[0].content == 'double' %}{% set ns = namespace(s='x') %}"
    "{% for i in range(50) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    "{% elif messages[0].content == 'print' %}"
    "{% for a in range(99999) %}xxxxxxxxxx{% endfor %}"
    "{% else %}fine{% endif %}"
)


def test_time_memory_and_output_are_bounded_and_the_next_one_renders():
    template = ChatTemplate(HOSTILE, {}, timeout_s=1.0, max_chars=10_000)

    def ask(content: str) -> str:
        return template.render([{"role": "user", "content": content}], {})

    try:
        assert ask("hello") == "fine"
        for content, reason, error in (
            ("spin", "in time", PeerLostError),
            ("grow", "memory", ConfigError),
            ("double", "memory|in time", (ConfigError, PeerLostError)),
            ("print", "10000", ConfigError),
        ):
            with pytest.raises(error, match=reason):
                ask(content)
            assert ask("hello") == "fine"
    finally:
        template.close()


def test_a_closed_template_leaves_no_process_and_can_start_again():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(MESSAGES, {}) == "hi"
    (process,) = template._processes._workers
    template.close()
    assert process.returncode is not None
    assert template.render(MESSAGES, {}) == "hi"
    template.close()


def test_a_worker_that_hangs_or_is_killed_is_a_retryable_error():
    """A stopped process takes no input either, so a conversation larger than a pipe hangs, too."""
    template = ChatTemplate("{{ messages[0].content }}", {}, timeout_s=1.0)
    try:
        for harm in (signal.SIGSTOP, signal.SIGKILL):
            for content in ("hi", "x" * 2**18):
                assert template.render([{"role": "user", "content": content}], {}) == content
                (process,) = template._processes._workers
                process.send_signal(harm)
                if harm == signal.SIGKILL:
                    # Noticed before it is used: another one is started.
                    process.wait(60)
                    continue
                with pytest.raises(PeerLostError) as caught:
                    template.render([{"role": "user", "content": content}], {})
                assert caught.value.retryable
                assert process.returncode is not None
    finally:
        template.close()


CTRL_C = """
import os, signal
from tandem.server.text.chat_template import ChatTemplate
signal.signal(signal.SIGINT, lambda *_: None)
template = ChatTemplate("{{ messages[0].content }}", {})
try:
    for content in ("before", "after"):
        text = template.render([{"role": "user", "content": content}], {})
        (worker,) = template._processes._workers
        print(text, 1)
        os.killpg(0, signal.SIGINT)
        try:
            print(worker.wait(0.3))
        except Exception:
            print("runs")
finally:
    template.close()
"""


def test_ctrl_c_is_for_the_server_which_drains():
    """A terminal sends it to the whole group; what is accepted is still to be rendered."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=60,
        start_new_session=True, check=False,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["before 1", "runs", "after 1", "runs", ""], done.stderr


def test_conversations_are_rendered_beside_each_other():
    """One that takes long does not hold another up."""
    template = ChatTemplate(HOSTILE, {}, timeout_s=60.0)
    failed = []

    def spin():
        with pytest.raises(PeerLostError):
            template.render([{"role": "user", "content": "spin"}], {})
        failed.append(True)

    spinning = threading.Thread(target=spin)
    try:
        spinning.start()
        while not template._processes._workers:
            threading.Event().wait(0.001)
        assert template.render(MESSAGES, {}) == "fine"
        assert not failed, "the other one is still at work"
    finally:
        template.close()
        spinning.join(60)
    assert failed


def test_over_http_a_worker_that_hangs_is_retryable_and_a_refusal_is_not():
    tokenizer = make_byte_level_tokenizer(chat_template=HOSTILE)
    with LiveServers(tokenizer) as servers:
        # A process that starts on a busy machine counts, too: long enough for that.
        live = servers.start(template_timeout_s=1.0)
        for content, status in (("hello", 200), ("spin", 503), ("print" * 9, 200), ("grow", 400)):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            reply = live.post("/v1/chat/completions", body)
            assert reply.status_code == status, (content, reply.text)
            if status == 503:
                assert reply.headers["Retry-After"]
                assert reply.json()["error"]["type"] == "server_error"
            if status == 400:
                assert reply.json()["error"]["param"] == "messages"


def test_a_model_with_states_learns_where_the_last_message_ends():
    """What opens the answer is not part of the next turn's prompt, which drops the reasoning."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    tokenizer = make_byte_level_tokenizer(chat_template=template)
    info = msgspec.structs.replace(make_info(tokenizer.vocab_size), num_state_slots=4)
    messages = [{"role": "user", "content": "the cat"}]
    more = [{"role": "assistant", "content": "sat</think>on"}, {"role": "user", "content": "it"}]
    with LiveServers(tokenizer) as servers:
        live = servers.start(FakeEngine(info=info))
        for asked in (messages, messages + more):
            body = {"messages": asked, "max_tokens": 1}
            assert live.post("/v1/chat/completions", body).status_code == 200
        body |= {"add_generation_prompt": False}
        assert live.post("/v1/chat/completions", body).status_code == 200
        first, second, unasked = live.engine.requests
    known = tokenizer.encode("<|user|>the cat\n", add_special_tokens=False)
    assert first.prompt_ids[: first.message_end] == known
    assert second.prompt_ids[: first.message_end] == known
    assert second.prompt_ids[: len(first.prompt_ids)] != first.prompt_ids
    opening = tokenizer.encode("<|assistant|><think>\n", add_special_tokens=False)
    assert second.prompt_ids[second.message_end :] == opening
    assert unasked.message_end == 0


CONTENTS = ("The cat ", "<", ">", "", " \n", "assistant", "|im_start|", "a\n<|im_end|>\n", " b")


@pytest.mark.parametrize("strips", [False, True])
def test_a_final_message_is_continued_after_its_last_character(strips):
    """Whatever its text is, also where the marks of turns have it or the template strips it."""
    source, head = CHAT_TEMPLATE, "<|im_start|>system\na<|im_end|>\n<|im_start|>assistant\n"
    if strips:
        source = source.replace("message['content']", "message['content'] | trim")
    encoder = PromptEncoder(
        make_byte_level_tokenizer(), WorkThreads(1), ChatTemplate(source, {}, timeout_s=60.0)
    )
    messages = [InputMessage("developer", [ContentPart("text", "a")])]

    def continue_with(final: InputMessage) -> str:
        return encoder.render(
            [*messages, final],
            add_generation_prompt=None,
            continue_final_message=True,
            arguments=None,
        )

    try:
        for content in CONTENTS:
            expected = head + (content.lstrip() if strips and content.strip() else content)
            assert continue_with(InputMessage("assistant", content)) == expected
        call = InputCall(InputFunction("f"))
        with pytest.raises(ConfigError, match="tool calls") as caught:
            continue_with(InputMessage("assistant", "a", tool_calls=[call]))
        assert caught.value.field == "continue_final_message"
    finally:
        encoder.close()
