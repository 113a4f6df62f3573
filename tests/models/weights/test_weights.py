"""Goal: every layout of a checkpoint loads; every damage is an error that names tensor and file."""

import json
import shutil
import struct

import pytest
import torch
from loading import load_checkpoint
from safetensors.torch import load_file, save_file

from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    NotFoundError,
    ShapeError,
    UnsupportedError,
)
from tandem.finetune.training.model import load_frozen
from tandem.models.export import export_checkpoint

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def logits_of(folder, open_session, **kwargs):
    return open_session(load_checkpoint(folder, dtype="float32", **kwargs)).run(IDS)


def split_experts(tensors):
    """Rewrite fused experts as the hub's checkpoints have them."""
    for name in [name for name in tensors if name.endswith(".gate_up_proj")]:
        stem = name.removesuffix(".gate_up_proj")
        gate_up, down = tensors.pop(name), tensors.pop(f"{stem}.down_proj")
        for i, (both, out) in enumerate(zip(gate_up, down, strict=True)):
            gate, up = both.chunk(2)
            tensors[f"{stem}.{i}.gate_proj.weight"] = gate.clone()
            tensors[f"{stem}.{i}.up_proj.weight"] = up.clone()
            tensors[f"{stem}.{i}.down_proj.weight"] = out.clone()


def fuse_experts(tensors):
    """The opposite: as transformers 5 holds them in memory."""
    stems = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for stem in stems:
        parts = {"gate_proj": [], "up_proj": [], "down_proj": []}
        while f"{stem}.experts.{len(parts['down_proj'])}.down_proj.weight" in tensors:
            i = len(parts["down_proj"])
            for key, found in parts.items():
                found.append(tensors.pop(f"{stem}.experts.{i}.{key}.weight"))
        if parts["down_proj"]:
            gate, up, down = (torch.stack(found) for found in parts.values())
            tensors[f"{stem}.experts.gate_up_proj"] = torch.cat((gate, up), 1).contiguous()
            tensors[f"{stem}.experts.down_proj"] = down


def test_both_expert_layouts_give_equal_logits(checkpoint, edit_weights, open_session):
    folder = checkpoint("qwen3_moe")
    edit_weights(folder, split_experts)
    apart = logits_of(folder, open_session)
    assert any(".experts.5.up_proj" in name for name in load_file(folder / "model.safetensors"))
    edit_weights(folder, fuse_experts)
    assert any(name.endswith("gate_up_proj") for name in load_file(folder / "model.safetensors"))
    assert torch.equal(logits_of(folder, open_session), apart)


def test_sharded_equals_single(checkpoint, open_session, edit_weights):
    folder = checkpoint("qwen3_moe", shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert (folder / "model.safetensors.index.json").exists()
    sharded = logits_of(folder, open_session)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, open_session), sharded)


def test_links_to_files_are_followed(checkpoint, tmp_path, open_session):
    """The hub's cache is made of links."""
    folder = checkpoint("llama")
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert torch.equal(logits_of(linked, open_session), logits_of(folder, open_session))


def test_float16_and_mixed_dtypes_convert(checkpoint, edit_weights, open_session):
    folder = checkpoint("llama")

    def change(tensors):
        for i, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to([torch.float16, torch.bfloat16, torch.float64][i % 3])

    edit_weights(folder, change)
    model = load_checkpoint(folder, dtype="float32", linear_format="none")
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.skeleton.lm_head.weight, stored.float())


def test_progress_counts_every_byte(checkpoint):
    folder = checkpoint("qwen3_moe")
    calls = []
    load_checkpoint(folder, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    stored = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    assert calls[-1][:2] == (total, total)
    assert {call[2] for call in calls} == set(stored)


def test_harmless_extras_are_listed(checkpoint, edit_weights):
    folder = checkpoint("llama", tie_word_embeddings=True)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_weights(folder, change)
    ignored = load_checkpoint(folder).ignored_weights
    assert set(ignored) == {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    assert "ties" in ignored["lm_head.weight"]


def remove(name):
    return lambda tensors: tensors.pop(name)


def replace(name, make):
    return lambda tensors: tensors.__setitem__(name, make(tensors.get(name)))


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "missing": (remove(Q), NotFoundError, [Q]),
    "missing head": (remove("lm_head.weight"), NotFoundError, ["lm_head.weight"]),
    "extra": (replace("model.extra", lambda _: torch.ones(3)), ConfigError, ["model.extra"]),
    "extra bias": (
        replace("model.layers.0.self_attn.q_proj.bias", lambda _: torch.ones(64)),
        ConfigError,
        ["model.layers.0.self_attn.q_proj.bias"],
    ),
    "extra layer": (
        lambda t: t.update({k.replace("layers.0", "layers.7"): v.clone() for k, v in t.items()}),
        ConfigError,
        ["model.layers.7."],
    ),
    "mis-shaped": (replace(Q, lambda t: t[:-1].clone()), ShapeError, [Q, "[63, 48]", "[64, 48]"]),
    "transposed": (replace(Q, lambda t: t.t().contiguous()), ShapeError, [Q, "[48, 64]"]),
    "integers": (replace(Q, lambda t: t.to(torch.int8)), ShapeError, [Q, "I8"]),
    "float8": (replace(Q, lambda t: t.to(torch.float8_e4m3fn)), ShapeError, [Q, "F8_E4M3"]),
    "empty": (lambda tensors: tensors.clear(), NotFoundError, ["model.embed_tokens.weight"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_tensors_are_named(name, checkpoint, edit_weights):
    change, error, texts = DAMAGES[name]
    folder = checkpoint("llama")
    edit_weights(folder, change)
    with pytest.raises(error) as caught:
        load_checkpoint(folder)
    for text in texts:
        assert text in str(caught.value)


def test_missing_expert_is_named(checkpoint, edit_weights):
    folder = checkpoint("qwen3_moe")
    edit_weights(folder, fuse_experts)
    edit_weights(folder, split_experts)
    gone = "model.layers.2.mlp.experts.4.up_proj.weight"
    edit_weights(folder, remove(gone))
    with pytest.raises(NotFoundError, match=gone):
        load_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -4000])
def test_cut_file_is_noticed(keep, checkpoint):
    folder = checkpoint("llama")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CorruptionError, match=r"model\.safetensors") as caught:
        load_checkpoint(folder)
    if keep < 0:
        names = set(json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]))
        assert any(repr(name) in str(caught.value) for name in names)


