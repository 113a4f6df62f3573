"""Build the wheel as it is published, install it into empty venvs, and use it.

The wheel has the kernels of all instruction sets. It is built in the
folder of the editable build of `make test`, whose flags are the same, so that only what that one
lacks is compiled. One venv has the wheel alone, the other its extra ``serve`` as well, with the
versions of ``constraints.txt``. In both, commands run in a folder that has none of our sources.
"""

import email
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 900
REMEDY = "pip install 'tandem-llm["
WITHOUT_EXTRA = (
    # Command, status, words of the output.
    (["version"], 0, "torch not installed"),
    (["doctor"], 0, "torch"),
    (["config", "show"], 0, "server.port"),
    (["store", "stat"], 1, "tandem: "),
    (["--help"], 0, "serve"),
    (["serve", "demo"], 1, REMEDY + "serve]"),
    (["chat"], 1, REMEDY + "serve]"),
    (["generate", "-p", "x"], 1, REMEDY + "serve]"),
    (["chat", "--url", "http://127.0.0.1:1", "--prompt", "x"], 1, REMEDY),
    (["explain", "id"], 1, REMEDY),
    (["pull", "a/b"], 1, REMEDY + "serve]"),
    (["plan", "demo"], 1, REMEDY + "serve]"),
    (["verify", "demo"], 1, REMEDY + "serve]"),
    (["convert", "demo", "--format", "int8"], 1, REMEDY + "serve]"),
    (["bench", "engine", "--quick"], 1, REMEDY + "serve]"),
    (["eval", "demo", "--data", "d"], 1, REMEDY + "serve]"),
    (["export", "demo", "--adapter", "a", "--out", "o"], 1, REMEDY),
)


def run(*command: str | Path, cwd: Path = ROOT, status: int = 0) -> str:
    """Return what a command prints; end the check if its status is another."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if done.returncode != status:
        sys.exit(f"{command}: status {done.returncode}, not {status}:\n{output[-4000:]}")
    return output


def build_wheel(folder: Path) -> Path:
    """Build into ``folder``; return the file."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub(r"\W", "_", sysconfig.get_platform())
    reused = ROOT / "build" / f"editable-{tag}-{tag}-{platform}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run(
        "env", f"PATH={path}", sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel",
        "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT,
        f"--config-settings=build-dir={reused}",
        "--config-settings=cmake.define.TANDEM_KERNEL_ISAS=all",
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_page(wheel: Path) -> None:
    """See that the page of the wheel says what it is and how it is installed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        page = email.message_from_bytes(archive.read(name))
    assert page["Description-Content-Type"] == "text/markdown"
    assert "pip install" in str(page.get_payload())


def make_venv(folder: Path, *requirements: str) -> Path:
    """Make a venv with packages; return its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    run(
        folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install",
        "--constraint", ROOT / "constraints.txt", *requirements,
    )  # fmt: skip
    return folder / "bin"


def check_commands(programs: Path, cwd: Path) -> None:
    """Run commands where no extra is installed."""
    for arguments, status, words in WITHOUT_EXTRA:
        output = run(programs / "tandem", *arguments, cwd=cwd, status=status)
        if words not in output or "Traceback" in output:
            sys.exit(f"tandem {' '.join(arguments)}: no {words!r} in\n{output}")


def check_serving(programs: Path, cwd: Path) -> None:
    """Measure the demo model, serve it, ask it once, and stop it."""
    for command in ("version", "doctor"):
        run(programs / "tandem", command, cwd=cwd)
    (cwd / "rows.json").write_text('[{"instruction": "def f(x):", "output": "return x"}]')
    figures = run(
        programs / "tandem", "eval", "demo", "--data", "rows.json", "--max-tokens", "4", cwd=cwd
    )
    if "perplexity" not in figures or REMEDY + "finetune]" not in figures:
        sys.exit(f"tandem eval demo: no figures without the extra finetune:\n{figures}")
    with subprocess.Popen(
        [programs / "tandem", "serve", "demo", "--port", "0"],
        cwd=cwd, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            url = next((m[0] for line in lines if (m := re.search(r"http://\S+", line))), None)
            if url is None:
                sys.exit("tandem serve demo: it did not start")
            body = b'{"prompt": "def read_file(path):", "max_tokens": 8}'
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as reply:
                assert reply.status == 200, reply.read()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def main() -> None:
    """Check the wheel; ends with a line about what is wrong, or with one that says it is right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cwd = folder / "elsewhere"
        cwd.mkdir()
        wheel = build_wheel(folder)
        check_page(wheel)
        check_commands(make_venv(folder / "plain", str(wheel)), cwd)
        check_serving(make_venv(folder / "serve", f"tandem-llm[serve] @ file://{wheel}"), cwd)
        sys.stdout.write(f"{wheel.name}: installed without and with [serve], and used\n")


if __name__ == "__main__":
    main()
