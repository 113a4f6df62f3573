"""The facts that decide if two instances may share KV. The page ``kv_identity.md`` explains
them.
"""

import hashlib
import struct
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from tandem.core.kv_layout import KVLayout, WindowLayout
from tandem.core.state_layout import StateLayout

__all__ = [
    "IDENTITY_VERSION",
    "NUMERICS_VERSION",
    "ROUNDING_VERSION",
    "IdentityDifference",
    "KvIdentity",
    "KvSharing",
    "RoundingClass",
    "make_root_key",
]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]

IDENTITY_VERSION = 1
"""Version of the fields of ``KvIdentity`` and their encoding; raised when either changes."""

NUMERICS_VERSION = 1
"""Version of the values that the code computes; raised by a change that alters KV by more than
rounding, such as a corrected RoPE, another activation quantization or another order of bytes."""

ROUNDING_VERSION = 2
"""Version of the order of sums and roundings; raised by a change that alters KV by no more than
rounding."""

KvSharing = Literal["relaxed", "strict"]
"""``relaxed``: instances that differ in ``RoundingClass`` share KV. ``strict``: they do not."""


class RoundingClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that change the last bits of KV and nothing more.

    Instances of one ``KvIdentity`` and one rounding class compute equal bits. Between classes KV
    differs by what a reordered sum differs: it may be shared, and the same seed may then give other
    tokens where two logits nearly tie.
    """

    version: NonNegativeInt = ROUNDING_VERSION
    """Version of the order of sums. It is apart from ``KvIdentity``, so that a release that
    reorders sums can use the caches of the one before."""
    expert_parts: PositiveInt = 1
    """Number of parts into which the experts' intermediate size is divided; each part is summed by
    itself, then the parts."""
    bf16_unit: str = ""
    """Instruction set that multiplies pairs of bf16 with one rounding (``avx512_bf16``, ``amx``).
    Empty if products are IEEE operations, which agree on all other instruction sets, or if nothing
    is bf16."""
    operators: str = ""
    """Hash over the implementation that runs each module: fused, packed and plain products of the
    same weights differ in the order of sums."""
    torch: str = ""
    """Version of torch, and instruction set or GPU, if torch computes products, because its
    libraries choose the order of sums. Empty if all products, including attention's, are native."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over all fields of the rounding class, 32 bytes."""
        return _hash_fields(b"tandem-rounding-class\0", msgspec.to_builtins(self))


