"""Goal: each field of an identity forbids sharing of KV, or does not, as its docstring says.

Method: one fact at a time is changed, and the root keys, which is all that a cache sees, are
compared. ``compare`` must tell the same: keys are equal exactly if nothing that differs forbids.
"""

import msgspec
import pytest

from tandem.core.spec import (
    IDENTITY_VERSION,
    NUMERICS_VERSION,
    ROUNDING_VERSION,
    GqaLayout,
    KvIdentity,
    MlaLayout,
    RoundingClass,
    WindowLayout,
    make_root_key,
)
from tandem.core.state_layout import StateLayout

LAYOUT = GqaLayout(num_layers=2, num_kv_heads=2, head_dim=16)
STATES = StateLayout(
    num_layers=1, num_value_heads=2, key_dim=8, value_dim=8, num_channels=48, conv_width=4
)
WINDOWS = WindowLayout(layout=LAYOUT, window=128, layers=(0, 2))
BASE = KvIdentity(
    weights="ab" * 32,
    config={"rms_norm_eps": "1e-06", "hidden_act": '"silu"'},
    dtype="bfloat16",
    formats={"model.layers.0.mlp.experts": "int8g128"},
    layout=LAYOUT,
    states=STATES,
    windows=WINDOWS,
)

FORBIDDING = {
    "version": {"version": IDENTITY_VERSION + 1},
    "numerics_version": {"numerics_version": NUMERICS_VERSION + 1},
    "weights": {"weights": "ac" * 32},
    "config.rms_norm_eps": {"config": {**BASE.config, "rms_norm_eps": "1e-05"}},
    "config.sliding_window": {"config": {**BASE.config, "sliding_window": "20"}},
    "dtype": {"dtype": "float32"},
    "formats.model.layers.0.mlp.experts": {"formats": {}},
    "formats.lm_head": {"formats": {**BASE.formats, "lm_head": "int8g128"}},
    "layout.dtype": {"layout": msgspec.structs.replace(LAYOUT, dtype="int8")},
    "layout.block_size": {"layout": msgspec.structs.replace(LAYOUT, block_size=32)},
    "layout.num_kv_heads": {"layout": msgspec.structs.replace(LAYOUT, num_kv_heads=1)},
    "states.conv_width": {"states": msgspec.structs.replace(STATES, conv_width=3)},
    "windows.window": {"windows": msgspec.structs.replace(WINDOWS, window=64)},
    "num_deferred_experts": {"num_deferred_experts": 2},
    "rope_factors.0": {"rope_factors": {"0": "short_factor"}},
    "adapter": {"adapter": "cd" * 32},
    "sharing": {"sharing": "strict"},
}

ROUNDING = {
    "version": ROUNDING_VERSION + 1,
    "expert_parts": 2,
    "bf16_unit": "amx",
    "operators": "0123456789abcdef",
    "torch": "2.9.0 AVX512",
}


def test_every_field_has_a_case():
    fields = {field.name for field in msgspec.structs.fields(KvIdentity)}
    assert {name.split(".")[0] for name in FORBIDDING} | {"rounding"} == fields
    assert {field.name for field in msgspec.structs.fields(RoundingClass)} == ROUNDING.keys()


@pytest.mark.parametrize("name", FORBIDDING)
def test_what_changes_values_forbids_sharing(name):
    other = msgspec.structs.replace(BASE, **FORBIDDING[name])
    assert other.root_key() != BASE.root_key()
    (difference,) = BASE.compare(other)
    assert difference.field == name
    assert difference.forbids
    assert other.system_fingerprint != BASE.system_fingerprint


@pytest.mark.parametrize("name", ROUNDING)
def test_what_changes_rounding_is_shared_unless_strict_and_always_shown(name):
    rounding = RoundingClass(**{name: ROUNDING[name]})
    other = msgspec.structs.replace(BASE, rounding=rounding)
    assert other.root_key() == BASE.root_key()
    assert other.system_fingerprint != BASE.system_fingerprint
    (difference,) = BASE.compare(other)
    assert (difference.field, difference.forbids) == (f"rounding.{name}", False)

    ours, theirs = (msgspec.structs.replace(i, sharing="strict") for i in (BASE, other))
    assert ours.root_key() != theirs.root_key()
    (difference,) = ours.compare(theirs)
    assert (difference.field, difference.forbids) == (f"rounding.{name}", True)
    # A relaxed instance may have exchanged its blocks with anyone.
    assert theirs.root_key() not in (BASE.root_key(), other.root_key())
    assert {d.field for d in ours.compare(other) if d.forbids} == {"sharing", f"rounding.{name}"}


def test_kinds_of_layouts_are_told_apart():
    latent = MlaLayout(num_layers=2, kv_lora_rank=32, rope_dim=32)
    other = msgspec.structs.replace(BASE, layout=latent)
    assert other.root_key() != BASE.root_key()
    differences = {d.field: d.ours for d in BASE.compare(other) if d.forbids}
    assert differences["layout.kind"] == "gqa"
    assert differences["layout.kv_lora_rank"] is None


def test_salts_and_order():
    assert BASE.root_key("a") not in (BASE.root_key(), BASE.root_key("b"))
    assert BASE.root_key("a") == make_root_key(BASE.digest, "a")
    turned = msgspec.structs.replace(BASE, config=dict(reversed(BASE.config.items())))
    assert turned.root_key() == BASE.root_key()
    assert BASE.compare(turned) == []


def test_an_identity_survives_the_wire_and_a_newer_one_is_refused():
    sent = msgspec.msgpack.encode(BASE)
    received = msgspec.msgpack.decode(sent, type=KvIdentity)
    assert received.digest == BASE.digest
    newer = {**msgspec.to_builtins(BASE), "quantum": 1}
    with pytest.raises(msgspec.ValidationError, match="quantum"):
        msgspec.convert(newer, KvIdentity)


def test_the_encoding_is_frozen():
    """Blocks on SSDs are found by these bytes: others need another ``IDENTITY_VERSION``."""
    assert (IDENTITY_VERSION, NUMERICS_VERSION, ROUNDING_VERSION) == (1, 1, 2)
    without = msgspec.structs.replace(BASE, states=None, windows=None)
    assert without.root_key("salt").hex() == (
        "6dee8c208b4a270c60ca7ba62a01df012e36a736373ce3bde375dcae597f5d44"
    )
