"""Rivals that are not dependencies: each is installed on request into a venv and driven over pipes.

A peer is a script beside this module that imports no other module of Tandem. It reads one JSON
object per line, ``{"call": NAME, ...}``, and answers with one line, ``{"result": ...}`` or
``{"error": TEXT}``. Output of its libraries goes to standard error and into a log in the venv's
folder.
"""

import contextlib
import fcntl
import json
import selectors
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tandem.bench.children import start_child
from tandem.core.errors import DeadlineError, PeerLostError, UnsupportedError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["RivalProcess", "find_rival", "install_rival"]

ROOT = Path("~/.cache/tandem/peers")
INSTALL_TIMEOUT_S = 3600.0
"""Longest installation in seconds. Some peers are built from source: llama.cpp takes ten minutes on
two cores.
"""
CLOSE_TIMEOUT_S = 10.0
READ_BYTES = 1 << 20


def find_rival(name: str, requirements: Sequence[str], *, bare: Sequence[str] = ()) -> Path | None:
    """Return the interpreter that ``install_rival`` made; None if it has not been installed."""
    folder = _find_folder(name, requirements, bare, {})
    return folder / "bin" / "python" if (folder / "installed").exists() else None


def _find_folder(
    name: str, requirements: Sequence[str], bare: Sequence[str], settings: Mapping[str, str]
) -> Path:
    wishes = [sys.version, *requirements, *(f"bare {requirement}" for requirement in bare)]
    wishes += [f"{variable}={value}" for variable, value in settings.items()]
    identity = sha256("\n".join(wishes).encode()).hexdigest()[:12]
    return ROOT.expanduser() / f"{name}-{identity}"


def install_rival(
    name: str,
    requirements: Sequence[str],
    *,
    bare: Sequence[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Return the interpreter of a venv with the requirements, which is made by the first call.

    Args:
       name: name of the venv's folder.
       requirements: packages that pip installs with their dependencies.
       bare: packages that pip installs without dependencies, which would be gigabytes that are not
           used here.
       settings: environment variables of pip that change the build.

    Raises: UnsupportedError (pip failed; the message has its last lines).
    """
    folder = _find_folder(name, requirements, bare, settings)
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be installing the same rival: the second process to get the lock finds it
    # installed.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return python
        sys.stderr.write(f"installing {name} into {folder}: {' '.join([*requirements, *bare])}\n")
        venv.create(folder, with_pip=True, clear=True)
        for wish in (requirements, ["--no-deps", *bare] if bare else []):
            if wish:
                _pip_install(name, python, wish, settings)
        stamp.touch()
    return python


def _pip_install(
    name: str, python: Path, arguments: Sequence[str], settings: Mapping[str, str]
) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    if settings:
        # pip's cache may keep a wheel that was built with other settings, so it is not used.
        variables = [f"{variable}={value}" for variable, value in settings.items()]
        command = ["env", *variables, *command, "--no-cache-dir"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        what = f"{name} was not installed within {INSTALL_TIMEOUT_S:.0f} s"
        raise UnsupportedError("bench.install_rival", what) from error
    if result.returncode != 0:
        tail = "\n".join(result.stderr.splitlines()[-5:])
        raise UnsupportedError("bench.install_rival", f"{name} cannot be installed: {tail}")


class RivalProcess:
    """A peer's script running in its venv. A context manager; otherwise call ``close``.

    Args:
       python: the venv's interpreter.
       script: name of a script beside this module.
       arguments: arguments of the script.
       environment: environment of the process; None inherits ours.
       settings: variables added to the environment.
    """

    def __init__(
        self,
        python: Path,
        script: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        path = Path(__file__).parent / script
        self._name = script
        self._log = (python.parents[1] / "log.txt").open("ab")
        variables = [f"{name}={value}" for name, value in settings.items()]
        self._process = start_child(
            ["env", *variables, str(python), str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self._pending = b""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, *, timeout_s: float = 600.0, **arguments: object) -> Any:
        """Return the result of one call.

        Raises: UnsupportedError (the peer reported an error); PeerLostError (its process ended);
            DeadlineError (no answer within ``timeout_s``).
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._report_end(name) from error
        answer = json.loads(self._read_line(name, timeout_s))
        if "error" in answer:
            raise UnsupportedError("bench.call_rival", f"{self._name} {name}: {answer['error']}")
        return answer["result"]

    def pause(self) -> None:
        """Stop the process with a signal: some peers poll all the time, and would take a core from
        the side that is being measured.
        """
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process continue."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the peer's process; idempotent."""
        process = self._process
        self.resume()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()

    def _read_line(self, name: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            parts = [self._pending]
            # A line may have tens of megabytes, so each part is searched for a line break once, and
            # parts are joined at the end.
            while b"\n" not in parts[-1]:
                if not selector.select(timeout_s):
                    self._pending = b"".join(parts)
                    what = f"{self._name} {name}: no answer in {timeout_s:.0f} s"
                    raise DeadlineError("bench.call_rival", what)
                data = self._process.stdout.read1(READ_BYTES)  # type: ignore[attr-defined]
                if not data:
                    raise self._report_end(name)
                parts.append(data)
        line, _, self._pending = b"".join(parts).partition(b"\n")
        return line

    def _report_end(self, name: str) -> PeerLostError:
        code = self._process.wait(CLOSE_TIMEOUT_S)
        return PeerLostError(
            "bench.call_rival", f"{self._name} ended with {code} in {name}: see {self._log.name}"
        )
