"""Goal: no bytes make the reader do anything but read or refuse.

Method: true files are damaged at random (bits flipped, ranges cut, copied, zeroed, numbers replaced
by extremes, descriptions shuffled) and read whole: header, configuration, tokenizer, every weight.
Whatever happens must be one of our errors, and what is read must lie within the file. The process
may take little more memory than it has: a number that makes the reader allocate is a MemoryError
here, and a failure. The long form runs for as many seconds as ``TANDEM_FUZZ_S`` says, ten minutes
without it.
"""

import os
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_bytes import ARRAY, Gguf, Tensor, pack_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem._native import ThreadPool
from tandem.core.errors import TandemError
from tandem.kernels.cpu.linear import PackedLinear
from tandem.models.gguf.config import ARCHITECTURES, read_gguf_config
from tandem.models.gguf.tokenizer import load_gguf_tokenizer
from tandem.models.sources.gguf import GgufSource

EXTREMES = (0, 1, 7, 8, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)
MAX_PEAK_BYTES = 1 << 20
"""Of a weight of a damaged file of a few KiB."""
MAX_GROWTH_BYTES = 512 << 20
"""Of this process: far above what reading such a file takes, and what hypothesis keeps."""


def texts(*values: str) -> bytes:
    return struct.pack("<IIQ", ARRAY, 8, len(values)) + b"".join(map(pack_text, values))


def numbers(kind: int, code: str, *values: float) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + struct.pack(
        f"<{len(values)}{code}", *values
    )


TOKENS = [*(chr(97 + i) for i in range(26)), "ab", "<|im_end|>"]
METADATA = [
    ("general.architecture", "llama"),
    ("llama.block_count", 1),
    ("llama.context_length", 64),
    ("llama.embedding_length", 32),
    ("llama.feed_forward_length", 32),
    ("llama.attention.head_count", 2),
    ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, 1e-5)),
    ("tokenizer.ggml.model", "gpt2"),
    ("tokenizer.ggml.tokens", texts(*TOKENS)),
    ("tokenizer.ggml.token_type", numbers(5, "i", *([1] * 27 + [3]))),
    ("tokenizer.ggml.merges", texts("a b")),
    ("tokenizer.ggml.eos_token_id", 27),
    ("tokenizer.chat_template", "{{ messages }}"),
]


def make_tensors() -> list[Tensor]:
    """Of a whole small model, in several types; no scale or value is NaN or infinite."""
    rng = np.random.default_rng(0)

    def tensor(name, shape, kind, size):
        return Tensor(name, shape, kind, rng.integers(0, 0x78, size, dtype=np.uint8).tobytes())

    layer = "blk.0."
    return [
        tensor("token_embd.weight", (28, 32), 8, 28 * 34),
        tensor("output_norm.weight", (32,), 0, 128),
        tensor(f"{layer}attn_norm.weight", (32,), 0, 128),
        tensor(f"{layer}attn_q.weight", (32, 32), 2, 32 * 18),
        tensor(f"{layer}attn_k.weight", (32, 32), 20, 32 * 18),
        tensor(f"{layer}attn_v.weight", (32, 32), 1, 2048),
        tensor(f"{layer}ffn_gate_exps.weight", (2, 16, 32), 39, 32 * 17),
        tensor(f"{layer}ffn_up_exps.weight", (2, 16, 32), 39, 32 * 17),
        tensor("rope_freqs.weight", (8,), 0, 32),
    ]


MODEL = Gguf(metadata=METADATA, tensors=make_tensors()).build()
POOL = ThreadPool(1)
HEADER_BYTES = MODEL.index(b"rope_freqs.weight") + 64


@st.composite
def damages(draw) -> bytes:
    """The model with one to four things wrong; mostly in its header."""
    data = bytearray(MODEL)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(HEADER_BYTES, max(0, len(data) - 9))))
        match draw(st.sampled_from(("flip", "number", "cut", "zero", "copy", "drop"))):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                size = draw(st.sampled_from((1, 4, 8)))
                value = draw(st.sampled_from(EXTREMES)) & ((1 << 8 * size) - 1)
                data[at : at + size] = value.to_bytes(size, "little")
            case "cut":
                del data[draw(st.integers(0, len(data) - 1)) :]
            case "zero":
                data[at : at + 8] = bytes(8)
            case "copy":
                source = draw(st.integers(0, HEADER_BYTES))
                data[at : at + 32] = data[source : source + 32]
            case "drop":
                del data[at : at + draw(st.sampled_from((1, 4, 8, 16)))]
        if len(data) < 16:
            break
    return bytes(data)


def read_all(path: Path) -> bool:
    """Read everything that a file says; True if nothing of it was refused."""
    is_whole = True
    for read in (read_gguf_config, load_gguf_tokenizer):
        try:
            read(path)
        except TandemError:
            is_whole = False
    try:
        with GgufSource(path) as source:
            for name in source.list_sizes():
                is_whole &= _read_weight(source, name)
                is_whole &= _pack_weight(source, name)
            source.check_all_used({})
    except TandemError:
        is_whole = False
    return is_whole


