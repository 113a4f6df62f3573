"""``tandem chat`` and ``tandem generate`` against a running server, and with one of their own."""

import json
import subprocess
import sys


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
    assert result.stdout.count("eval rate:") == 4
    assert result.stdout.count("prompt eval rate:") == 2


def test_chat_json_reuses_the_first_turn(server):
    result = run(
        "chat", "--url", server.url, "--max-tokens", "8", "--temperature", "0", "--json",
        "--prompt", "Write a function that adds.", "--prompt", "Again.",
    )  # fmt: skip
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["cached_tokens"] > 0


def test_chat_survives_an_error(server):
    result = run("chat", "--url", server.url, "--max-tokens", "99999", "--prompt", "Hello.")
    assert "max_tokens" in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_starts_its_own_server_behind_a_key():
    result = run(
        "generate", "demo", "-p", "def add(a, b):\n", "--max-tokens", "8", "--temperature", "0",
        "--json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["completion_tokens"] > 0
    assert answer["text"]
