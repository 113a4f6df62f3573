"""The cache object of a sequence, fed so that its contents depend on the sequence alone.

torch chooses the order of sums by tensor sizes, so the pieces in which tokens are fed affect the
last bits of a cache object. The pieces are therefore fixed: a prompt is fed from token 0 in pieces
of one size and a shorter last one, then each token of the answer by itself, whatever chunks the
tokens arrive in. Tokens that do not fill a piece wait. So a request gives the same bits alone and
beside others, from a copy of a cache, and when recomputed.
"""

import inspect
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import ShapeError, UnsupportedError

__all__ = ["CacheSlots", "SequenceCache"]

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Argument names under which transformers' classes take and return their cache object; 5.24 renamed
several.
"""


class SequenceCache:
    """transformers' cache object of one sequence, and the tokens that wait to be fed to the
    model.
    """

    def __init__(self) -> None:
        self.past: Any = None
        """Cache object of transformers for this sequence; None before the first piece of the prompt
        is computed.
        """
        self.num_fed = 0
        self.pending: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens received: those fed to the model, and those that wait for a full
        piece.
        """
        return self.num_fed + len(self.pending)

    def copy(self) -> "SequenceCache":
        """Return a copy that shares no memory with this object."""
        other = SequenceCache()
        other.num_fed, other.pending = self.num_fed, [*self.pending]
        other.past = deepcopy(self.past)
        return other

    def extend(
        self, model: Any, token_ids: list[int], *, piece: int, prompt_len: int, num_rows: int
    ) -> list[Tensor]:
        """Take the next tokens; return the logits of the last ``num_rows`` of them.

        Args:
            model: transformers' model, in inference mode.
            token_ids: tokens that follow those received so far.
            piece: tokens of a piece of the prompt.
            prompt_len: position of the first token of the answer.
            num_rows: number of logit rows, at most the number of tokens.

        Returns: tensors [rows, V], one after the other, in the model's dtype.

        Raises: UnsupportedError (the class returns no cache object).
        """
        self.pending += token_ids
        first_row = self.num_tokens - num_rows
        rows: list[Tensor] = []
        while self.pending:
            size = self._find_size(piece, prompt_len)
            is_whole = size <= len(self.pending)
            if not is_whole and not num_rows:
                break
            # A piece of which more tokens may follow is fed to a copy of the cache, so that later
            # it can be fed whole.
            cache = self if is_whole else self.copy()
            wanted = cache.num_fed + min(size, len(cache.pending)) - max(cache.num_fed, first_row)
            logits = cache._feed(model, min(size, len(cache.pending)), max(wanted, 0))
            if wanted > 0:
                rows.append(logits)
            if not is_whole:
                break
        return rows

    def _find_size(self, piece: int, prompt_len: int) -> int:
        """Return the number of tokens that the model is fed next: one in the answer, else up to the
        end of a piece of the prompt.
        """
        if self.num_fed >= prompt_len:
            return 1
        return min(piece - self.num_fed % piece, prompt_len - self.num_fed)

    def _feed(self, model: Any, size: int, num_rows: int) -> Tensor:
        ids, self.pending = self.pending[:size], self.pending[size:]
        taken = _list_arguments(type(model))
        name = next((n for n in CACHE_NAMES if n in taken), "")
        given: dict[str, Any] = {} if self.past is None else {name: self.past}
        if self.past is not None and "position_ids" in taken and _is_rotary(model):
            # A cache object whose first layer keeps no KV may not tell how many tokens it has seen.
            given["position_ids"] = torch.arange(self.num_fed, self.num_fed + size)[None]
        if "logits_to_keep" in taken:
            given["logits_to_keep"] = max(num_rows, 1)
        output = model(input_ids=torch.tensor([ids]), use_cache=True, **given)
        held = next((n for n in CACHE_NAMES if output.get(n) is not None), "")
        if not (name and held):
            what = f"{type(model).__name__} returns no cache object to go on from"
            raise UnsupportedError("models.feed_cache", what)
        self.past = output[held]
        self.num_fed += size
        logits = output.logits[0]
        return logits[len(logits) - num_rows :]


def _is_rotary(model: Any) -> bool:
    """Return True if positions are angles of a RoPE, which count from 0 in every class; rows of a
    table may begin elsewhere.
    """
    return bool(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))


@cache
def _list_arguments(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a class's ``forward``."""
    forward: Any = getattr(kind, "forward")  # noqa: B009 - not known of a type
    return frozenset(inspect.signature(forward).parameters)


class CacheSlots:
    """transformers' cache objects of running sequences, and kept copies of them for prefixes, by
    slot.

    Args:
        num_slots: number of slots; ids are 0 to ``num_slots - 1``.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._caches: dict[int, SequenceCache] = {}

    def get(self, slot: int) -> SequenceCache:
        """Return the cache object in a slot.

        Raises: ShapeError (the slot is empty).
        """
        held = self._caches.get(slot)
        if held is None:
            what = f"slot {slot} of {self.num_slots} holds no sequence: begin it at token 0"
            raise ShapeError("models.find_cache", what)
        return held

    def clear(self, slot: int) -> None:
        """Put an empty cache object into a slot. The caller does so before a sequence's first
        token.
        """
        self._caches[slot] = SequenceCache()

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy the cache object of a slot to another slot. Raises: ShapeError (``source`` is
        empty).
        """
        self._caches[target] = self.get(source).copy()

    def drop(self, slot: int) -> None:
        """Free the cache object in a slot. The caller ensures that no sequence will continue it."""
        self._caches.pop(slot, None)
