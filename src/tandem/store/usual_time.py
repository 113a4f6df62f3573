"""Timeouts from the usual duration of an operation. Pure: times are arguments."""

__all__ = ["UsualTime"]

MEAN_SHARE = 1 / 8
"""Weight of a new sample in the smoothed mean; with ``DEVIATION_SHARE`` the weights of RFC 6298."""
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4


class UsualTime:
    """The smoothed mean and deviation of an operation's duration."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._has_sample = False

    def note(self, seconds: float) -> None:
        """Add a sample of the duration."""
        if not self._has_sample:
            self._has_sample = True
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        apart_s = abs(seconds - self._mean_s)
        self._deviation_s += DEVIATION_SHARE * (apart_s - self._deviation_s)
        self._mean_s += MEAN_SHARE * (seconds - self._mean_s)

    def multiply(self, factor: float, *, least_s: float, most_s: float) -> float:
        """Return a multiple of the mean plus four deviations, within bounds, seconds."""
        usual_s = self._mean_s + DEVIATIONS * self._deviation_s
        return min(max(factor * usual_s, least_s), most_s)
