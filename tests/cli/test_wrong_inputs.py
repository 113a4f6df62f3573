"""Every command's help renders, and nothing that a user can do ends in a traceback.

Commands run in this process through their entry point; an exception that it lets through is what
a user would see as a traceback, and fails the test.
"""

import http.server
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from command_tree import COMMANDS, PATHS, ROOT

from tandem.cli import main as cli
from tandem.cli.config import SERVE_SETTINGS, SHORT_NAMES, STORE_SETTINGS, Config
from tandem.core.config import MAX_ISA, list_fields
from tandem.engine.cluster.client import ClusterClient
from tandem.engine.process.store_child import StoreChild
from terminal import Terminal


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_of_every_command_renders(run, path):
    status, out, err = run(*path, "--help")
    assert status == 0
    assert "Usage:" in out
    assert not err


def test_the_list_tells_what_each_command_tells_of_itself_and_each_has_json():
    for name, entry in cli.COMMANDS.items():
        told = inspect.cleandoc(ROOT.commands[name].help or "").partition("\n\n")[0]
        assert entry.help == told.replace("\n", " "), name
    for path, command in COMMANDS.items():
        assert "--json" in {word for each in command.params for word in each.opts}, path


def test_help_shows_what_people_use_and_help_all_the_rest(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    short, full = run("serve", "--help")[1], run("serve", "--help-all")[1]
    shown = {f.path for f in list_fields(Config) if f.flag in short}
    assert shown == SERVE_SETTINGS
    assert {f.path for f in list_fields(Config) if f.flag in full} == {
        f.path for f in list_fields(Config)
    }
    assert run("serve", "--help")[1] == short, "what one call shows stays hidden from the next"
    # The brackets of a default are text, not markup.
    assert "[/dev/shm/tandem-{uid}]" in full
    assert {f.path for f in list_fields(Config)} >= STORE_SETTINGS | set(SHORT_NAMES)


def make_broken_inputs(tmp_path, busy):
    """Arguments that are wrong, and words that the one line about them must have."""
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    not_json = tmp_path / "not_json"
    not_json.mkdir()
    (not_json / "config.json").write_bytes(b"\xff\x00{")
    alien = tmp_path / "alien"
    alien.mkdir()
    (alien / "config.json").write_text(json.dumps({"model_type": "alien"}))
    binary = tmp_path / "c.yaml"
    binary.write_bytes(b"\xff\xfe: [")
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    fast = "--rpc.connect-timeout-ms=200"
    master = f"--store.master=ipc://{empty}/m"
    return [
        (["serve"], "name a model"),
        (["serve", str(empty)], "config.json does not exist"),
        (["plan", str(empty)], "config.json does not exist"),
        (["serve", str(not_json)], "not JSON"),
        (["plan", "demo", "--rules", str(tmp_path / "none")], "cannot read"),
        (["plan", str(alien)], "alien"),
        (["serve", str(tmp_path / "nothing")], "no folder"),
        (["serve", "demo", "--log-level", "loud"], "warning"),
        (["store", "master", "--log-level", "loud"], "warning"),
        (["serve", "demo", "--config", str(tmp_path)], "directory"),
        (["serve", "demo", "--config", str(binary)], "not YAML"),
        (["serve", "demo", "--port", "high"], "server.port"),
        (["serve", "demo", "--engine.kv-dtype", "foo"], "one of auto, bfloat16"),
        (["serve", "demo", "--store.transports", "pigeon"], "one of cma, local"),
        (["serve", "demo", "--engine.kv-cache-gib", "inf"], "engine.kv_cache_gib"),
        (["serve", "demo", "--engine.max-passover-s", "inf"], "engine.max_passover_s"),
        (["serve", "demo", "--dry-run", "--engine.kv-cache-gib", "99999"], "more than the machine"),
        (["serve", "demo", "--no-such-flag", "1"], "--no-such-flag"),
        (["config", "show", "--engine.threads", "-1"], "engine.threads"),
        (["serve", "demo", "--adapter", f"a={empty}"], "is not an adapter"),
        (["serve", "demo", "--store.memory", "1B"], "from 64 KiB"),
        (["serve", "demo", "--store.memory", "900GiB"], "512 GiB"),
        (["serve", "demo", "--store.memory", "1GiB", "--store.master", "h:1"], "one of the two"),
        (["serve", "demo", "--store.ssd-dir", str(empty)], "give store.memory"),
        (["serve", "demo", "--store.master", "127.0.0.1:9"], "--store.secret"),
        (["serve", "demo", "--max-model-len", "9999999"], "lower --max-model-len"),
        (["serve", "demo", "--port", str(busy.getsockname()[1])], "Address already in use"),
        (["doctor", "--peer", "127.0.0.1:1", "--secret-file", str(secret)], "tried the transfer"),
        (["serve", "demo", "--prefill", "1", "--decode", "0"], "at least one of both"),
        (["serve", "demo", "--unified", "1", "--prefill", "1", "--decode", "1"], "one of the two"),
        (["store", "host", "--store.ssd-dir", str(binary / "ssd"), master, fast], "c.yaml"),
        (["nosuch"], "nosuch"),
        (["bench", "nosuch"], "no benchmark"),
        (["bench", "serve", "--base-url", "127.0.0.1"], "http://"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], "nobody answers"),
        (["bench", "serve", "--dataset-name", "mooncake"], "--dataset-path"),
        (["bench", "serve", "--goodput", "ttft"], "ttft:2000"),
        (["bench", "serve", "--request-rate", "0"], "more than 0"),
        (["bench", "serve", "--extra-request-body", "[]"], "JSON object"),
        (["bench", "serve", "--prompt-ids", "9:1"], "FIRST:LAST"),
        (["bench", "serve", "--endpoint", "chat"], "token ids"),
        (["pull", "nosuch"], "not a hub id"),
        (["pull", "[/bold]"], "not a hub id"),
        (["convert", "[/bold]", "--format", "int8"], "[/bold]"),
        (["pull", "org/name"], "hub cannot be reached"),
        (["serve", "org/name"], "tandem pull org/name"),
        (["generate"], "--prompt"),
        (["generate", "-f", str(tmp_path)], "cannot read"),
        (["store", "get", "k", f"--store.master=ipc://{empty}/m", fast], "master"),
        (["store", "put", "k", str(tmp_path / "nothing"), fast], "nothing"),
        (["chat", "--url", "http://127.0.0.1:1", "--prompt", "x"], "refused"),
        (["chat", "--url", "nonsense", "--prompt", "x"], "http"),
        (["chat", "--url", "http://[::1", "--prompt", "x"], "--url"),
        (["generate", "--url", "http://[::1", "-p", "x"], "--url"),
        (
            ["chat", "--url", "http://127.0.0.1:1", "--prompt", "x", "--temperature", "nan"],
            "--temperature",
        ),
        (["generate", "--url", "http://127.0.0.1:1", "-p", "x", "--top-p", "inf"], "--top-p"),
        (["chat", "--url", "http://h:1", "--prompt", "x", "--api-key", "\u00e9"], "--api-key"),
        (["chat", "--url", "http://127.0.0.1:1", "--prompt", "\udcff"], "refused"),
        (["serve", "\udcff"], "no folder"),
    ]


