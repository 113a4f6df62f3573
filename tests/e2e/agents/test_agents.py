"""Coding agents change a file through our server, by the API that each of them speaks.

Method: the real agents, headless, in pinned versions, each with a home and a folder of its own and
nothing but loopback to reach. The server is ours; in the engine's place a script plays the texts of
a model: it reads the file, edits it and answers. The agent runs the tools itself.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "server"))

from fake_engine import FakeEngine, make_info
from serving import LiveServers
from vocabularies import make_byte_level_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.download, pytest.mark.e2e]

PACKAGES = ("@anthropic-ai/claude-code@2.1.331", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
INSTALL_S, TURN_S = 900.0, 240.0
KEY = "secret"
TEMPLATE = (
    "{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}"
    "{%- for m in messages -%}<<{{ m.role }}>>{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}{%- endfor -%}<<assistant>>"
)
TASK = "Make the sky blue in note.txt"
BEFORE, AFTER = "The sky is green.\n", "The sky is blue.\n"
ANSWER = "The sky is blue now."


@dataclass(frozen=True)
class Agent:
    """How an agent is started, and the calls with which it reads and edits."""

    binary: str
    """Pattern of its path below node_modules; the last that matches."""
    path: str
    """Of the API that it speaks."""
    set_up: Callable[[Path, str], dict[str, str]]
    """Writes its settings below a home, for a server; returns its environment."""
    arguments: tuple[str, ...]
    read: Callable[[Path], tuple[str, dict]]
    edit: Callable[[Path], tuple[str, dict]]


def set_up_claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def set_up_codex(home: Path, url: str) -> dict[str, str]:
    folder = home / "codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "tandem"\n[model_providers.tandem]\nname = "Tandem"\n'
        f'base_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "TANDEM_KEY"\n'
    )
    return {"CODEX_HOME": str(folder), "TANDEM_KEY": KEY}


def set_up_opencode(home: Path, url: str) -> dict[str, str]:
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": "tandem/tiny",
        "small_model": "tandem/tiny",
        "provider": {
            "tandem": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                "models": {"tiny": {"limit": {"context": 1_000_000, "output": 4096}}},
            }
        },
    }
    path = home / "opencode.json"
    path.write_text(json.dumps(settings))
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    off = {f"OPENCODE_DISABLE_{name}": "1" for name in names}
    return {"OPENCODE_CONFIG": str(path), **off}


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code-*/claude",
        "/v1/messages",
        set_up_claude,
        ("-p", TASK, "--permission-mode", "acceptEdits"),
        read=lambda file: ("Read", {"file_path": str(file)}),
        edit=lambda file: (
            "Edit",
            {"file_path": str(file), "old_string": "green", "new_string": "blue"},
        ),
    ),
    "codex": Agent(
        "@openai/codex-*/vendor/*/bin/codex",
        "/v1/responses",
        set_up_codex,
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK),
        read=lambda file: ("exec_command", {"cmd": f"cat {file.name}"}),
        edit=lambda file: ("exec_command", {"cmd": f"sed -i s/green/blue/ {file.name}"}),
    ),
    "opencode": Agent(
        "opencode-*/bin/opencode",
        "/v1/chat/completions",
        set_up_opencode,
        ("run", TASK),
        read=lambda file: ("read", {"filePath": str(file)}),
        edit=lambda file: (
            "edit",
            {"filePath": str(file), "oldString": "green", "newString": "blue"},
        ),
    ),
}


@pytest.fixture(scope="module")
def modules(pytestconfig) -> Path:
    """Install the agents once; later runs find them."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = pytestconfig.cache.mkdir("agents")
    stamp = folder / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(PACKAGES):
        command = [npm, "install", "--prefix", folder, "--ignore-scripts", "--no-audit", *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode != 0:
            pytest.skip(f"npm does not install {' '.join(PACKAGES)}: {done.stderr[-300:]}")
        stamp.write_text(" ".join(PACKAGES))
    return folder / "node_modules"


class Model:
    """The texts that a model writes, by how many tools have answered so far."""

    def __init__(self, steps: list[str]) -> None:
        self.tokenizer = make_byte_level_tokenizer(TEMPLATE)
        self.steps = steps
        self.prompts: list[str] = []

    def play(self, request) -> list[int]:
        prompt = self.tokenizer.decode(request.prompt_ids)
        # Agents ask for titles and summaries beside the task, without tools.
        text = "A title"
        if prompt.startswith("<tools>"):
            self.prompts.append(prompt)
            done = prompt.count("<<tool>>")
            text = self.steps[min(done, len(self.steps) - 1)]
        return self.tokenizer.encode(text)


def write_call(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_edits_a_file(modules, tmp_path, name):
    agent = AGENTS[name]
    binaries = sorted(modules.glob(agent.binary))
    if not binaries:
        pytest.skip(f"{name} has no binary for this machine")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    file = work / "note.txt"
    file.write_text(BEFORE)
    model = Model(
        [f"I look.\n{write_call(*agent.read(file))}", write_call(*agent.edit(file)), ANSWER]
    )
    engine = FakeEngine(info=make_info(320, max_model_len=1 << 20))
    engine.play, engine.stop_token_id = model.play, 0
    with LiveServers(model.tokenizer) as servers:
        live = servers.start(engine, api_key=(KEY,))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            # Nobody listens there: what an agent wants of the internet it does not get.
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "HTTP_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
            **agent.set_up(home, live.url),
        }
        ended = subprocess.run(
            [binaries[-1], *agent.arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
        metrics = live.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    assert file.read_text() == AFTER, told
    assert ANSWER in ended.stdout, told
    # Reading gave the model the file; each prompt goes on from the one before.
    assert len(model.prompts) == len(model.steps), told
    assert TASK in model.prompts[0]
    assert BEFORE.strip() in model.prompts[1].rpartition("<<tool>>")[2]
    assert f'route="{agent.path}",status="200"' in metrics
