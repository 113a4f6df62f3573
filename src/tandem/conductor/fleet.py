"""The fleet: all known instances, as rows of columns that events keep current.

An instance is known by its name and keeps its row over restarts, until it leaves. A decision
rebuilds nothing: events write a few cells, and policies read whole columns. Pure and
single-threaded.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.conductor.estimator import DEFAULT_COSTS, NUM_FEATURES
from tandem.conductor.routes import InstanceRef
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import StepRecord

__all__ = ["ROLES", "Fleet", "FloatColumn", "InstanceFacts", "IntColumn", "Load", "Mask", "Work"]

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

ROLES: tuple[InstanceRole, ...] = ("unified", "prefill", "decode")
"""Roles in the order of their numbers in the column ``role``. If no pair of instances is usable, a
request is served by one instance, in this order of preference."""
UNIFIED, PREFILL, DECODE = range(3)
FIRST_ROWS = 8
DEFAULT_TOKENS_PER_S = 50_000.0
"""Assumed rate of loading KV in tokens a second, until a transfer was measured."""
HALF_LIFE_S = 60.0
"""Time in which the ratio (its logarithm) between the learned speed of an idle instance and that of
the others halves, in seconds."""
AGE_EVERY_S = 1.0
_USUAL_STEP = np.array((1.0, 256.0, 65536.0, 4.0, 4096.0))
"""Features of a step by which the speeds of instances are compared: a prompt of 256 tokens and four
decodes."""


class InstanceFacts(NamedTuple):
    """Facts that policies use of an instance during one run of its process; they are fixed
    meanwhile.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batch_tokens: int
    """Largest number of tokens of one step."""
    group_depth: int = 0
    """Number of last blocks of a prefix for which the sliding-window KV or the recurrent state must
    be cached too, so that the prefix can be reused; 0: the model needs none.
    """


class Load(NamedTuple):
    """The load of an instance: its last report, and the requests sent to it since."""

    queued_tokens: int = 0
    """Number of tokens (of prompts, and of outputs recomputed) that are to be computed before their
    requests can decode.
    """
    queued_context: float = 0.0
    """Sum over the queued tokens of the context length that each attends to."""
    num_decoding: int = 0
    """Number of requests that decode on the instance now, or will after their prefill."""
    decode_tokens: int = 0
    """Number of tokens in the KV cache of the requests that decode on the instance now, or will
    after their prefill.
    """
    num_requests: int = 0
    """Number of requests on the instance or on their way to it."""
    used_blocks: int = 0
    """Number of KV blocks that the instance's requests use, or will use for KV that they are to
    read.
    """
    largest_blocks: int = 0
    """Number of KV blocks that the longest decoding request will need at its full length."""


class Work(NamedTuple):
    """The work of an instance since it joined: sums over the steps that it has computed."""

    prefill_s: float = 0.0
    """Seconds of the steps that computed prompts."""
    decode_s: float = 0.0
    """Sum over all steps of (duration in seconds times number of tokens decoded in the step)."""
    num_decodes: int = 0
    """Number of decoded tokens."""


