"""Algorithm 1 of the Mooncake paper (FAST 2025): the least predicted time to first token.

    TTFT = transfer + queue + prefill

If an instance's own prefix is shorter than the best one by more than the balancing threshold, its
time is predicted as if it fetched the best prefix; if it is chosen, it does fetch it. In this way a
hot prefix gets copied to several instances. The decode instance is the one with the least predicted
time between tokens.
"""

from tandem.conductor.fleet import Fleet, IntColumn
from tandem.conductor.policies.policy import Question
from tandem.conductor.prediction import TtftParts, predict_tpot

__all__ = ["BALANCING_THRESHOLD", "MooncakePolicy"]

BALANCING_THRESHOLD = 1.25
"""Default threshold, as the paper gives no value: at 1.25, a prefix is fetched only if it is more
than a quarter longer than the instance's own."""


class MooncakePolicy:
    """The policy that chooses by predicted time to first token, and for decode by time between
    tokens.

    Args:
        threshold: ``kvcache_balancing_threshold`` of the paper.
    """

    def __init__(self, threshold: float = BALANCING_THRESHOLD) -> None:
        self.threshold = threshold

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance with the least predicted time to first token."""
        return int(rows[int(parts.total_s.take(rows).argmin())])

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance with the least predicted time between tokens."""
        # Compute all rows, because selecting rows from each column would take longer.
        tpot_s = predict_tpot(fleet, question.prompt_len, question.max_tokens)
        return int(rows[int(tpot_s.take(rows).argmin())])

    def note_placed(self, question: Question, row: int) -> None:
        """Do nothing: the policy remembers no decisions."""

    def forget(self, row: int) -> None:
        """Do nothing: the policy remembers nothing of an instance."""
