"""Figures of labelled tokens from the log-probabilities of the whole vocabulary.

The log-probabilities of the reference go to a file that ends with the program: those of a few
thousand tokens are larger than memory.
"""

import math
import tempfile
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import CapacityError

__all__ = ["KeptLogprobs", "Scores"]


@dataclass(slots=True)
class Scores:
    """Sums over tokens."""

    num_tokens: int = 0
    loss: float = 0.0
    """Negative log-probabilities of the labels, nats."""
    num_right: int = 0
    """Tokens that are the likeliest."""
    divergence: float = 0.0
    """Kullback-Leibler divergence of ours from the reference, nats."""
    num_agreed: int = 0
    """Tokens whose likeliest is that of the reference."""

    def add(self, labels: Tensor, logprobs: Tensor, reference: Tensor | None = None) -> None:
        """Take in tokens.

        Args:
            labels: int64 [N].
            logprobs: ours, float32 [N, V].
            reference: of the same places, float32 [N, V].
        """
        self.num_tokens += len(labels)
        self.loss -= float(logprobs.gather(1, labels[:, None]).double().sum())
        likeliest = logprobs.argmax(-1)
        self.num_right += int((likeliest == labels).sum())
        if reference is not None:
            difference = (reference.exp() * (reference - logprobs)).double()
            self.divergence += float(difference.sum())
            self.num_agreed += int((likeliest == reference.argmax(-1)).sum())

    def summarize(self, *, has_reference: bool) -> dict[str, float]:
        """Return ``accuracy`` (percent) and ``perplexity``.

        With a reference ``kl_divergence`` (nats a token) and ``agreement`` (percent) as well.
        All are NaN without a token.
        """
        count = self.num_tokens or math.nan
        figures = {
            "accuracy": 100 * self.num_right / count,
            "perplexity": _exp(self.loss / count),
        }
        if has_reference:
            figures["kl_divergence"] = self.divergence / count
            figures["agreement"] = 100 * self.num_agreed / count
        return figures


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class KeptLogprobs:
    """Log-probabilities in a file, written once in order and read in the same order."""

    def __init__(self) -> None:
        # The file lies in the system's temporary folder (set TMPDIR to change it); it has no name,
        # so nothing is left behind after a crash.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object

    def append(self, logprobs: Tensor) -> None:
        """Write rows, float32 [N, V].

        Raises: CapacityError: the disk is full.
        """
        try:
            self._file.write(logprobs.contiguous().numpy().tobytes())
            self._file.flush()
        except OSError as error:
            what = f"{tempfile.gettempdir()} does not hold the reference's log-probabilities: "
            what += f"{error.strerror}: measure fewer rows (--max-samples), or set TMPDIR to a "
            what += "larger disk"
            raise CapacityError("evaluation.keep", what) from error

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def rewind(self) -> None:
        """Go back to the first row."""
        self._file.seek(0)

    def take(self, num_rows: int, vocab_size: int) -> Tensor:
        """Return the next rows, float32 [N, V]."""
        content = bytearray(self._file.read(4 * num_rows * vocab_size))
        return torch.frombuffer(content, dtype=torch.float32).view(num_rows, vocab_size)
