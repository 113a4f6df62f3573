"""The division of the experts that a decode step needs and the device lacks: some are computed by
the host, others are uploaded to the device.

Both ways (lanes) read the host's memory, so each is slower while the other runs, and a good
division needs the rates with both running. These are learned from every step. From time to time all
experts go to the lane that has most of them, because only that shows the gain of using both; and an
unused lane is tried, within a limited share of the time. Pure.
"""

__all__ = ["LaneSplit"]

RECENT = 0.5
"""Weight of a step's measured rate when it updates the known rate of a lane (host or device)."""
SUDDEN = 1.25
"""Ratio between a step's rate and the known one from which on the known rate is discarded."""
MIN_GAIN = 0.04
"""Smallest predicted saving, as a share of a step's time, for which both lanes are used; smaller
savings are within the error of predictions."""
TRIAL_SHARE = 0.03
"""Largest share of all steps' time that may be spent on trying a lane (host or device) that is not
in use.
"""
TRIAL_STEPS = 4
"""Smallest number of steps before a lane (host or device) that is not in use is tried again."""
ALONE_STEPS = 12
"""Smallest number of steps between two steps in which, as a trial, one lane (host or device) gets
all experts.
"""
SMALL_SHARE = 0.3
"""Largest share of the experts of the lane (host or device) that has fewer, up to which a trial
step gives all experts to the other lane; this bounds the time that the trial loses.
"""


class LaneSplit:
    """The decision how many of a step's missing experts are uploaded; the host computes the others.

    Args:
        host_s: planned seconds for an expert that the host computes.
        upload_s: planned seconds for an expert that is uploaded and computed on the device.
    """

    def __init__(self, host_s: float, upload_s: float) -> None:
        assert host_s > 0, host_s
        assert upload_s > 0, upload_s
        self._host, self._upload = _Lane(host_s), _Lane(upload_s)
        self._total_s = 0.0
        self._lost_s = 0.0

    def choose(self, num_missed: int) -> int:
        """Return how many of ``num_missed`` experts, which are not on the device, to upload; the
        host computes the others.
        """
        best = self._find_best(num_missed)
        if 0 < best < num_missed:
            return self._try_alone(num_missed, best)
        return self._try_idle(num_missed, best) if num_missed > 1 else best

    def note(self, num_host: int, host_s: float, num_uploaded: int, upload_s: float) -> None:
        """Take the seconds that host and upload took for their experts of a step, and update the
        rates that ``choose`` uses.
        """
        self._total_s += max(host_s, upload_s)
        self._host.note(num_host, host_s, is_alone=num_uploaded == 0)
        self._upload.note(num_uploaded, upload_s, is_alone=num_host == 0)

    def _find_best(self, num_missed: int) -> int:
        times = [self._predict(num_missed, count) for count in range(num_missed + 1)]
        best = min(range(num_missed + 1), key=lambda count: times[count])
        alone = 0 if times[0] <= times[-1] else num_missed
        return alone if times[best] > (1 - MIN_GAIN) * times[alone] else best

    def _try_alone(self, num_missed: int, best: int) -> int:
        """Return the best number of uploads or, from time to time, one that gives all experts to
        one lane (host or upload), to measure it alone.
        """
        is_uploading = 2 * best > num_missed
        small = num_missed - best if is_uploading else best
        main = self._upload if is_uploading else self._host
        if main.num_beside < ALONE_STEPS or small > SMALL_SHARE * num_missed:
            return best
        return num_missed if is_uploading else 0

    def _try_idle(self, num_missed: int, best: int) -> int:
        """Return the number of uploads that gives all experts to one lane (host or upload) or, from
        time to time, one expert to the other lane, to measure it.
        """
        idle = self._upload if best == 0 else self._host
        if idle.num_unused < TRIAL_STEPS:
            return best
        tried = 1 if best == 0 else num_missed - 1
        extra_s = self._predict(num_missed, tried) - self._predict(num_missed, best)
        if self._lost_s + extra_s > TRIAL_SHARE * self._total_s:
            return best
        self._lost_s += max(0.0, extra_s)
        return tried

    def _predict(self, num_missed: int, num_uploaded: int) -> float:
        """Return the predicted seconds of a step in which ``num_uploaded`` of the missing experts
        are uploaded.
        """
        num_host = num_missed - num_uploaded
        if num_uploaded == 0:
            return num_host * self._host.alone_s
        if num_host == 0:
            return num_uploaded * self._upload.alone_s
        return max(num_host * self._host.beside_s, num_uploaded * self._upload.beside_s)


class _Lane:
    """The seconds per expert of a lane (computation by the host, or upload to the device), alone
    and with the other lane running.

    Args:
        expert_s: planned seconds per expert.
    """

    def __init__(self, expert_s: float) -> None:
        self.alone_s = expert_s
        self.beside_s = expert_s
        self.num_unused = 0
        """Number of steps since this lane last got any experts."""
        self.num_beside = ALONE_STEPS - TRIAL_STEPS
        """Number of steps that used both lanes since this lane last got all experts."""

    def note(self, count: int, seconds: float, *, is_alone: bool) -> None:
        """Update the seconds per expert from the number of experts that the lane computed in a step
        and the time it took.
        """
        if count == 0:
            self.num_unused += 1
            return
        self.num_unused = 0
        self.num_beside = 0 if is_alone else self.num_beside + 1
        measured = seconds / count
        # A change of speed seen in one kind of step (alone or beside other work) is applied to
        # both; the ratio between the two kinds is learnt from steps of either kind.
        if is_alone:
            factor = self.beside_s / self.alone_s
            self.alone_s = _blend(self.alone_s, measured)
            self.beside_s = self.alone_s * factor
        else:
            before, self.beside_s = self.beside_s, _blend(self.beside_s, measured)
            self.alone_s *= self.beside_s / before
        self.alone_s = min(self.alone_s, self.beside_s)


def _blend(known: float, measured: float) -> float:
    is_sudden = not known / SUDDEN < measured < known * SUDDEN
    return measured if is_sudden else known + RECENT * (measured - known)
