"""The facts that decide if two instances may share KV; kv_identity.md in prose."""

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
"""Version of the fields of ``KvIdentity`` and their encoding; a change of either takes the next
number."""

NUMERICS_VERSION = 1
"""Version of the values that the code computes. A change that moves KV values beyond rounding (a
mended RoPE, another activation quantization, another order of a block's bytes) takes the next
number."""

ROUNDING_VERSION = 2
"""Version of the order of sums and roundings in the code. A change that moves bits, and values no
further than rounding, takes the next number."""

KvSharing = Literal["relaxed", "strict"]
"""``relaxed``: KV is shared between rounding classes. ``strict``: it is not."""


class RoundingClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that change the last bits of KV and nothing more.

    Instances of one ``KvIdentity`` and one rounding class compute equal bits. Between classes KV
    differs by what a reordered sum differs: it may be shared, and the same seed may then give other
    tokens where two logits nearly tie.
    """

    version: NonNegativeInt = ROUNDING_VERSION
    """Order of sums in the code: a release that reorders them keeps the caches of the last one."""
    expert_parts: PositiveInt = 1
    """Shares of the experts' intermediate size: each share is summed by itself, then the shares."""
    bf16_unit: str = ""
    """Instruction set that multiplies bf16 pairs in one rounding (``avx512_bf16``, ``amx``); empty
    where products are IEEE operations, which agree on all other instruction sets, or where nothing
    is bf16."""
    operators: str = ""
    """Hash over which implementation runs each module: a fused, a packed and a plain product of the
    same weights differ in the order of sums."""
    torch: str = ""
    """Version of torch, and instruction set or GPU, where torch multiplies: its libraries choose
    the order of sums. Empty where all products are native, those of attention included."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over all fields, 32 bytes."""
        return _hash_fields(b"tandem-rounding-class\0", msgspec.to_builtins(self))


class IdentityDifference(msgspec.Struct, frozen=True):
    """One fact in which two identities differ."""

    field: str
    """Dotted: ``dtype``, ``config.rms_norm_eps``, ``formats.model.layers.3.mlp.experts``."""
    ours: Any
    """None: the fact is absent."""
    theirs: Any
    forbids: bool
    """True if KV may not be shared because of it."""

    def __str__(self) -> str:
        """Return a line for a message."""
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts that must be equal for the KV of equal tokens to be interchangeable between instances.

    It belongs to the whole model: of a rank of tensor parallelism, ``layout`` still has all heads.
    The salt of a request is not in it, since identities are logged and sent to peers and a salt may
    be a secret; it goes into the root key.
    """

    version: NonNegativeInt = IDENTITY_VERSION
    """Forbids: identities of other versions state other facts."""
    numerics_version: NonNegativeInt = NUMERICS_VERSION
    """Forbids: the code that wrote the block computed other values; SSDs outlive upgrades."""
    weights: str
    """SHA-256 over every byte of the weights, hex. Forbids: other weights give other KV. The names
    and number of files do not count."""
    config: dict[str, str]
    """Fields of the model's configuration as JSON, defaults filled in, without those that are known
    not to change values. Forbids: the same weights under another epsilon, RoPE or top-k give other
    KV. An unknown field counts."""
    dtype: str
    """Dtype of activations, and of weights without a format. Forbids: bfloat16 keeps 8 bits of what
    float32 computes, which is a coarser value and not another order of sums."""
    formats: dict[str, str]
    """Weight format by module, where it is not ``dtype``. Forbids: quantized weights are other
    weights. The head counts though no KV depends on it: instances that serve one request by turns
    must agree on its tokens."""
    layout: KVLayout
    """Forbids: a block of another size, order or KV dtype cannot be read as ours."""
    states: StateLayout | None = None
    """The layout of states; None where no layer has one. Forbids: a state of another size or order
    cannot be read as ours."""
    windows: WindowLayout | None = None
    """The layout of the blocks of layers with a window, where they are not part of ``layout``.
    Forbids: a block without these layers cannot be read as one that has them."""
    num_deferred_experts: NonNegativeInt = 0
    """Experts of a token whose output is added one layer later. Forbids: each layer reads other
    hidden states than without deferral."""
    adapter: str = ""
    """SHA-256 over the adapter's weights and configuration, hex; empty for none. Forbids: an
    adapter changes the projections that make KV."""
    sharing: KvSharing = "relaxed"
    """Forbids: a strict instance must not find what relaxed ones exchanged."""
    rounding: RoundingClass = RoundingClass()
    """Forbids where ``sharing`` is ``strict``; else blocks are shared between rounding classes."""

    @property
    def digest(self) -> bytes:
        """SHA-256 over all that forbids sharing, 32 bytes: equal digests share KV."""
        fields = msgspec.to_builtins(self)
        if self.sharing != "strict":
            del fields["rounding"]
        if self.states is None:
            # Leave an empty field out: identities of models without states must stay equal to those
            # computed before the field existed.
            del fields["states"]
        if self.windows is None:
            del fields["windows"]
        if not fields["layout"].get("index_layers"):
            for name in ("index_dim", "index_layers"):
                fields["layout"].pop(name, None)
        return _hash_fields(b"tandem-kv-identity\0", fields)

    @property
    def system_fingerprint(self) -> str:
        """The fingerprint that answers of the API show; equal ones promise the same tokens for the
        same seed.

        With ``sharing="relaxed"`` the promise holds as long as no block of another rounding class
        was reused; with ``strict`` always.
        """
        return f"fp_{self.digest.hex()[:12]}_{self.rounding.digest.hex()[:6]}"

    def root_key(self, salt: str = "") -> bytes:
        """Return the key that chains of blocks start from; see ``make_root_key``."""
        return make_root_key(self.digest, salt)

    def compare(self, other: "KvIdentity") -> list[IdentityDifference]:
        """Return all facts that differ, by name; none of them ``forbids`` if KV may be shared."""
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
    """Return the key that chains of blocks start from.

    Args:
        digest: ``KvIdentity.digest``.
        salt: separates users who must not share; ``""`` is a salt like any other.
    """
    # The length prefix keeps ("ab", "c") apart from ("a", "bc").
    return hashlib.sha256(struct.pack("<Q", len(digest)) + digest + salt.encode()).digest()


def _hash_fields(domain: bytes, fields: dict[str, Any]) -> bytes:
    """Hash JSON with sorted keys, so that the order of declaration and of insertion is free."""
    return hashlib.sha256(domain + msgspec.json.encode(fields, order="sorted")).digest()


def _flatten(identity: KvIdentity) -> dict[str, Any]:
    """Return every fact by its dotted name; a mapping's facts are its entries."""
    facts: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(identity).items():
        if isinstance(value, dict):
            facts |= {f"{name}.{key}": item for key, item in cast("dict[str, Any]", value).items()}
        else:
            facts[name] = value
    return facts
