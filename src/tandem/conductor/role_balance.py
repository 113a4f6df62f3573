"""Changes of instances' roles when the ratio of prefill to decode instances does not fit the load.

The pressure on a role is a time relative to its objective: for prefill, the wait of a new prompt;
for decode, the time between tokens, or the share of blocks in use. A role under pressure gets an
instance of the other role, if that one has room to spare without it.

Against oscillation: pressures are means over some seconds; a role gets an instance only at a much
higher pressure than the other role may have after giving it; and after any change of a role, and at
the start, nothing changes for a while. Pure; time is an argument.
"""

import math
from dataclasses import dataclass

import numpy as np

from tandem.conductor.fleet import DECODE, PREFILL, ROLES, Fleet, FloatColumn, IntColumn, Work
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import Slo

__all__ = ["ROLE_LOOK_S", "RoleBalance", "RoleChange"]

ROLE_LOOK_S = 1.0
"""Seconds between two calls of ``RoleBalance.look``."""
DEFAULT_TTFT_S, DEFAULT_TPOT_S = 10.0, 0.1
"""Objectives while no request has named its own; those at which the Mooncake paper's best ratio was
found."""
HIGH = 0.9
"""Pressure (load relative to the latency objectives) of the prefill or decode instances from which
an instance of the other role is moved to them.
"""
LOW = 0.6
"""Highest pressure (load relative to the latency objectives) that a role may have after it has
given up an instance.
"""
MAX_BUSY = 0.8
"""Highest share of their time that the remaining prefill instances may be busy after one has
left."""
FULL_BLOCKS = 0.9
"""Share of blocks in use that counts as pressure 1, because requests are preempted beyond it."""
MEMORY_S = 8.0
"""Time constant in seconds of the exponential means of pressure."""
PAUSE_S = 30.0
"""Seconds after a change of a role during which no other role changes."""
SLO_MEMORY = 0.98
"""Weight of the old mean when a request's objective updates the mean objective."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A change of an instance's role (prefill, decode) that is due, with the reason."""

    instance: str
    role: InstanceRole
    reason: str
    """Reason in words, with the pressures."""


