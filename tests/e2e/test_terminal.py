"""``tandem chat``, ``tandem generate`` and the demo, with a running server or one of their own."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from terminal import Terminal


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tandem", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_chat_keeps_the_conversation_and_prints_rates(server):
    result = run(
        "chat", "--url", server.url, "--max-tokens", "12", "--temperature", "0",
        text="Write a function.\nNow another.\n/exit\n",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tokens/s; answer 12 tokens in") == 2


def test_chat_json_reuses_the_first_turn(server):
    result = run(
        "chat", "--url", server.url, "--max-tokens", "8", "--temperature", "0", "--json",
        "--prompt", "Write a function that adds.", "--prompt", "Again.",
    )  # fmt: skip
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["cached_tokens"] > 0


@pytest.mark.slow
def test_json_of_a_conversation_from_a_pipe_is_a_line_an_answer(server):
    result = run(
        "chat", "--url", server.url, "--max-tokens", "4", "--json", text="One.\nTwo.\n",
    )  # fmt: skip
    assert [json.loads(line)["prompt_tokens"] > 0 for line in result.stdout.splitlines()] == [
        True,
        True,
    ]


def test_chat_survives_an_error(server):
    result = run("chat", "no-such", "--url", server.url, "--prompt", "Hello.")
    assert "no-such" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_generate_starts_its_own_server_behind_a_key():
    result = run(
        "generate", "demo", "-p", "def add(a, b):\n", "--max-tokens", "8", "--temperature", "0",
        "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["completion_tokens"] > 0
    assert answer["text"]


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_only_the_end_of_the_chat_ends_its_server(tmp_path):
    """Ctrl-C signals every process of the terminal's foreground group, as ``killpg`` does here."""
    arguments = ("chat", "demo", "--max-tokens", "1000")
    with Terminal(*arguments, home=tmp_path) as terminal:
        chat = terminal.process
        terminal.expect("Chat:")
        terminal.type(b"Write a long function.\r")
        terminal.expect("\x1b[?2004l")  # The line is read: what follows is the answer.
        os.killpg(chat.pid, signal.SIGINT)
        terminal.expect("tokens/s")
        terminal.expect("Chat:")
        terminal.type(b"Another.\r")
        terminal.expect("tokens/s")
        (server,) = map(int, Path(f"/proc/{chat.pid}/task/{chat.pid}/children").read_text().split())
        server_end = os.pidfd_open(server)
        try:
            chat.kill()
            assert select.select([server_end], [], [], 60)[0], "the server outlives the chat"
        finally:
            os.close(server_end)


@pytest.mark.slow
def test_the_readmes_demo_answers_two_prompts_and_the_second_finds_a_cache():
    demo = Path(__file__).parents[2] / "examples" / "demo.py"
    result = subprocess.run([sys.executable, demo], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert "of these cached" in result.stdout
