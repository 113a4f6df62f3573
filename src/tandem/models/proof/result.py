"""The result of a proof as data: stored between runs and printed by ``tandem verify``."""

from typing import Literal

import msgspec

__all__ = ["Check", "Flip", "Proof"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of our tiny model's logits with transformers', for one way of feeding the
    tokens (whole, in chunks, one by one).
    """

    name: str
    excess: float
    """Largest distance of a logit from eager in float64, in units of the bound."""
    where: str = ""
    """The first operator that differs, of a comparison of the tiny model that failed."""

    @property
    def is_ok(self) -> bool:
        """True if no logit differs from the exact one by more than the error bound."""
        return self.excess <= 1.0


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """The result of changing one configuration field in transformers' eager model only: a field
    whose change shows there must be one that our operators read.
    """

    field: str
    change: str
    """Old and new value of the field; for a ``kept`` field, the reason."""
    outcome: Literal["noticed", "structural", "refused", "unread", "harmless", "kept", "unnoticed"]
    """``noticed``: the logits leave the bound; ``structural``: weights have other shapes;
    ``refused``: transformers refuses every other value that was tried; ``kept``: not changed;
    ``unread``: transformers' code does not read it; ``harmless``: known to change nothing;
    ``unnoticed``: the logits stay within the bound, so the field is not proved.
    """


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing our operators with transformers' eager code on a tiny model of one
    configuration.
    """

    key: str
    """SHA-256 over the code, transformers' version and the tiny configuration; empty: not
    stored.
    """
    model_type: str
    architecture: str
    transformers: str
    eager_excess: float
    """Error of eager's own float32 in units of the bound, which shows whether the bound is
    tight.
    """
    checks: tuple[Check, ...]
    flips: tuple[Flip, ...]
    problem: str = ""
    """Reason for a refusal; empty: proved. Names the first layer and operator that differ."""

    @property
    def is_proved(self) -> bool:
        """True if models of this configuration may run, as no comparison on the tiny model
        failed.
        """
        return not self.problem
