"""The routing rules of SGLang's and Dynamo's routers, by their documents and sources."""

import math

import numpy as np

from tandem.conductor.directory import PrefixDirectory
from tandem.conductor.fleet import Fleet, IntColumn
from tandem.conductor.policies.policy import Question
from tandem.conductor.prediction import TtftParts

__all__ = ["DynamoCost", "SglangCacheAware"]

MAX_TREE_KEYS = 1 << 18


class SglangCacheAware:
    """SGLang's router, policy ``cache_aware``, with its defaults.

    If the numbers of requests differ by more than 64 and by more than half, the instance with the
    fewest. Otherwise the one with the longest cached prefix, if that is more than 0.3 of the
    prompt, and else the one with the smallest tree. Prefixes are those of the router's own
    decisions, here by blocks instead of characters. SGLang limits the size of each instance's tree;
    here all trees together are limited.

    Source: sglang-router 0.3.2, ``policies/cache_aware.rs``.
    """

    threshold = math.inf
    CACHE_THRESHOLD = 0.3
    BALANCE_ABS = 64
    BALANCE_REL = 1.5

    def __init__(self) -> None:
        self._tree = PrefixDirectory(MAX_TREE_KEYS)
        self._sizes: dict[int, int] = {}
        """Number of tokens inserted so far into the prefix tree of each instance (by its row in the
        fleet).
        """

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance with the longest known prefix, or the least loaded one if
        loads differ much.
        """
        loads = fleet.num_requests[rows]
        least, most = loads.min(), loads.max()
        if most - least > self.BALANCE_ABS and most > self.BALANCE_REL * least:
            return int(rows[int(np.argmin(loads))])
        matched = self._match(question, fleet)[rows]
        best = int(np.argmax(matched))
        if matched[best] > self.CACHE_THRESHOLD * question.prompt_len:
            return int(rows[best])
        return min((int(row) for row in rows), key=lambda row: (self._sizes.get(row, 0), row))

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance with the fewest requests."""
        return int(rows[int(np.argmin(fleet.num_requests[rows]))])

    def note_placed(self, question: Question, row: int) -> None:
        """Insert the prompt's blocks into the tree (the known prefixes) of the instance in a
        row.
        """
        hits = np.zeros(row + 1, np.int64)
        for chain in question.chains:
            self._tree.match(chain, hits)
            self._tree.note_stored(row, chain.keys)
        fresh = question.prompt_len - int(hits[row])
        self._sizes[row] = self._sizes.get(row, 0) + fresh

    def forget(self, row: int) -> None:
        """Forget which prefixes were sent to the instance of a row, as it has restarted or left."""
        self._tree.note_cleared(row)
        self._sizes.pop(row, None)

    def _match(self, question: Question, fleet: Fleet) -> IntColumn:
        matched = np.zeros(fleet.num_rows, np.int64)
        for chain in question.chains:
            self._tree.match(chain, matched)
        return matched


class DynamoCost:
    """Dynamo's router, policy ``kv``, with its defaults: the least of blocks to prefill and decode.

        (active prefill blocks + prompt blocks - blocks held) + (active blocks + prompt blocks)

    Source: Dynamo 1.6, router documentation; prefill_load_scale 1, temperature 0.
    """

    threshold = math.inf
    PREFILL_LOAD_SCALE = 1.0

    def choose_prefill(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn, parts: TtftParts
    ) -> int:
        """Return the row of the instance with the least sum of blocks to prefill and blocks in use
        for decode.
        """
        size = fleet.block_size[rows]
        incoming = question.prompt_len / size
        prefill = fleet.queued_tokens[rows] / size + incoming - hits[rows] / size
        decode = fleet.decode_tokens[rows] / size + incoming
        return int(rows[int(np.argmin(self.PREFILL_LOAD_SCALE * prefill + decode))])

    def choose_decode(
        self, question: Question, fleet: Fleet, rows: IntColumn, hits: IntColumn
    ) -> int:
        """Return the row of the instance whose decodes use the fewest blocks; blocks of the prompt
        that it holds give no credit.
        """
        return int(rows[int(np.argmin(fleet.decode_tokens[rows] / fleet.block_size[rows]))])

    def note_placed(self, question: Question, row: int) -> None:
        """Do nothing: the policy remembers no decisions."""

    def forget(self, row: int) -> None:
        """Do nothing: the policy remembers nothing of an instance."""
