"""The margin on a kind of predicted time, learned from the real times of accepted requests. Pure.

The margin follows a quantile: it rises when a real time exceeds the predicted one times the margin,
and falls a little with each other real time. If all requests are rejected, nothing is measured any
more, and a margin that is too large would stay so for ever; therefore it decays while nothing is
measured.
"""

import math

__all__ = ["MAX_MARGIN", "Margin"]

SAFE_SHARE = 0.98
"""Share of requests whose real time the margin is to cover."""
MARGIN_STEP = 0.1
MAX_MARGIN = 4.0
HALF_LIFE_S = 60.0
"""Seconds in which the logarithm of the margin halves while no time is measured."""
ERROR_MEMORY = 0.95
"""Weight of the old mean when a measured time updates the mean error."""


class Margin:
    """The safety margin on one kind of predicted time (to first token, or between tokens), which
    follows the errors of predictions.
    """

    def __init__(self) -> None:
        self.error = 0.0
        """Mean relative error of predictions so far: |predicted - real| / real, recent ones
        weighing more.
        """
        self._log_factor = 0.0
        self._noted_s = 0.0

    def get_factor(self, now_s: float) -> float:
        """Return the factor by which to multiply predicted times, from 1 to ``MAX_MARGIN``; it
        decays to 1 while no time is measured.
        """
        return math.exp(self._log_factor * 0.5 ** ((now_s - self._noted_s) / HALF_LIFE_S))

    def note(
        self,
        predicted_s: float,
        real_s: float,
        now_s: float,
        *,
        safe_s: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        """Update the margin and the mean error with a measured time.

        Args:
            predicted_s: predicted time, before multiplication by the margin; seconds.
            real_s: measured time, seconds.
            now_s: monotonic seconds.
            safe_s: time that endangers no objective; up to it, the margin does not rise.
            weight: weight of this measurement, from 0 to 1.
        """
        if real_s <= 0 or predicted_s <= 0 or not math.isfinite(real_s + predicted_s):
            return
        self.error += (abs(predicted_s - real_s) / real_s - self.error) * (1 - ERROR_MEMORY)
        # Compare the measured time with the prediction times the present factor, not times the
        # factor at acceptance. Of many requests that were accepted before the margin rose, only
        # those that the risen margin would not cover then raise it further.
        factor = self.get_factor(now_s)
        is_over = real_s > max(predicted_s * factor, safe_s)
        step = weight * MARGIN_STEP * (SAFE_SHARE if is_over else SAFE_SHARE - 1.0)
        self._log_factor = min(max(math.log(factor) + step, 0.0), math.log(MAX_MARGIN))
        self._noted_s = now_s