def test_wrong_inputs_are_answered_in_words(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(StoreChild, "__aenter__", _fail_to_start)
    monkeypatch.setattr(ClusterClient, "__aenter__", _fail_to_start)
    busy = socket.create_server(("127.0.0.1", 0))
    with busy:
        _check_answers(run, make_broken_inputs(tmp_path, busy))


async def _fail_to_start(_):
    pytest.fail("a process was started for a setting that is wrong")


def _check_answers(run, broken_inputs):
    for arguments, words in broken_inputs:
        status, out, err = run(*arguments)
        assert words in re.sub(r"\W*\n\W*", " ", out + err), (arguments, out, err)
        assert status != 0, arguments
        assert err.count("tandem: ") <= 1, arguments
        assert "Traceback" not in err, arguments


def test_ctrl_c_while_the_commands_load_is_one_line():
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "tandem", "version"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # The cap imports what it needs before there is a handler.
        env={k: v for k, v in os.environ.items() if k != MAX_ISA},
        # A shell has its background commands ignore it, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "tandem.core.errors" in line:
            break
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=60)[1].splitlines()
    assert [line for line in lines if "|" not in line] == ["tandem: interrupted"]
    assert process.returncode == 130


class Stranger(http.server.BaseHTTPRequestHandler):
    """A server of another API that answers with events, too."""

    event = b""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + self.event + b"\n\n")

    def log_message(self, *_):
        pass


EVENTS = [b"5", b"[]", b"{}", b"hello", b"\xff", b'{"choices": [5]}', b'{"error": 5}']


@pytest.mark.parametrize("event", EVENTS)
def test_events_of_another_api_are_told(run, event):
    handler = type("Handler", (Stranger,), {"event": event})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for arguments in (["chat", "--prompt", "x"], ["generate", "-p", "x"]):
            assert "[cli.stream]" in run(*arguments, "--url", url)[2]
        server.shutdown()


def test_a_reader_that_leaves_early_is_no_error():
    result = subprocess.run(
        f"{sys.executable} -m tandem config show --json | head -c 1",
        shell=True, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.stdout == "["
    assert not result.stderr


def test_chat_in_a_terminal_edits_lines_and_knows_its_commands(tmp_path):
    """Typed through a pseudo-terminal: history and editing come from prompt_toolkit."""
    with (
        http.server.HTTPServer(("127.0.0.1", 0), Stranger) as server,
        Terminal(
            "chat", "--url", f"http://127.0.0.1:{server.server_port}", home=tmp_path
        ) as terminal,
    ):
        server.handle_request()  # It asks for the models.
        terminal.expect("Chat:")
        terminal.type(b"/hepl\x1b[D\x7fp\x1b[C\x7f\r")  # /hepl, edited into /hepp... then wrong
        terminal.expect("no command")
        terminal.type(b"\x1b[A\x03/help\r")  # Recall, drop by Ctrl-C, ask anew.
        terminal.expect("forget the conversation")
        terminal.type(b"/exit\r")
        assert terminal.process.wait(60) == 0
    history = tmp_path / ".cache/tandem/chat_history"
    assert "+/help" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