def rewrite_header(path, change):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    if not isinstance(text, bytes):
        text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADERS = {
    "huge length": None,
    "not json": lambda h: b"{]",
    "not an object": lambda h: b"[]",
    "deep": lambda h: b"[" * 100_000,
    "tensor not an object": lambda h: h.__setitem__(Q, 3),
    "negative offset": lambda h: h[Q].__setitem__("data_offsets", [-4, 0]),
    "offsets missing": lambda h: h[Q].pop("data_offsets"),
    "shape not a list": lambda h: h[Q].__setitem__("shape", "64"),
    "shape of bools": lambda h: h[Q].__setitem__("shape", [True, 48]),
    "absurd shape": lambda h: h[Q].__setitem__("shape", [1 << 61, 1 << 61]),
    "many dimensions": lambda h: h[Q].__setitem__("shape", [1] * 1000),
    "unknown dtype": lambda h: h[Q].__setitem__("dtype", "F99"),
    "overlap": lambda h: h[Q].__setitem__("data_offsets", [0, 64 * 48 * 4]),
    "trailing bytes": lambda h: h.pop(max(h, key=lambda k: h[k].get("data_offsets", [0])[0])),
}


@pytest.mark.parametrize("name", HEADERS)
def test_absurd_headers_are_refused(name, checkpoint):
    folder = checkpoint("llama")
    path = folder / "model.safetensors"
    if HEADERS[name] is None:
        path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    else:
        rewrite_header(path, HEADERS[name])
    with pytest.raises(CorruptionError, match=r"model\.safetensors"):
        load_checkpoint(folder)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_index_stays_in_its_folder(target, checkpoint):
    folder = checkpoint("llama", shard_size="40KB")
    shutil.copy(next(folder.glob("*.safetensors")), folder.parent / "model.safetensors")
    edit_index(folder, lambda weight_map: weight_map.__setitem__(Q, target))
    with pytest.raises(ConfigError, match="outside of its folder"):
        load_checkpoint(folder)


def test_index_and_files_must_agree(checkpoint):
    folder = checkpoint("llama", shard_size="40KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in shards if shard != index[Q])
    edit_index(folder, lambda weight_map: weight_map.__setitem__(Q, other))
    with pytest.raises(NotFoundError, match=Q):
        load_checkpoint(folder)
    edit_index(folder, lambda weight_map: weight_map.__setitem__(Q, index[Q]))
    (folder / other).unlink()
    with pytest.raises(NotFoundError, match=other):
        load_checkpoint(folder)


def test_shards_without_index_are_refused(checkpoint):
    folder = checkpoint("llama", shard_size="40KB")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(NotFoundError, match=r"no model\.safetensors\.index\.json"):
        load_checkpoint(folder)


def test_pickles_are_not_opened(checkpoint):
    folder = checkpoint("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="pickled weights only"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(NotFoundError, match=r"no \*\.safetensors"):
        load_checkpoint(folder)


LOADERS = {
    "tensors": lambda folder: load_checkpoint(folder, expert_format="none", linear_format="none"),
    "packed": lambda folder: load_checkpoint(folder, expert_format="bf16", linear_format="bf16"),
    "fine-tuning": lambda folder: load_frozen(str(folder), is_bf16=True),
    "export": lambda folder: export_checkpoint(folder, "bf16", folder.parent / "made"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.norm.weight", float("nan")),
        ("model.layers.1.mlp.experts.3.up_proj.weight", float("-inf")),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    name, loader, value, checkpoint, edit_weights
):
    """All answers would be NaN; whoever loads them tells which tensor it is."""
    folder = checkpoint("qwen3_moe")
    edit_weights(folder, lambda tensors: tensors[name].view(-1).__setitem__(7, value))
    with pytest.raises(CorruptionError, match="holds NaN or infinity") as caught:
        LOADERS[loader](folder)
    assert name.removesuffix(".weight") in str(caught.value) or "experts" in name