class RoleBalance:
    """The rule that moves instances between prefill and decode as the load on each asks for;
    unified instances are left alone.
    """

    def __init__(self) -> None:
        self.ttft_s, self.tpot_s = DEFAULT_TTFT_S, DEFAULT_TPOT_S
        """Objectives: the mean of those that requests had lately."""
        self._has_ttft = self._has_tpot = False
        self.prefill = self.decode = 0.0
        """Mean pressure (load relative to the latency objectives) on prefill instances, and on
        decode instances.
        """
        self._decode_after = 0.0
        """Mean pressure that decode instances would have if there were one fewer of them."""
        self._busy = 0.0
        """Mean share of time that prefill instances spend computing prompts."""
        self._work: dict[str, Work] = {}
        """For each instance: the sums of its computed work when ``look`` was last called."""
        self._roles: dict[str, int] = {}
        self._looked_s: float | None = None
        self._changed_s = -math.inf

    def note_request(self, slo: Slo) -> None:
        """Update the mean latency objectives with those of an accepted request."""
        if slo.ttft_s is not None:
            share = SLO_MEMORY if self._has_ttft else 0.0
            self.ttft_s += (slo.ttft_s - self.ttft_s) * (1 - share)
            self._has_ttft = True
        if slo.tpot_s is not None:
            share = SLO_MEMORY if self._has_tpot else 0.0
            self.tpot_s += (slo.tpot_s - self.tpot_s) * (1 - share)
            self._has_tpot = True

    def look(self, fleet: Fleet, now_s: float) -> RoleChange | None:
        """Update the pressures (load of prefill and of decode instances) by the present loads;
        return the role change that is due, or None.

        Call it every ``ROLE_LOOK_S``. The caller makes the change, or fails to; either way the next
        change can be due after ``PAUSE_S``.
        """
        before_s, self._looked_s = self._looked_s, now_s
        done = self._take_work(fleet)
        self._note_roles(fleet, now_s)
        usable = fleet.is_serving & ~fleet.is_draining
        prefills = np.flatnonzero(usable & (fleet.role == PREFILL))
        decodes = np.flatnonzero(usable & (fleet.role == DECODE))
        if before_s is None or now_s <= before_s or not len(prefills) or not len(decodes):
            return None
        self._measure(fleet, prefills, decodes, done, now_s - before_s)
        if now_s - self._changed_s < PAUSE_S:
            return None
        change = self._choose(fleet, prefills, decodes)
        if change is not None:
            self._changed_s = now_s
        return change

    def _take_work(self, fleet: Fleet) -> FloatColumn:
        """Return the work of each row since the last call, in the shape of ``Fleet.work``."""
        done = np.zeros_like(fleet.work)
        told: dict[str, Work] = {}
        for name in fleet.names:
            row = fleet.find(name)
            assert row is not None, name
            told[name] = work = Work(*fleet.work[:, row].tolist())
            before = self._work.get(name, work)
            # The counters of an instance that left and joined again restart at zero; treat a
            # negative difference as zero.
            done[:, row] = np.maximum(np.subtract(work, before), 0.0)
        self._work = told
        return done

    def _note_roles(self, fleet: Fleet, now_s: float) -> None:
        """Start a pause if any instance has changed its role since the last call of ``look``.

        The first call starts a pause too, because there are no means yet.
        """
        roles: dict[str, int] = {}
        for name in fleet.names:
            row = fleet.find(name)
            assert row is not None, name
            roles[name] = int(fleet.role[row])
        is_first = self._changed_s == -math.inf
        if is_first or any(self._roles.get(name, role) != role for name, role in roles.items()):
            self._changed_s = now_s
        self._roles = roles

    def _measure(
        self,
        fleet: Fleet,
        prefills: IntColumn,
        decodes: IntColumn,
        done: FloatColumn,
        elapsed_s: float,
    ) -> None:
        """Update the mean pressures (load of the prefill and of the decode instances, in parts of
        the latency objectives) with what was done since the last call of ``look``.
        """
        share = 1 - math.exp(-elapsed_s / MEMORY_S)
        prefill_s, decode_s, num_decodes = done
        costs, queued = fleet.costs[:, prefills], fleet.queued_tokens[prefills]
        steps = np.ceil(queued / fleet.max_batch_tokens[prefills])
        context = fleet.queued_context[prefills]
        queue_s = costs[0] * steps + costs[1] * queued + costs[2] * context
        self.prefill += (float(queue_s.mean()) / self.ttft_s - self.prefill) * share
        self._busy += (float(prefill_s[prefills].mean()) / elapsed_s - self._busy) * share
        # Measure the time between tokens from steps: loads also count requests whose prompts still
        # wait.
        count = float(num_decodes[decodes].sum())
        tpot_s = float(decode_s[decodes].sum()) / count if count else 0.0
        step_s = min(float(fleet.costs[0, decodes].mean()), tpot_s)
        rest = len(decodes) / max(len(decodes) - 1, 1)
        after = (step_s + (tpot_s - step_s) * rest) / self.tpot_s
        self._decode_after += (after - self._decode_after) * share
        blocks = (fleet.used_blocks[decodes] / np.maximum(fleet.num_blocks[decodes], 1)).mean()
        decode = max(tpot_s / self.tpot_s, float(blocks) / FULL_BLOCKS)
        self.decode += (decode - self.decode) * share

    def _choose(self, fleet: Fleet, prefills: IntColumn, decodes: IntColumn) -> RoleChange | None:
        if self.prefill >= HIGH and len(decodes) > 1 and self._decode_after <= LOW:
            return self._describe(fleet, _find_idlest(fleet, decodes), PREFILL)
        if self.decode >= HIGH and len(prefills) > 1:
            rest = len(prefills) / (len(prefills) - 1)
            if self.prefill * rest <= LOW and self._busy * rest <= MAX_BUSY:
                return self._describe(fleet, _find_idlest(fleet, prefills), DECODE)
        return None

    def _describe(self, fleet: Fleet, row: int, role: int) -> RoleChange:
        reason = (
            f"prefill waits {self.prefill:.2f} of {self.ttft_s:g} s, decode takes "
            f"{self.decode:.2f} of {self.tpot_s * 1e3:g} ms or of its blocks"
        )
        return RoleChange(fleet.name_of(row), ROLES[role], reason)


def _find_idlest(fleet: Fleet, rows: IntColumn) -> int:
    """Return that of ``rows`` whose instance has the least work to finish before it can change its
    role.
    """
    tokens = fleet.queued_tokens[rows] + fleet.decode_tokens[rows]
    return int(rows[np.lexsort((rows, fleet.num_requests[rows], tokens))[0]])