class IdentityDifference(msgspec.Struct, frozen=True):
    """A fact in which the KV identities of two instances differ, with both values."""

    field: str
    """Dotted name: ``dtype``, ``config.rms_norm_eps``, ``formats.model.layers.3.mlp.experts``."""
    ours: Any
    """Our value; None if the fact is absent."""
    theirs: Any
    forbids: bool
    """True if KV may not be shared because of this difference."""

    def __str__(self) -> str:
        """Return the difference as a line of text."""
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that must be equal for two instances to use each other's KV of equal tokens.

    An identity describes the whole model: even for one rank of tensor parallelism, ``layout`` has
    all heads. A request's salt is not part of it, because identities are logged and sent to peers
    and a salt may be secret; the salt goes into the root key.

    "Forbids" in a field's description gives the reason why a difference in it forbids sharing.
    """

    version: NonNegativeInt = IDENTITY_VERSION
    """Version of the fields of this struct. Forbids: other versions state other facts."""
    numerics_version: NonNegativeInt = NUMERICS_VERSION
    """Version of the computed values. Forbids: blocks on SSDs outlive upgrades of the code."""
    weights: str
    """SHA-256 over all bytes of the weights, hex; names and number of files do not matter. Forbids:
    other weights give other KV."""
    config: dict[str, str]
    """Fields of the model's configuration as JSON, with defaults, without fields known not to
    change values. Forbids: the same weights give other KV with another epsilon, RoPE or top-k."""
    dtype: str
    """Dtype of activations, and of weights without a format. Forbids: values in bfloat16 are
    coarser than in float32, by more than another order of sums."""
    formats: dict[str, str]
    """Weight format by module, if it is not ``dtype``. Forbids: quantized weights are other
    weights. The head is included although no KV depends on it: instances that continue each other's
    requests must agree on tokens."""
    layout: KVLayout
    """Layout of blocks. Forbids: a block of another size, order or dtype cannot be read as ours."""
    states: StateLayout | None = None
    """Layout of recurrent states; None if no layer has one. Forbids: a state of another size or
    order cannot be read as ours."""
    windows: WindowLayout | None = None
    """Layout of the sliding-window layers' own blocks; None if these layers are part of ``layout``.
    Forbids: a block without these layers cannot be read as one with them."""
    num_deferred_experts: NonNegativeInt = 0
    """Number of experts per token whose output is added one layer later. Forbids: layers get other
    inputs than without deferral."""
    rope_factors: dict[str, str] = {}
    """Factors of a LongRoPE in force, ``long_factor`` or ``short_factor``, by the number of the
    RoPE among the model's. Forbids: the longest sequence that is served decides which are, and the
    others rotate keys by other angles."""
    adapter: str = ""
    """SHA-256 over the adapter's weights and configuration, hex; empty for none. Forbids: an
    adapter changes the projections that make KV."""
    sharing: KvSharing = "relaxed"
    """Policy of sharing. Forbids: a strict instance must not find KV that relaxed ones have
    exchanged."""
    rounding: RoundingClass = RoundingClass()
    """Facts about rounding. Forbids if ``sharing`` is ``strict``."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over all facts that forbid sharing, 32 bytes: instances with equal digests share
        KV.
        """
        fields = msgspec.to_builtins(self)
        if self.sharing != "strict":
            del fields["rounding"]
        if self.states is None:
            # Leave an empty field out: identities of models without states must stay equal to those
            # computed before the field existed.
            del fields["states"]
        if self.windows is None:
            del fields["windows"]
        if not self.rope_factors:
            del fields["rope_factors"]
        if not fields["layout"].get("index_layers"):
            for name in ("index_dim", "index_layers"):
                fields["layout"].pop(name, None)
        return _hash_fields(b"tandem-kv-identity\0", fields)

    @property
    def system_fingerprint(self) -> str:
        """Fingerprint in answers of the API: with equal ones, the same seed gives the same tokens.

        With ``sharing="relaxed"``, this holds only if no block was reused from an instance of
        another ``RoundingClass``, which sums in another order.
        """
        return f"fp_{self.digest.hex()[:12]}_{self.rounding.digest.hex()[:6]}"

    def root_key(self, salt: str = "") -> bytes:
        """Return the key with which all chains of block keys with this salt begin; see
        ``make_root_key``.
        """
        return make_root_key(self.digest, salt)

    def compare(self, other: "KvIdentity") -> list[IdentityDifference]:
        """Return all facts that differ, by name. KV may be shared if none of them ``forbids``
        it.
        """
        ours, theirs = _flatten(self), _flatten(other)
        is_strict = "strict" in (self.sharing, other.sharing)
        return [
            IdentityDifference(
                name,
                ours.get(name),
                theirs.get(name),
                is_strict or not name.startswith("rounding."),
            )
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]


def make_root_key(digest: bytes, salt: str) -> bytes:
    """Return the key with which chains of block keys (each the digest of the key before it and a
    block's tokens) begin.

    Args:
        digest: ``KvIdentity.digest``.
        salt: separates users who must not share KV; ``""`` is a salt like any other.
    """
    # The length prefix makes ("ab", "c") and ("a", "bc") give different hashes.
    return hashlib.sha256(struct.pack("<Q", len(digest)) + digest + salt.encode()).digest()


def _hash_fields(domain: bytes, fields: dict[str, Any]) -> bytes:
    """Return the SHA-256 of the fields as JSON with sorted keys, so that their order does not
    matter.
    """
    return hashlib.sha256(domain + msgspec.json.encode(fields, order="sorted")).digest()


def _flatten(identity: KvIdentity) -> dict[str, Any]:
    """Return every fact of an identity by its dotted name; each entry of a mapping is a fact of its
    own.
    """
    facts: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(identity).items():
        if isinstance(value, dict):
            facts |= {f"{name}.{key}": item for key, item in cast("dict[str, Any]", value).items()}
        else:
            facts[name] = value
    return facts
