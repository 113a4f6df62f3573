"""llama.cpp and its fork ik_llama.cpp as rivals: installing them, and running a model
in a process.
"""

from pathlib import Path

import torch

from tandem.bench.rivals.isa import check_peer_isa, list_ggml_settings
from tandem.bench.rivals.processes import RivalProcess, install_rival
from tandem.bench.serving.driver import Phase

__all__ = ["PEERS", "LlamaCpp", "install_llama"]

PEERS = {
    "llama.cpp": ("llama-cpp-python==0.3.36", "gguf"),
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5", "gguf"),
}
"""Packages that pip installs for each peer. ik_llama.cpp, a fork of llama.cpp, does not build from
its source package, and its wheel is for AVX2: if ``IK_LLAMA_CPP_LIB_PATH`` is set, a
``libllama.so`` built for this machine is taken from there.
"""
LONG_S = 3600.0
"""Timeout in seconds for writing a model or computing a long history."""


def install_llama(peer: str) -> Path:
    """Install a peer, built for the cap on the instruction set if there is one; return its
    interpreter.

    Raises: UnsupportedError (pip failed).
    """
    # Only llama.cpp is built from source, with these settings; the fork is installed as a wheel.
    settings = list_ggml_settings() if peer == "llama.cpp" else {}
    return install_rival(peer.replace(".", "-"), PEERS[peer], settings=settings)


class LlamaCpp:
    """One GGUF file loaded in one of the peers (llama.cpp or its fork), in a process of its own.

    Args:
       path: the GGUF file.
       peer: a key of ``PEERS``.
       threads: threads to compute with.
       context_len: tokens of each sequence.
       num_sequences: most sequences at once.
       folder: checkpoint from which the file is written if it does not exist.
       kind: llama.cpp's type for the matrices of a file it writes, such as ``q4_0``.

    Raises: the errors of ``install_llama`` and ``check_peer_isa``.
    """

    def __init__(
        self,
        path: Path,
        peer: str,
        threads: int,
        context_len: int,
        num_sequences: int,
        *,
        folder: Path | None = None,
        kind: str = "",
    ) -> None:
        self._process = RivalProcess(install_llama(peer), "llama_cpp_rival.py", peer)
        if folder is not None and not path.exists():
            self._process.call(
                "write_gguf", timeout_s=LONG_S, folder=str(folder), path=str(path), kind=kind
            )
        isa = self._process.call(
            "load",
            path=str(path),
            threads=threads,
            context_len=context_len,
            num_sequences=num_sequences,
        )
        check_peer_isa(peer, isa)
        self.name = f"{peer} {kind or path.stem} {isa}"

    def score(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits of a prompt, [tokens, vocabulary]."""
        return torch.tensor(self._process.call("score", prompt=prompt))

    def measure(self, phase: Phase, prompts: list[list[int]]) -> float:
        """Return the milliseconds of a prefill of all prompts, or of a decode step after them."""
        return self._process.call(phase, prompts=prompts)

    def measure_turn(self, history: list[int], message: list[int]) -> float:
        """Return the milliseconds to the first token of a message after a history that is already
        computed.
        """
        return self._process.call("turn", timeout_s=LONG_S, history=history, message=message)

    def close(self) -> None:
        """End the process that runs the model."""
        self._process.close()
