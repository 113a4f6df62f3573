"""The time to wait for something that usually answers soon. Pure: times are arguments."""

__all__ = ["UsualTime"]

MEAN_SHARE = 1 / 8
"""Share of a new sample in the mean, and below in the deviation: as RFC 6298 has them."""
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4


class UsualTime:
    """The smoothed mean of a time, and how far samples lie from it."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._has_sample = False

    def note(self, seconds: float) -> None:
        """Count a sample."""
        if not self._has_sample:
            self._has_sample = True
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        apart_s = abs(seconds - self._mean_s)
        self._deviation_s += DEVIATION_SHARE * (apart_s - self._deviation_s)
        self._mean_s += MEAN_SHARE * (seconds - self._mean_s)

    def multiply(self, factor: float, *, least_s: float, most_s: float) -> float:
        """Return a multiple of the usual time, within bounds."""
        usual_s = self._mean_s + DEVIATIONS * self._deviation_s
        return min(max(factor * usual_s, least_s), most_s)