class Fleet:
    """The state of all instances as columns. Row ``i`` is the instance of ``refs[i]``; free rows do
    not serve.

    Attributes:
        refs: present run of each instance; None in a free row.
        is_serving: True if it serves.
        is_draining: True if it gets no new requests.
        role: index in ``ROLES``.
        reads: ``reads[d, p]`` is True if instance d can read the blocks of instance p.
        num_readers: number of usable decode instances that can read its blocks.
        load: one column for each field of ``Load``.
        costs: seconds of a step by feature; see ``StepEstimator``. Those of an idle instance age.
        load_tokens_per_s: rate at which it loads KV from other instances or the store; that of an
            idle instance ages.
        work: one column for each field of ``Work``, summed up since the instance joined.
        group_depths: the set of values of ``group_depth`` other than 0; usually empty.
    """

    def __init__(self) -> None:
        self.refs: list[InstanceRef | None] = []
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._identities: dict[str, int] = {}
        self.is_serving: Mask = np.zeros(0, np.bool_)
        self.is_draining: Mask = np.zeros(0, np.bool_)
        self.role: IntColumn = np.zeros(0, np.int64)
        self.identity: IntColumn = np.zeros(0, np.int64)
        self.reads: Mask = np.zeros((0, 0), np.bool_)
        self.num_readers: IntColumn = np.zeros(0, np.int64)
        self.facts: IntColumn = np.zeros((len(InstanceFacts._fields), 0), np.int64)
        self.load: FloatColumn = np.zeros((len(Load._fields), 0))
        self.costs: FloatColumn = np.zeros((NUM_FEATURES, 0))
        self.load_tokens_per_s: FloatColumn = np.zeros(0)
        self._learned: FloatColumn = np.zeros((NUM_FEATURES + 1, 0))
        """The costs and the rate of loading as last measured, without their age."""
        self._worked_s: FloatColumn = np.zeros(0)
        """Time at which each instance was last seen to work, in seconds; infinite: since the last
        call of ``age``."""
        self._aged_s = -math.inf
        self.work: FloatColumn = np.zeros((len(Work._fields), 0))
        self.group_depths: frozenset[int] = frozenset()
        self._grow(FIRST_ROWS)

    def _grow(self, num_more: int) -> None:
        old = len(self.refs)
        self.refs += [None] * num_more
        self._free += range(old + num_more - 1, old - 1, -1)
        more = (0, num_more)
        self.is_serving = np.pad(self.is_serving, more)
        self.is_draining = np.pad(self.is_draining, more)
        self.role = np.pad(self.role, more)
        self.identity = np.pad(self.identity, more)
        # In Fortran order the readers of one instance (the instances that read KV blocks from it)
        # are contiguous in memory: decisions read them together.
        self.reads = np.asfortranarray(np.pad(self.reads, more))
        self.num_readers = np.pad(self.num_readers, more)
        self.facts = np.pad(self.facts, ((0, 0), more), constant_values=1)
        self.load = np.pad(self.load, ((0, 0), more))
        self.costs = np.pad(self.costs, ((0, 0), more))
        self.load_tokens_per_s = np.pad(
            self.load_tokens_per_s, more, constant_values=DEFAULT_TOKENS_PER_S
        )
        self._learned = np.pad(self._learned, ((0, 0), more))
        self._worked_s = np.pad(self._worked_s, more)
        self.work = np.pad(self.work, ((0, 0), more))
        # Each named array is a view of one column of the table, so a write to a row of the table
        # shows in all of them.
        (
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            self.max_batch_tokens,
            self.group_depth,
        ) = self.facts
        (
            self.queued_tokens,
            self.queued_context,
            self.num_decoding,
            self.decode_tokens,
            self.num_requests,
            self.used_blocks,
            self.largest_blocks,
        ) = self.load

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        """Number of rows of the columns, free ones (without an instance) included."""
        return len(self.refs)

    @property
    def names(self) -> list[str]:
        """Names of all known instances."""
        return list(self._rows)

    def find(self, name: str) -> int | None:
        """Return the row of the instance with this name; None if it is not known."""
        return self._rows.get(name)

    def name_of(self, row: int) -> str:
        """Return the name of the instance in a row."""
        ref = self.refs[row]
        assert ref is not None, f"row {row} is free"
        return ref.name

    def role_of(self, row: int) -> InstanceRole:
        """Return the role of the instance in a row."""
        return ROLES[int(self.role[row])]

    # The methods below record what has happened to instances.

    def join(self, name: str, role: InstanceRole) -> int:
        """Add an instance that does not serve yet; return the row of the columns that it gets."""
        assert name not in self._rows, f"{name} is known"
        if not self._free:
            self._grow(self.num_rows)
        row = self._rows[name] = self._free.pop()
        self.refs[row] = InstanceRef(name, -1)
        self.role[row] = ROLES.index(role)
        self.work[:, row] = 0.0
        self.set_load_speed(row, DEFAULT_TOKENS_PER_S)
        self.set_costs(row, self._guess_costs(row))
        return row

    def _guess_costs(self, row: int) -> FloatColumn:
        """Return the mean step costs of the other instances, assumed for a new one in this row;
        defaults if there are no others.
        """
        others = [other for other in self._rows.values() if other != row]
        if not others:
            return np.array(DEFAULT_COSTS)
        return self.costs[:, others].mean(axis=1)

    def leave(self, name: str) -> int:
        """Remove an instance and return its row, which a later instance may reuse."""
        self.stop(name)
        row = self._rows.pop(name)
        self.refs[row] = None
        self.is_draining[row] = False
        self._free.append(row)
        return row

    def serve(self, ref: InstanceRef, facts: InstanceFacts) -> int:
        """Record that a run (process) of an instance serves; return its row."""
        row = self._rows[ref.name]
        self.refs[row] = ref
        self.facts[:, row] = facts
        depths = self.group_depth[list(self._rows.values())]
        self.group_depths = frozenset(depths[depths > 0].tolist())
        self.identity[row] = self._number_identity(ref.identity)
        self.load[:, row] = 0
        self.is_serving[row] = True
        self._count_readers()
        return row

    def stop(self, name: str) -> None:
        """Record that an instance does not serve: its process is gone or restarts."""
        row = self._rows[name]
        self.is_serving[row] = False
        self.reads[row, :] = False
        self.reads[:, row] = False
        self.load[:, row] = 0
        self._count_readers()

    def set_role(self, name: str, role: InstanceRole) -> None:
        """Set the role (prefill, decode or unified) of an instance."""
        self.role[self._rows[name]] = ROLES.index(role)
        self._count_readers()

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Set if an instance is draining, which means that it gets no new requests."""
        self.is_draining[self._rows[name]] = is_draining
        self._count_readers()

    def set_sources(self, name: str, sources: Collection[str]) -> None:
        """Set the prefill instances whose blocks an instance can read."""
        reads = self.reads[self._rows[name]]
        reads[:] = False
        for source in sources:
            row = self._rows.get(source)
            if row is not None:
                reads[row] = True
        self._count_readers()

    def set_load(self, row: int, load: Load) -> None:
        """Set the load of the instance in a row."""
        self.load[:, row] = load

    def set_costs(self, row: int, costs: FloatColumn) -> None:
        """Set the costs that the instance in a row has just shown."""
        self.costs[:, row] = self._learned[:-1, row] = costs
        self._worked_s[row] = math.inf

    def set_load_speed(self, row: int, tokens_per_s: float) -> None:
        """Set the rate of loading that the instance in a row reports; one that it has reported
        before keeps its age.
        """
        if self._learned[-1, row] != tokens_per_s:
            self.load_tokens_per_s[row] = self._learned[-1, row] = tokens_per_s
            self._worked_s[row] = math.inf

    def age(self, now_s: float) -> None:
        """Let what was learned of idle instances approach what is known of the others.

        An instance that once looked slow gets no requests while others look faster, and nothing
        else would show that it is fast. So its speed approaches the mean of the others, with the
        ratios between its costs as they are, until it gets a request. O(rows), once a second.

        Args:
            now_s: monotonic seconds.
        """
        if now_s - self._aged_s < AGE_EVERY_S:
            return
        self._aged_s = now_s
        rows = np.fromiter(self._rows.values(), np.int64)
        is_busy = self.load[:5, rows].any(axis=0)
        has_worked = is_busy | np.isinf(self._worked_s[rows])
        self._worked_s[rows[has_worked]] = now_s
        idle = rows[~has_worked & self.is_serving[rows]]
        if len(rows) < 2 or not len(idle):
            return
        speeds = np.stack((_USUAL_STEP @ self._learned[:-1], self._learned[-1]))
        others = (speeds[:, rows].sum(axis=1)[:, None] - speeds[:, idle]) / (len(rows) - 1)
        share = 1.0 - 0.5 ** (np.maximum(now_s - self._worked_s[idle], 0.0) / HALF_LIFE_S)
        step, load = (others / np.maximum(speeds[:, idle], 1e-12)) ** share
        self.costs[:, idle] = self._learned[:-1, idle] * step
        self.load_tokens_per_s[idle] = self._learned[-1, idle] * load

    def add_work(self, row: int, step: StepRecord) -> None:
        """Add a computed step to the sums in ``work`` of the instance in a row."""
        self._worked_s[row] = math.inf
        decode_s = step.seconds * step.num_decodes
        self.work[:, row] += Work(
            step.seconds if step.prefill_tokens else 0.0, decode_s, step.num_decodes
        )

    def is_reader(self, row: int) -> bool:
        """Return True if the instance in a row counts in ``num_readers``, as a serving decode
        instance that is not draining.
        """
        is_open = self.is_serving[row] and not self.is_draining[row]
        return bool(is_open and self.role[row] == DECODE)

    def _count_readers(self) -> None:
        decodes = self.is_serving & ~self.is_draining & (self.role == DECODE)
        np.sum(self.reads[decodes], axis=0, out=self.num_readers)

    # The methods below answer questions about the instances.

    def is_idle(self, row: int) -> bool:
        """Return True if the instance in a row has no requests, and none on their way to it."""
        return not self.load[:5, row].any()

    def find_usable(self, avoid: Collection[InstanceRef], identity: str | None) -> Mask:
        """Return a new mask of the rows whose instances may be chosen: serving, not draining, not
        to be avoided.

        If ``identity`` is given, only instances with that KV identity are usable.
        """
        usable = self.is_serving & ~self.is_draining
        for ref in avoid:
            row = self._rows.get(ref.name)
            if row is not None and self.refs[row] == ref:
                usable[row] = False
        if identity is not None:
            usable &= self.identity == self._number_identity(identity)
        return usable

    def _number_identity(self, identity: str) -> int:
        return self._identities.setdefault(identity, len(self._identities))
