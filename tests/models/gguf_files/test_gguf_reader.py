"""Goal: a GGUF file is read as its writer meant it, or refused by name before it costs anything.

Method: files are built byte by byte (``gguf_bytes``), each with one thing wrong; what is refused
must say what is wrong and where. Nothing that a header claims may be allocated: address space is
watched while absurd headers are read. Whole files are compared with the ``gguf`` package's reader.
"""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import ARRAY, F16, F32, Q8_0, Gguf, Tensor, pack_text
from gguf_writing import add_tensor

from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    NotFoundError,
    ShapeError,
    TandemError,
    UnsupportedError,
)
from tandem.models.sources.gguf import GgufSource
from tandem.models.sources.gguf_files import GgufFiles, find_gguf
from tandem.models.sources.gguf_header import read_gguf_header

HUGE = 1 << 60


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + raw


def nested(depth: int) -> bytes:
    return struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth


GOOD = Gguf()
WRONG = {
    "empty": (b"", "empty"),
    "cut in the magic": (b"GG", "magic"),
    "another file": (GOOD.change(magic=b"PK\3\4"), "begins with"),
    "cut after the magic": (b"GGUF", "version"),
    "pairs beyond the file": (GOOD.change(num_pairs=5000), "metadata key"),
    "2^60 pairs": (GOOD.change(num_pairs=HUGE), "metadata pairs"),
    "2^60 tensors": (GOOD.change(num_tensors=HUGE), "tensors"),
    "tensors beyond the file": (GOOD.change(num_tensors=9000), "tensor '' has 0 dimensions"),
    "key of 2^64 - 1 bytes": (
        GOOD.change(metadata=[], num_pairs=1).build()[:24] + b"\xff" * 8,
        "metadata key",
    ),
    "key twice": (GOOD.change(metadata=[("a", 1), ("a", 2)]), "'a' is there twice"),
    "text of 2^60 bytes": (
        GOOD.change(metadata=[("a", struct.pack("<IQ", 8, HUGE))]),
        "'a' has 1152921504606846976 bytes",
    ),
    "array of 2^60 numbers": (GOOD.change(metadata=[("a", array(12, HUGE))]), "elements"),
    "array of 2^60 texts": (GOOD.change(metadata=[("a", array(8, HUGE))]), "elements"),
    "array beyond the file": (GOOD.change(metadata=[("a", array(12, 1 << 20))]), "wants"),
    "many arrays": (
        GOOD.change(metadata=[(f"k{i}", array(7, 1 << 20, bytes(1 << 20))) for i in range(5)]),
        "all arrays together",
    ),
    "arrays of arrays": (GOOD.change(metadata=[("a", nested(1000))]), "array of type 9"),
    "unknown type of value": (GOOD.change(metadata=[("a", struct.pack("<I", 77))]), "type 77"),
    "tensor twice": (GOOD.change(tensors=[Tensor("a"), Tensor("a")]), "'a' is there twice"),
    "no dimensions": (GOOD.change(tensors=[Tensor("a", ())]), "0 dimensions"),
    "2^32 dimensions": (
        GOOD.change(tensors=[]).build()[:8]
        + struct.pack("<QQ", 1, 0)
        + pack_text("a")
        + struct.pack("<I", 0xFFFFFFFF),
        "dimensions",
    ),
    "2^60 weights": (GOOD.change(tensors=[Tensor("a", (HUGE,))]), "'a' has the shape"),
    "product past 2^64": (GOOD.change(tensors=[Tensor("a", (1 << 33, 1 << 33))]), "has the shape"),
    "no weights": (GOOD.change(tensors=[Tensor("a", (0, 8), data=b"")]), "has the shape"),
    "rows that are no blocks": (GOOD.change(tensors=[Tensor("a", (8, 4), Q8_0)]), "blocks of 32"),
    "shape larger than the bytes": (GOOD.change(tensors=[Tensor("a", (64, 8))]), "misses 1920"),
    "type larger than the bytes": (
        GOOD.change(tensors=[Tensor("a", (4, 8), F32, bytes(64))]),
        "misses 64",
    ),
    "offset past the end": (GOOD.change(tensors=[Tensor("a", offset=1 << 40)]), "not where"),
    "offset 2^64 - 32": (GOOD.change(tensors=[Tensor("a", offset=(1 << 64) - 32)]), "not where"),
    "offsets overlap": (GOOD.change(tensors=[Tensor("a"), Tensor("b", offset=64)]), "overlaps"),
    "same offset": (GOOD.change(tensors=[Tensor("a"), Tensor("b", offset=0)]), "overlaps"),
    "not aligned": (GOOD.change(tensors=[Tensor("a", offset=8)]), "not where"),
    "alignment 0": (GOOD.change(metadata=[("general.alignment", 0)]), "alignment is 0"),
    "alignment 48": (GOOD.change(metadata=[("general.alignment", 48)]), "alignment is 48"),
    "alignment is a text": (GOOD.change(metadata=[("general.alignment", "x")]), "alignment is 'x'"),
    "bytes left over": (GOOD.change(tail=bytes(100)), "belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_name(name, tmp_path):
    """Each is corruption, told with the file's name and the place."""
    wrong, text = WRONG[name]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(wrong if isinstance(wrong, bytes) else wrong.build())
    tracemalloc.start()
    with pytest.raises(CorruptionError, match=rf"wrong\.gguf: .*{text}"):
        read_gguf_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * path.stat().st_size + (4 << 20), "a claim was allocated"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 4}, "version 4"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": [Tensor("a", kind=4)]}, "'a' has the unknown type 4"),
        ({"tensors": [Tensor("a", kind=99)]}, "'a' has the unknown type 99"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, text, tmp_path):
    path = GOOD.change(**changes).write(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedError, match=text):
        read_gguf_header(path)


def test_every_cut_is_refused(tmp_path):
    """A download that ended early, at any byte."""
    whole = GOOD.build()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptionError):
            read_gguf_header(path)
    path.write_bytes(whole)
    assert set(read_gguf_header(path).tensors) == {"a", "b"}