def find_shape(source: GgufSource, name: str) -> tuple[int, ...]:
    """The shape of a weight: of several tensors, along their outputs."""
    shapes = [source.files.tensors[tensor].shape for tensor in source._recipes[name].tensors]
    first = shapes[0]
    axis = max(0, len(first) - 2)
    rows = sum(shape[min(axis, len(shape) - 1)] for shape in shapes)
    return (*first[:axis], rows, *first[axis + 1 :])


def _read_weight(source: GgufSource, name: str) -> bool:
    shape = find_shape(source, name)
    assert int(np.prod(shape)) <= MAX_PEAK_BYTES, "more weights than the file has bits"
    try:
        with np.errstate(all="ignore"):
            source.read_into(name, torch.empty(shape))
            if source.find_format(name) is not None:
                source.read_packed(name, 0 if len(shape) == 3 else None)
    except TandemError:
        return False
    return True


def _pack_weight(source: GgufSource, name: str) -> bool:
    """Lay its blocks out natively; random bytes have scales that are refused."""
    if source.find_format(name) is None:
        return True
    try:
        codes = source.read_packed(name, 0 if len(find_shape(source, name)) == 3 else None)
        PackedLinear.from_codes(codes, pool=POOL)
    except TandemError:
        return False
    return True


def test_the_undamaged_model_is_read_whole(tmp_path):
    """Else the rest would test nothing. (Its RoPE factors are noise, and refused.)"""
    path = tmp_path / "model.gguf"
    path.write_bytes(MODEL.replace(b"rope_freqs.weight", b"rope_fregs.weight"))
    read_gguf_config(path)
    load_gguf_tokenizer(path)
    with GgufSource(path) as source:
        assert all(_read_weight(source, name) for name in source.list_sizes())


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Let an allocation that no such file justifies fail, before the machine is out of memory."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + MAX_GROWTH_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def change(metadata: dict[str, object]) -> bytes:
    """The model with other or more metadata."""
    pairs = dict(METADATA) | metadata
    return Gguf(metadata=list(pairs.items()), tensors=make_tensors()).build()


@pytest.mark.parametrize("tensors_less", [0, 1])
@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.key_length",
        "feed_forward_length",
        "expert_count",
    ],
)
@pytest.mark.parametrize("size", [1 << 27, (1 << 32) - 1])
def test_sizes_that_the_file_has_no_weights_for_are_refused(key, size, tensors_less, path):
    """With factors of RoPE, which are compared to computed ones, and without them."""
    pairs = dict(METADATA) | {f"llama.{key}": size}
    tensors = make_tensors()[: -tensors_less or None]
    Gguf(metadata=list(pairs.items()), tensors=tensors).write(path)
    with pytest.raises(TandemError) as caught:
        read_gguf_config(path)
    assert not tensors_less or key in str(caught.value)


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_numbers_of_parts_that_are_arrays_are_refused(key, path):
    path.write_bytes(change({key: numbers(4, "I", 1, 1)}))
    with pytest.raises(TandemError):
        read_gguf_config(path)


KEYS = (
    "block_count",
    "nextn_predict_layers",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.kv_lora_rank",
    "attention.clamp_kqv",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_gating_func",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_log_multiplier",
)
VALUES = st.one_of(
    st.sampled_from(EXTREMES).map(lambda n: struct.pack("<IQ", 10, n)),
    st.sampled_from((-1, 0, 1, -(1 << 31))).map(lambda n: struct.pack("<Ii", 5, n)),
    st.floats().map(lambda x: struct.pack("<Id", 12, x)),
    st.sampled_from(("", "yarn", "linear", "none", "longrope")),
    st.lists(st.sampled_from((0, 1, 32)), max_size=2).map(lambda n: numbers(4, "I", *n)),
    st.just(texts("a", "b")),
)


@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    values=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
)
@settings(max_examples=150)
def test_any_metadata_is_understood_or_refused(path, architecture, values):
    """Of all architectures, each of which has arithmetic of its own."""
    known = {key.removeprefix("llama."): v for key, v in METADATA if key.startswith("llama.")}
    mine = {f"{architecture}.{key}": value for key, value in (known | values).items()}
    path.write_bytes(change({"general.architecture": architecture} | mine))
    try:
        config, _ = read_gguf_config(path)
    except TandemError:
        return
    assert config["num_hidden_layers"] <= len(make_tensors())
    assert config["head_dim"] >= 1


@given(data=damages())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_read_or_refused(path, data):
    """Never another exception, and never more than the file can hold."""
    path.write_bytes(data)
    read_all(path)


@given(data=st.binary(max_size=200))
@settings(max_examples=50)
def test_any_bytes_are_refused(path, data):
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    assert not read_all(path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_damage_is_read_or_refused_for_long(path):
    """The same for ten minutes, seeds from the clock of the run: each failure prints its bytes."""
    end_s = time.monotonic() + float(os.environ.get("TANDEM_FUZZ_S", "600"))
    count = 0

    @given(data=damages())
    @settings(max_examples=2000, database=None)
    def run(data):
        nonlocal count
        count += 1
        path.write_bytes(data)
        read_all(path)

    while time.monotonic() < end_s:
        run()
    assert count
