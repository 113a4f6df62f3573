"""Goal: a hostile adapter is refused by name and leaves the model as it was.

Method: one good adapter of a tiny model, harmed in one way each; afterwards the model still loads
the good one, and computes what it computed.
"""

import json
import shutil

import pytest
import torch
from loading import load_checkpoint
from lora import list_targets, make_adapter
from safetensors.torch import load_file, save_file

from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    TandemError,
    UnsupportedError,
)

NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(make_config, save_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    theirs = save_model(make_config("qwen3_moe"), folder)
    ours = load_checkpoint(folder, dtype="float32")
    ours.enable_adapters(2)
    ours.theirs = theirs
    with pytest.MonkeyPatch.context() as patch:
        make_adapter(theirs, folder / "good", patch)
    ours.good = folder / "good"
    return ours


@pytest.fixture
def adapter(model, tmp_path):
    """A copy of the good adapter."""
    return shutil.copytree(model.good, tmp_path / "adapter")


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def move(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


A, B = f"{NAME}.lora_A.weight", f"{NAME}.lora_B.weight"
EXPERT = "base_model.model.model.layers.0.mlp.experts"
TENSORS = {
    "another rank": (put(A, torch.ones(5, 48)), CorruptionError, "q_proj"),
    "another input": (put(A, torch.ones(4, 47)), CorruptionError, "q_proj"),
    "another output": (put(B, torch.ones(63, 4)), CorruptionError, "q_proj"),
    "one dimension": (put(A, torch.ones(192)), CorruptionError, "q_proj"),
    "nothing": (put(A, torch.ones(0, 48)), CorruptionError, "q_proj"),
    "half": (lambda t: t.pop(B), CorruptionError, "q_proj"),
    "twice": (put(f"{NAME}.lora_A.default.weight", torch.ones(4, 48)), CorruptionError, "q_proj"),
    "nan": (put(A, torch.full((4, 48), torch.nan)), CorruptionError, "q_proj"),
    "infinity": (put(B, torch.full((64, 4), torch.inf)), CorruptionError, "q_proj"),
    "integers": (put(A, torch.ones(4, 48, dtype=torch.int32)), UnsupportedError, "q_proj"),
    "no module": (move(A, A.replace("q_proj", "x_proj")), CorruptionError, "alone"),
    "expert": (put(f"{EXPERT}.lora_A.weight", torch.ones(4, 48)), CorruptionError, "experts"),
    "embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 131)),
                  UnsupportedError, "lora_embedding_A"),
    "dora": (put(f"{NAME}.lora_magnitude_vector", torch.ones(64)), UnsupportedError, "magnitude"),
    "path": (put("base_model.model.../../etc.lora_A.weight", torch.ones(4, 4)),
             UnsupportedError, "etc"),
    "empty": (lambda t: t.clear(), CorruptionError, "no tensors"),
}  # fmt: skip
CONFIGS = {
    "rank of a billion": ({"r": 10**9}, ConfigError, "r is"),
    "rank of zero": ({"r": 0}, ConfigError, "r is"),
    "rank below": ({"r": -1}, ConfigError, "r is"),
    "rank of text": ({"r": "4"}, ConfigError, "r is"),
    "rank of truth": ({"r": True}, ConfigError, "r is"),
    "nan alpha": ({"lora_alpha": float("nan")}, ConfigError, "lora_alpha"),
    "infinite alpha": ({"lora_alpha": float("inf")}, ConfigError, "lora_alpha"),
    "no alpha": ({"lora_alpha": None}, ConfigError, "lora_alpha"),
    "dora": ({"use_dora": True}, UnsupportedError, "use_dora"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
    "bias": ({"bias": "all"}, UnsupportedError, "bias"),
    "activated": ({"alora_invocation_tokens": [1]}, UnsupportedError, "alora"),
    "pissa": ({"init_lora_weights": "pissa"}, UnsupportedError, "pissa"),
    "experts": ({"target_parameters": ["gate_up_proj"]}, UnsupportedError, "routed experts"),
    "from the future": ({"lora_moon_phase": 0.5}, UnsupportedError, "lora_moon_phase"),
    "slow pattern": ({"rank_pattern": {"(a+)+$": 3}}, UnsupportedError, "regular expression"),
    "pattern's rank": ({"rank_pattern": {"q_proj": 10**9}}, ConfigError, "r is"),
    "pattern's shape": ({"rank_pattern": {"q_proj": 5}}, CorruptionError, "q_proj"),
    "no object": ({"alpha_pattern": [1]}, ConfigError, "alpha_pattern"),
    "another kind": ({"peft_type": "IA3"}, UnsupportedError, "LORA"),
}


def refuse(model, folder, kind, text, **options):
    with pytest.raises(kind) as caught:
        model.adapters.read(folder, **options)
    assert text in str(caught.value)
    assert model.adapters.read(model.good)


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_tensors(model, adapter, case):
    change, kind, text = TENSORS[case]
    edit_tensors(adapter, change)
    refuse(model, adapter, kind, text)


@pytest.mark.parametrize("case", CONFIGS)
def test_hostile_settings(model, adapter, case):
    changes, kind, text = CONFIGS[case]
    edit_config(adapter, **changes)
    refuse(model, adapter, kind, text)


def test_routed_experts_by_name(model, adapter):
    """Both halves fit each other: the reason is what they are of."""

    def add(tensors):
        tensors[f"{EXPERT}.lora_A.weight"] = torch.ones(4, 48)
        tensors[f"{EXPERT}.lora_B.weight"] = torch.ones(48, 4)

    edit_tensors(adapter, add)
    refuse(model, adapter, UnsupportedError, "routed experts")


def test_damaged_files(model, adapter):
    """A file cut anywhere, and one that is not what it says, are refused without a crash."""
    path = adapter / "adapter_model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuse(model, adapter, CorruptionError, "adapter_model")
    path.write_bytes((1 << 62).to_bytes(8, "little") + whole[8:])
    refuse(model, adapter, CorruptionError, "header")
    path.write_bytes(whole)
    for text in ("", "[]", "{", "[" * 100_000, "nul", "\xff"):
        (adapter / "adapter_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(TandemError):
            model.adapters.read(adapter)
    (adapter / "adapter_config.json").write_bytes(b" " * (2 << 20))
    refuse(model, adapter, CorruptionError, "bytes")


def test_pickles_and_absences(model, adapter, tmp_path):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refuse(model, adapter, UnsupportedError, "pickle")
    (adapter / "adapter_model.bin").unlink()
    refuse(model, adapter, NotFoundError, "adapter_model.safetensors")
    refuse(model, tmp_path / "nowhere", NotFoundError, "adapter_config.json")
    (adapter / "adapter_model.safetensors").mkdir()
    refuse(model, adapter, NotFoundError, "not a file")


def test_links_out_of_the_folder(model, adapter, tmp_path):
    """Each file's real place counts, not only the folder's."""
    within = tmp_path.resolve() / "folder"
    inside = shutil.copytree(adapter, within / "inside")
    model.adapters.read(inside, within=within)
    refuse(model, adapter, ConfigError, "leads out", within=within)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        linked = shutil.copytree(adapter, within / f"by_{name}")
        (linked / name).unlink()
        (linked / name).symlink_to(adapter / name)
        refuse(model, linked, ConfigError, "leads out", within=within)


def test_content_is_the_identity(model, adapter, tmp_path):
    """A digest is of weights and scales: not of the folder, and of every bit of both."""
    digest = model.adapters.read(adapter).digest
    assert digest == model.adapters.read(model.good).digest
    edit_config(adapter, lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert model.adapters.read(adapter).digest == digest
    edit_config(adapter, lora_alpha=9)
    other = model.adapters.read(adapter).digest
    assert other != digest
    edit_config(adapter, lora_alpha=8)

    def flip(tensors):
        tensors[A].view(torch.int32)[0, 0] ^= 1

    edit_tensors(adapter, flip)
    third = model.adapters.read(adapter).digest
    assert len({digest, other, third}) == 3
    refuse(model, adapter, ConflictError, "changed", digest=digest)


def test_slots_are_bounded_and_come_back(model, adapter):
    good = model.adapters.install(model.adapters.read(model.good))
    assert model.adapters.install(model.adapters.read(model.good)) is good
    digests = []
    for alpha in (1, 2):
        edit_config(adapter, lora_alpha=alpha)
        files = model.adapters.read(adapter)
        if alpha == 2:
            with pytest.raises(CapacityError):
                model.adapters.install(files)
            model.adapters.uninstall(good.digest)
        digests.append(model.adapters.install(files).digest)
    for digest in digests:
        model.adapters.uninstall(digest)


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"k_proj": 3, "^model.layers.0.x": 2}},
        {"rank_pattern": {r".*\.o_proj": 2}, "use_rslora": True},
        {"alpha_pattern": {"model.layers.1.self_attn.v_proj": 100}},
    ],
)
def test_patterns_are_pefts(model, tmp_path, monkeypatch, open_session, settings):
    """Ranks and scales of single modules come out as PEFT applies them."""
    prompt = list(range(3, 20))
    tuned = make_adapter(
        model.theirs,
        tmp_path / "patterns",
        monkeypatch,
        targets=[n for n in list_targets(model.theirs) if "self_attn" in n],
        **settings,
    )
    digest = model.adapters.install(model.adapters.read(tmp_path / "patterns")).digest
    with torch.no_grad():
        want = tuned(torch.tensor([prompt])).logits[0]
    try:
        got = open_session(model, adapter=digest).run(prompt)
    finally:
        model.adapters.uninstall(digest)
    assert float((got - want).norm() / want.norm()) < 1e-5