def test_metadata_and_tensors_are_those_of_the_package(tmp_path):
    """Every type of value, every way to align, tensors of several types and dimensions."""
    path = tmp_path / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values = {
        "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -30_000, "uint32": 1 << 31,
        "int32": -5, "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1,
        "bool": True, "string": "naïve \U0001f600",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.texts", ["a", "", "ü"])
    writer.add_array("x.numbers", [1.5, -2.5])
    rng = np.random.default_rng(0)
    tensors = {
        "v": rng.normal(size=5).astype(np.float32),
        "m": rng.normal(size=(3, 32)).astype(np.float32),
        "e": rng.normal(size=(2, 3, 64)).astype(np.float32),
    }
    for name, kind in (("v", "F32"), ("m", "Q8_0"), ("e", "F16")):
        add_tensor(writer, name, tensors[name], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(path)
    for kind, value in values.items():
        assert header.metadata[f"x.{kind}"] == value, kind
        assert type(header.metadata[f"x.{kind}"]) is type(value), kind
    assert header.metadata["x.texts"] == ["a", "", "ü"]
    assert header.metadata["x.numbers"].tolist() == [1.5, -2.5]
    for theirs in gguf.GGUFReader(path).tensors:
        ours = header.tensors[theirs.name]
        assert ours.kind == theirs.tensor_type.name
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.begin, ours.end) == (theirs.data_offset, theirs.data_offset + theirs.n_bytes)


def test_tensors_in_another_order_are_read(tmp_path):
    """Descriptions need not come in the order of the bytes."""
    one, two = Tensor("b", data=b"\1" * 128, offset=128), Tensor("a", data=b"\2" * 128, offset=0)
    header = read_gguf_header(Gguf(tensors=[one, two]).write(tmp_path / "x.gguf"))
    assert header.tensors["a"].begin + 128 == header.tensors["b"].begin


# Files and parts.


def write_parts(folder: Path, count: int, **wrong) -> list[Path]:
    """A split model of ``count`` parts, with a tensor each."""
    paths = []
    for i in range(count):
        metadata = [("general.architecture", "llama")] if i == 0 else []
        metadata += [("split.no", i), ("split.count", count), ("split.tensors.count", count)]
        metadata = [(k, wrong.get(k, v) if i == 1 else v) for k, v in metadata]
        name = (
            wrong.get("tensor", f"blk.{i}.attn_norm.weight")
            if i == 1
            else f"blk.{i}.attn_norm.weight"
        )
        path = folder / f"m-{i + 1:05}-of-{count:05}.gguf"
        paths.append(Gguf(metadata=metadata, tensors=[Tensor(name, (32,))]).write(path))
    return paths


def test_any_part_opens_all_parts(tmp_path):
    """A folder, the first part or another one: the same model."""
    paths = write_parts(tmp_path, 3)
    assert find_gguf(tmp_path) == paths[0]
    for path in paths:
        files = GgufFiles.open(path)
        assert sorted(files.tensors) == [f"blk.{i}.attn_norm.weight" for i in range(3)]
        assert files.architecture == "llama"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"split.no": 2}, ConfigError, "part 2 of 3"),
        ({"split.count": 2}, ConfigError, "part 1 of 2"),
        ({"tensor": "blk.0.attn_norm.weight"}, ConfigError, "is in .*00001.* and in .*00002"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(wrong, error, text, tmp_path):
    """Shuffled or renamed parts, and one of another model."""
    paths = write_parts(tmp_path, 3, **wrong)
    with pytest.raises(error, match=text):
        GgufFiles.open(paths[0])


def test_a_missing_part_is_named(tmp_path):
    paths = write_parts(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(NotFoundError, match="m-00002-of-00003"):
        GgufFiles.open(paths[0])


@pytest.mark.parametrize(
    "name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"]
)
def test_names_of_impossible_parts_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="is no part of"):
        GgufFiles.open(GOOD.write(tmp_path / name))


