"""Scores of labelled tokens, computed from log-probabilities of the whole vocabulary.

Log-probabilities of the reference are kept in a file that is deleted when the program ends: the
log-probabilities of a few thousand tokens would not fit in memory.
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
    """Sums over the tokens of reference answers, from which scores (accuracy, perplexity, ...) are
    computed.
    """

    num_tokens: int = 0
    loss: float = 0.0
    """Sum of the labels' negative log-probabilities, in nats."""
    num_right: int = 0
    """Number of labels that are the model's most likely token."""
    divergence: float = 0.0
    """Sum of the Kullback-Leibler divergences from the reference to this model, in nats."""
    num_agreed: int = 0
    """Number of tokens at which this model and the reference have the same most likely token."""

    def add(self, labels: Tensor, logprobs: Tensor, reference: Tensor | None = None) -> None:
        """Add tokens to the sums.

        Args:
           labels: int64 [N].
           logprobs: this model's log-probabilities, float32 [N, V].
           reference: the reference's at the same positions, float32 [N, V].
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

        With a reference, also ``kl_divergence`` (nats per token) and ``agreement`` (percent). All
        are NaN if no token was added.
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
    """Log-probabilities in a temporary file, written once and then read in the same order."""

    def __init__(self) -> None:
        # The file lies in the system's temporary folder (set TMPDIR to change it); it has no name,
        # so nothing is left behind after a crash.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object

    def append(self, logprobs: Tensor) -> None:
        """Append rows, float32 [N, V].

        Raises: CapacityError (the disk is full).
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
        """Remove the temporary file."""
        self._file.close()

    def rewind(self) -> None:
        """Go back to the first row, to read the log-probabilities once more."""
        self._file.seek(0)

    def take(self, num_rows: int, vocab_size: int) -> Tensor:
        """Return the next ``num_rows`` rows that were appended, float32 [N, V]."""
        content = bytearray(self._file.read(4 * num_rows * vocab_size))
        return torch.frombuffer(content, dtype=torch.float32).view(num_rows, vocab_size)