def test_names_cannot_leave_the_folder(tmp_path):
    """No text of a file is ever a path: such names are names of tensors that nobody asks for."""
    evil = Tensor("../../etc/passwd", (32,))
    metadata = [("general.architecture", "llama"), ("split.file", "/etc/passwd")]
    path = Gguf(tensors=[evil], metadata=metadata).write(tmp_path / "x.gguf")
    files = GgufFiles.open(path)
    assert set(files.paths.values()) == {path}


def test_several_models_in_a_folder_are_named(tmp_path):
    for name in ("a-Q4_K.gguf", "a-Q8_0.gguf"):
        GOOD.write(tmp_path / name)
    with pytest.raises(ConfigError, match=r"2 models.*a-Q4_K\.gguf"):
        find_gguf(tmp_path)


def test_a_changed_file_is_read_again(tmp_path):
    """Headers are kept by the state of the file."""
    path = GOOD.write(tmp_path / "x.gguf")
    assert "a" in GgufFiles.open(path).tensors
    Gguf(tensors=[Tensor("new", (64,), data=bytes(256))]).write(path)
    assert set(GgufFiles.open(path).tensors) == {"new"}


# Weights.


def test_a_type_that_is_not_decoded_is_refused_at_once(tmp_path):
    """Not after an hour of loading: the text names tensor and type."""
    tensor = Tensor("token_embd.weight", (2, 256), 19, bytes(2 * 50))
    with pytest.raises(UnsupportedError, match=r"'token_embd.weight' .* IQ1_S, .* Q4_K"):
        GgufSource(Gguf(tensors=[tensor]).write(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("shape", "stored"), [((8, 4), (4, 8)), ((4, 8, 1), (4, 8)), ((32,), (4, 8)), ((4, 8), (32,))]
)
def test_a_tensor_of_another_shape_is_refused(shape, stored, tmp_path):
    """And the error leaves the source as it is: a BufferError hid it, as its frames hold views."""
    tensor = Tensor("token_embd.weight", stored)
    source = GgufSource(Gguf(tensors=[tensor]).write(tmp_path / "x.gguf"))
    with pytest.raises(ShapeError, match="embed_tokens"), source:
        source.read_into("model.embed_tokens.weight", torch.empty(shape))


def test_gate_and_up_of_different_sizes_are_refused(tmp_path):
    """Together they have the rows that are wanted: one's would be taken for the other's."""
    block, size = 32, 34
    tensors = [
        Tensor("blk.0.attn_norm.weight", (32,)),
        Tensor("blk.0.ffn_gate_exps.weight", (2, 3, block), Q8_0, bytes(2 * 3 * size)),
        Tensor("blk.0.ffn_up_exps.weight", (2, 5, block), Q8_0, bytes(2 * 5 * size)),
    ]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with GgufSource(Gguf(tensors=tensors).write(tmp_path / "x.gguf")) as source:
        with pytest.raises(ShapeError, match="alike"):
            source.read_packed(name, 0)
        with pytest.raises(ShapeError, match="alike"):
            source.read_into(name, torch.empty(2, 8, block))


def test_unused_tensors_are_named_and_known_extras_are_not(tmp_path):
    tensors = [
        Tensor("token_embd.weight"),
        Tensor("rope_freqs.weight", (32,)),
        Tensor("blk.0.x.weight", (32,)),
    ]
    with GgufSource(Gguf(tensors=tensors).write(tmp_path / "x.gguf")) as source:
        source.read_into("model.embed_tokens.weight", torch.empty(4, 8))
        with pytest.raises(ConfigError, match=r"blk\.0\.x\.weight"):
            source.check_all_used({})
    with GgufSource(Gguf(tensors=tensors[:2]).write(tmp_path / "y.gguf")) as source:
        source.read_into("model.embed_tokens.weight", torch.empty(4, 8))
        assert list(source.check_all_used({})) == ["rope_freqs.weight"]


def test_values_do_not_depend_on_the_alignment_of_the_file(tmp_path):
    """F16 at an odd multiple of 8 bytes, as a file aligned to 8 may have it."""
    values = np.arange(12, dtype=np.float16)
    tensors = [
        Tensor("output_norm.weight", (2,), F32, bytes(8)),
        Tensor("token_embd.weight", (3, 4), F16, values.tobytes()),
    ]
    metadata = [("general.alignment", 8), ("general.architecture", "llama")]
    file = Gguf(metadata=metadata, tensors=tensors, alignment=8)
    out = torch.empty(3, 4, dtype=torch.bfloat16)
    with GgufSource(file.write(tmp_path / "x.gguf")) as source:
        source.read_into("model.embed_tokens.weight", out)
    assert torch.equal(out.float(), torch.arange(12.0).view(3, 4))


def test_errors_are_all_of_ours(tmp_path):
    """A missing file, and a folder in its place."""
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(TandemError):
            GgufFiles.open(path)
