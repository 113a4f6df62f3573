"""Goal: the promises of PackedExperts beside its arithmetic.

Method: results compared bitwise between batches, chunkings, thread counts and instruction sets; the
packed bytes read back by naive code; hard inputs; every refusal with its class and its words.
"""

import threading

import numpy as np
import pytest
import torch

from each import each
from tandem._native import ExpertBank, ThreadPool, kernel_isas
from tandem.core.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    ShapeError,
    UnsupportedError,
)
from tandem.core.model.layers import Activation
from tandem.kernels.cpu.experts import PackedExperts, count_bytes
from tandem.kernels.weights.formats import WEIGHT_FORMATS, QuantizedMatrix, WeightFormat, quantize

ISAS = [*kernel_isas(), "amx_emulated"]
"""The last has AMX's arithmetic in plain code; it is never chosen unless it is named."""
SLOW_ISAS = ("plain", "amx_emulated")
FORMATS = [
    "f32",
    "bf16",
    "fp8",
    "fp8row",
    "mxfp4",
    "int8row",
    "int8g128",
    "int8g32",
    "int8g128min",
    "int4g32",
    "int4g32sym",
]
CODED = [name for name in FORMATS if not WEIGHT_FORMATS[name].holds_values]
INTEGER = [name for name in FORMATS if WEIGHT_FORMATS[name].is_integer]
NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 256, 128, 3
PANEL = 64
"""Columns of a packed panel."""


def make_pool(threads: int) -> ThreadPool:
    return ThreadPool(threads, oversubscribe=True)


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return make_pool(2)


def make_weights(
    num_experts: int = NUM_EXPERTS, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(num_experts, hidden, inner, generator=generator) / inner**0.5
    return gate_up, down


def make_batch(tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    scores = torch.rand(tokens, NUM_EXPERTS, generator=generator)
    return x, scores.topk(TOP_K).indices, torch.rand(tokens, TOP_K, generator=generator)


def make_experts(name: str, pool: ThreadPool, isa: str | None = None) -> PackedExperts:
    return PackedExperts.pack(WEIGHT_FORMATS[name], *make_weights(), pool=pool, isa=isa)


# Invariance ----------------------------------------------------------------------------------


@each("name", FORMATS)
def test_a_token_does_not_depend_on_its_batch(name: str, pool: ThreadPool):
    for isa in ISAS:
        experts = make_experts(name, pool, isa)
        x, ids, weights = make_batch(300 if isa not in SLOW_ISAS else 40)
        whole = experts.forward(x, ids, weights)
        for size in (1, 2, 7, 39):
            for begin in (1, len(x) - size):
                part = slice(begin, begin + size)
                got = experts.forward(x[part], ids[part], weights[part])
                assert torch.equal(got, whole[part]), f"{isa}: tokens {begin} to {begin + size}"
        chunks = [slice(i, i + 64) for i in range(0, len(x), 64)]
        pieces = [experts.forward(x[part], ids[part], weights[part]) for part in chunks]
        assert torch.equal(torch.cat(pieces), whole), isa


@each("name", FORMATS)
def test_all_tokens_on_one_expert_equal_each_alone(name: str, pool: ThreadPool):
    experts = make_experts(name, pool)
    x, _, weights = make_batch(401)
    ids = torch.full((len(x), 1), 4)
    whole = experts.forward(x, ids, weights[:, :1].contiguous())
    for token in (0, 191, 192, 200, 400):
        part = slice(token, token + 1)
        alone = experts.forward(x[part], ids[part], weights[part, :1].contiguous())
        assert torch.equal(alone, whole[part])


@each("name", FORMATS)
def test_threads_do_not_matter(name: str):
    results = []
    for threads in (1, 2, 5):
        experts = make_experts(name, make_pool(threads))
        results.append([experts.forward(*make_batch(tokens)) for tokens in (1, 9, 120)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@each("name", ["f32", *INTEGER])
def test_integer_formats_and_f32_agree_bitwise_across_isas(name: str, pool: ThreadPool):
    x, ids, weights = make_batch(21)
    x[3] *= 50  # Far into silu's flat and linear parts.
    results = [make_experts(name, pool, isa).forward(x, ids, weights) for isa in ISAS]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_concurrent_callers_get_their_own_results(pool: ThreadPool):
    experts = make_experts("int8g128", pool)
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((1, 30, 2, 77))]
    want = [experts.forward(*batch) for batch in batches]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            if not torch.equal(experts.forward(*batches[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


# Routing and hard inputs -----------------------------------------------------------------------


def test_empty_batch(pool: ThreadPool):
    experts = make_experts("int8g128", pool)
    out = experts.forward(*make_batch(0))
    assert out.shape == (0, HIDDEN)
    x, _, _ = make_batch(2)
    none = experts.forward(x, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))
    assert torch.equal(none, torch.zeros(2, HIDDEN))


@each("name", FORMATS)
def test_experts_elsewhere_add_nothing(name: str, pool: ThreadPool):
    experts = make_experts(name, pool)
    x, ids, weights = make_batch(9)
    partial = ids.clone()
    partial[:, 1] = -1
    partial[4] = -1
    kept = ids[:, [0, 2]].contiguous()
    want = experts.forward(x, kept, weights[:, [0, 2]].contiguous())
    want[4] = 0
    assert torch.equal(experts.forward(x, partial, weights), want)


def test_ids_of_both_widths_and_in_any_order(pool: ThreadPool):
    experts = make_experts("int4g32", pool)
    x, ids, weights = make_batch(9)
    want = experts.forward(x, ids, weights)
    assert torch.equal(experts.forward(x, ids.int(), weights), want)
    # Experts are summed by id, so the order of the slots is nothing.
    flipped = experts.forward(x, ids.flip(1).contiguous(), weights.flip(1).contiguous())
    assert torch.equal(flipped, want)


def test_an_expert_chosen_twice_counts_twice(pool: ThreadPool):
    experts = make_experts("int8g32", pool)
    x, ids, _ = make_batch(4)
    twice = ids[:, [0, 0]].contiguous()
    got = experts.forward(x, twice, torch.tensor([[0.25, 0.5]] * 4))
    want = experts.forward(x, twice[:, :1].contiguous(), torch.ones(4, 1))
    torch.testing.assert_close(got, 0.75 * want, rtol=1e-6, atol=1e-6)


@each("name", FORMATS)
def test_bad_values_stay_in_their_token(name: str, pool: ThreadPool):
    x, ids, weights = make_batch(11)
    others = [t for t in range(11) if t != 5]
    for isa in ISAS:
        experts = make_experts(name, pool, isa)
        clean = experts.forward(x, ids, weights)
        for bad in (float("nan"), float("inf"), float("-inf")):
            spoilt = x.clone()
            spoilt[5, 17] = bad
            got = experts.forward(spoilt, ids, weights)
            assert not got[5].isfinite().any(), (isa, bad)
            assert torch.equal(got[others], clean[others]), (isa, bad)


@each("name", FORMATS)
def test_zero_input_gives_zero(name: str, pool: ThreadPool):
    experts = make_experts(name, pool)
    _, ids, weights = make_batch(3)
    out = experts.forward(torch.zeros(3, HIDDEN), ids, weights)
    assert torch.equal(out, torch.zeros(3, HIDDEN))


# Packing -----------------------------------------------------------------------------------


def find_nibble(k: int) -> tuple[int, int]:
    """Where mxfp4 keeps one of eight inputs of a column: byte and shift."""
    nibble = k // 2 + 4 * (k % 2)
    return nibble // 2, 4 * (nibble % 2)


def read_code(codes: np.ndarray, weight_format: WeightFormat, k: int, column: int) -> int:
    """Return the code of one weight of a group."""
    if weight_format.is_float and weight_format.bits == 8:
        at = k // 4 * PANEL * 4 + column // 4 * 16 + column % 4 * 2
        return codes[at + k % 4 // 2 * 8 + k % 2]
    if weight_format.is_float:
        byte, shift = find_nibble(k % 8)
        return codes[k // 8 * PANEL * 4 + column * 4 + byte] >> shift & 15
    if weight_format.bits == 8:
        return codes[k // 4 * PANEL * 4 + column * 4 + k % 4]
    byte = codes[k // 8 * PANEL * 4 + column * 4 + k % 4]
    return byte & 15 if k % 8 < 4 else byte >> 4


def read_scales(header: np.ndarray, weight_format: WeightFormat) -> np.ndarray:
    """Return the scale of each column."""
    if not weight_format.is_float:
        return header.view(np.float16)
    if weight_format.bits == 8 and not weight_format.has_blocks:
        return header.view(np.float32)
    if weight_format.bits == 8:
        assert len(set(header.view(np.float32))) == 1
        return np.full(PANEL, header.view(np.float32)[0])
    return np.exp2(header.astype(np.float64) - 127)


def read_panel(data: np.ndarray, size: int, weight_format: WeightFormat) -> QuantizedMatrix:
    """Undo the packing of one panel over `size` inputs, an element at a time."""
    group_size = weight_format.group_size or size
    codes = np.zeros((PANEL, size), np.uint8)
    scales = np.zeros((PANEL, size // group_size), np.float64)
    minima = np.zeros((PANEL, size // group_size), np.float16)
    header = PANEL if weight_format.is_float else PANEL * 2
    if weight_format.name == "fp8row":
        header = PANEL * 4
    group_bytes = len(data) // (size // group_size)
    for group in range(size // group_size):
        part = data[group * group_bytes : (group + 1) * group_bytes]
        scales[:, group] = read_scales(part[:header], weight_format)
        part = part[header:]
        if weight_format.has_minimum:
            minima[:, group] = part[:header].view(np.float16)
            part = part[header:]
        for k in range(group_size):
            for column in range(PANEL):
                code = read_code(part, weight_format, k, column)
                codes[column, group * group_size + k] = code
    return QuantizedMatrix(weight_format, codes, scales.astype(np.float32), minima)


@each("name", CODED)
def test_packed_bytes_hold_the_naive_codes(name: str, pool: ThreadPool):
    weight_format = WEIGHT_FORMATS[name]
    gate_up, down = make_weights(2)
    gate_up[1, :, 3] *= 1e-6  # Groups of very unequal weights, and groups of zeros.
    down[1, :, :32] = 0
    experts = PackedExperts.pack(weight_format, gate_up, down, pool=pool)
    # One scale a row adds nothing to a large matrix, but it does here.
    row_bytes = {"int8row": PANEL * 2, "fp8row": PANEL * 4}.get(name, 0)
    hidden_bytes = PANEL * HIDDEN * weight_format.bits_per_weight / 8 + row_bytes
    inner_bytes = PANEL * INNER * weight_format.bits_per_weight / 8 + row_bytes
    data = experts.packed[1]
    assert len(data) == 2 * INNER / PANEL * hidden_bytes + HIDDEN / PANEL * inner_bytes
    panels = np.split(data[: int(2 * INNER / PANEL * hidden_bytes)], 2 * INNER // PANEL)
    gate = quantize(gate_up[1, :INNER].numpy(), weight_format)
    up = quantize(gate_up[1, INNER:].numpy(), weight_format)
    whole_down = quantize(down[1].numpy(), weight_format)
    down_panels = np.split(data[int(2 * INNER / PANEL * hidden_bytes) :], HIDDEN // PANEL)
    for want, row, panel, size in [
        (gate, 64, panels[2], HIDDEN),
        (up, 0, panels[1], HIDDEN),
        (whole_down, 128, down_panels[2], INNER),
    ]:
        got = read_panel(panel, size, weight_format)
        rows = slice(row, row + PANEL)
        np.testing.assert_array_equal(got.codes, want.codes[rows])
        scales = want.scales.repeat(128, 0) if name == "fp8" else want.scales
        np.testing.assert_array_equal(got.scales, scales[rows])
        if want.minima is not None:
            np.testing.assert_array_equal(got.minima, want.minima[rows])


def test_weights_in_bf16_pack_as_their_float32_values(pool: ThreadPool):
    gate_up, down = (t.bfloat16() for t in make_weights())
    for name in FORMATS:
        narrow = PackedExperts.pack(WEIGHT_FORMATS[name], gate_up, down, pool=pool)
        wide = PackedExperts.pack(WEIGHT_FORMATS[name], gate_up.float(), down.float(), pool=pool)
        np.testing.assert_array_equal(narrow.packed, wide.packed)


def test_sizes_of_packed_experts(pool: ThreadPool):
    weights = 3 * HIDDEN * INNER
    assert make_experts("f32", pool).expert_bytes == 4 * weights
    assert make_experts("bf16", pool).expert_bytes == 2 * weights
    assert make_experts("int8g128", pool).expert_bytes == weights * 8.125 / 8
    assert make_experts("int4g32", pool).expert_bytes == weights * 5 / 8


# Parts and storage ---------------------------------------------------------------------------


def make_storage(size_bytes: int, *, read_only: bool = False) -> np.ndarray:
    storage = np.zeros(size_bytes + 64, np.uint8)
    start = -storage.ctypes.data % 64
    storage = storage[start : start + size_bytes]
    storage.flags.writeable = not read_only
    return storage


@each("name", FORMATS)
def test_parts_loaded_from_one_part_are_those_packed(name: str, pool: ThreadPool):
    """And each number of parts gives one result, bitwise, whatever the threads and the batch."""
    weight_format = WEIGHT_FORMATS[name]
    weights = make_weights(3, inner=640)
    sizes = (3, HIDDEN, 640)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=generator)
    ids, router = torch.arange(18).view(9, 2) % 3, torch.rand(9, 2, generator=generator)
    whole = PackedExperts.pack(weight_format, *weights, pool=pool)
    results = [whole.forward(x, ids, router)]
    for num_parts in (2, 4):
        packed = PackedExperts.pack(weight_format, *weights, pool=pool, num_parts=num_parts)
        want = packed.forward(x, ids, router)
        loaded = PackedExperts(
            weight_format, *sizes, pool=make_pool(5), storage=whole.packed, num_parts=num_parts
        )
        assert torch.equal(loaded.forward(x, ids, router), want)
        alone = packed.forward(x[4:5], ids[4:5], router[4:5])
        assert torch.equal(alone, want[4:5])
        results.append(want)
        with pytest.raises(UnsupportedError, match="several parts"):
            _ = packed.packed
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_weights_copied_to_nodes_are_those_in_place(num_parts: int, pool: ThreadPool):
    """A result says nothing of where the weights lie; the kernel says where they lie, if it may."""
    weight_format = WEIGHT_FORMATS["int8g32"]
    weights, sizes = make_weights(inner=640), (NUM_EXPERTS, HIDDEN, 640)
    whole = PackedExperts.pack(weight_format, *weights, pool=pool)
    expected = PackedExperts(weight_format, *sizes, pool=pool, storage=whole.packed)
    assert not expected.is_bound
    if num_parts > 1:
        expected = PackedExperts.pack(weight_format, *weights, pool=pool, num_parts=num_parts)
    source = make_storage(whole.packed.size)
    source[:] = whole.packed.reshape(-1)
    copied = PackedExperts(
        weight_format, *sizes, pool=pool, storage=source, num_parts=num_parts, is_bound=True
    )
    source[:] = 0  # Copied, not kept.
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=generator)
    ids, router = torch.arange(18).view(9, 2) % 3, torch.rand(9, 2, generator=generator)
    assert torch.equal(copied.forward(x, ids, router), expected.forward(x, ids, router))
    if copied.is_bound:
        try:
            assert copied.find_part_nodes() == [pool.node_ids[0]] * num_parts
        except UnsupportedError as error:
            assert "move_pages" in str(error)  # A container may refuse to say.


def test_nodes_are_checked():
    bank = {**WEIGHT_FORMATS["bf16"].fields, "num_experts": 1}
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    with pytest.raises(NotFoundError, match="4096"):
        ExpertBank(**bank, **sizes, part_nodes=[4096])
    with pytest.raises(ConfigError, match="2 nodes for 1 parts"):
        ExpertBank(**bank, **sizes, part_nodes=[0, 0])


def test_number_of_parts_is_checked(pool: ThreadPool):
    int8 = WEIGHT_FORMATS["int8g128"]
    for bad in (0, -1, 6):
        with pytest.raises(ConfigError, match="5 column blocks"):
            PackedExperts(int8, 1, 128, 640, pool=pool, num_parts=bad)
    with pytest.raises(ShapeError, match="packed bytes"):
        PackedExperts(int8, 1, 128, 640, pool=pool, num_parts=2, storage=make_storage(64))


def test_storage_is_viewed_and_kept(pool: ThreadPool):
    weight_format = WEIGHT_FORMATS["int4g32"]
    sizes = (NUM_EXPERTS, HIDDEN, INNER)
    storage = make_storage(count_bytes(weight_format, *sizes))
    experts = PackedExperts(weight_format, *sizes, pool=pool, storage=storage)
    gate_up, down = make_weights()
    for i in range(NUM_EXPERTS):
        experts.pack_expert(i, *gate_up[i].chunk(2), down[i])
    np.testing.assert_array_equal(storage, make_experts("int4g32", pool).packed.ravel())
    mapped = make_storage(len(storage))
    mapped[:] = storage
    mapped.flags.writeable = False
    reader = PackedExperts(weight_format, *sizes, pool=pool, storage=mapped)
    batch = make_batch(5)
    assert torch.equal(reader.forward(*batch), experts.forward(*batch))
    with pytest.raises(ConflictError, match="read-only"):
        reader.pack_expert(0, *gate_up[0].chunk(2), down[0])
    for wrong in (storage[64:], storage[1:]):
        with pytest.raises(ShapeError, match="storage of"):
            PackedExperts(weight_format, *sizes, pool=pool, storage=wrong)


def test_biases_and_activations_are_checked(pool: ThreadPool):
    int8 = WEIGHT_FORMATS["int8g128"]
    sizes = (2, HIDDEN, INNER)
    vectors = (torch.ones(INNER), torch.ones(INNER), torch.ones(HIDDEN))
    with pytest.raises(ConflictError, match="without biases"):
        PackedExperts(int8, *sizes, pool=pool).set_bias(0, *vectors)
    experts = PackedExperts(int8, *sizes, pool=pool, has_bias=True)
    with pytest.raises(NotFoundError):
        experts.set_bias(2, *vectors)
    with pytest.raises(ShapeError, match="down is"):
        experts.set_bias(0, vectors[0], vectors[1], vectors[1])
    for bad in (
        Activation("relu"),
        Activation(limit=0),
        Activation(limit=float("nan")),
        Activation(alpha=-1),
        Activation("gelu", alpha=2.0),
        Activation(up_offset=float("inf")),
    ):
        with pytest.raises(ConfigError, match=r"relu|limit"):
            PackedExperts(int8, *sizes, pool=pool, activation=bad)


# Refusals ------------------------------------------------------------------------------------


def refuse_forward(experts: PackedExperts, words: str, x, ids, weights) -> None:
    with pytest.raises(ShapeError, match=words):
        experts.forward(x, ids, weights)


def test_forward_refuses_what_does_not_fit(pool: ThreadPool):
    experts = make_experts("int8g128", pool)
    x, ids, weights = make_batch(4)
    refuse_forward(experts, r"x is \[4, 255\]", x[:, 1:].contiguous(), ids, weights)
    refuse_forward(experts, "x is .*contiguous", x.repeat(1, 2)[:, ::2], ids, weights)
    refuse_forward(experts, "float32 or bfloat16", x.double(), ids, weights)
    refuse_forward(experts, "float32 or bfloat16", x.half(), ids, weights)
    refuse_forward(experts, r"x is \[256\]", x[0], ids, weights)
    refuse_forward(experts, "expert_ids", x, ids[:3], weights)
    refuse_forward(experts, "int32 or int64", x, ids.short(), weights)
    refuse_forward(experts, "weights is", x, ids, weights[:, :2].contiguous())
    refuse_forward(experts, "weights is", x, ids, weights.double())
    for bad in (-2, NUM_EXPERTS, 2**40):
        wrong = ids.clone()
        wrong[2, 1] = bad
        refuse_forward(experts, f"expert id {bad} of {NUM_EXPERTS}", x, wrong, weights)


def test_pack_refuses_what_does_not_fit(pool: ThreadPool):
    gate_up, down = make_weights()
    int8 = WEIGHT_FORMATS["int8g128"]
    with pytest.raises(ShapeError, match="6 experts in gate_up, 5 in down"):
        PackedExperts.pack(int8, gate_up, down[:5], pool=pool)
    with pytest.raises(ShapeError, match=r"\[E, 2 F, D\]"):
        PackedExperts.pack(int8, gate_up[:, 1:], down, pool=pool)
    with pytest.raises(ShapeError, match="down is"):
        PackedExperts.pack(int8, gate_up, down[:, :, :64].contiguous(), pool=pool)
    with pytest.raises(ShapeError, match=r"hidden_size 192 .* group of 128"):
        PackedExperts(int8, 1, 192, 128, pool=pool)
    with pytest.raises(ShapeError, match="intermediate_size 96"):
        PackedExperts(int8, 1, 128, 96, pool=pool)
    with pytest.raises(UnsupportedError, match="3 bits"):
        PackedExperts(WeightFormat("int3", 3, 32), 1, 128, 128, pool=pool)
    with pytest.raises(ConfigError, match="size 0"):
        PackedExperts(int8, 0, 128, 128, pool=pool)
    with pytest.raises(ConfigError, match="unknown ISA sse9"):
        PackedExperts(int8, 1, 128, 128, pool=pool, isa="sse9")
    experts = PackedExperts(int8, 2, HIDDEN, INNER, pool=pool)
    halves = (gate_up[0, :INNER], gate_up[0, INNER:])
    for expert_id in (2, -1):
        with pytest.raises(NotFoundError):
            experts.pack_expert(expert_id, *halves, down[0])
    with pytest.raises(ShapeError, match="float32 or bfloat16"):
        experts.pack_expert(0, *halves, down[0].double())


@each("name", FORMATS)
@each("bad", [float("nan"), float("inf"), 1e9])
def test_pack_refuses_weights_that_the_format_cannot_hold(name: str, bad: float, pool: ThreadPool):
    gate_up, down = make_weights(1)
    down[0, 70, 5] = bad
    if bad == 1e9 and WEIGHT_FORMATS[name].is_float:
        PackedExperts.pack(WEIGHT_FORMATS[name], gate_up, down, pool=pool)
        return
    # In fp8 any output of the block may be named.
    with pytest.raises(UnsupportedError, match="output " if name == "fp8" else "output 70"):
        PackedExperts.pack(WEIGHT_FORMATS[name], gate_up, down, pool=pool)


def test_the_widest_isa_is_the_default(pool: ThreadPool):
    assert kernel_isas()[0] == "plain"
    # AMX is chosen by its name only.
    assert make_experts("bf16", pool).isa == [isa for isa in kernel_isas() if isa != "amx"][-1]
    assert make_experts("bf16", pool, "plain").isa == "plain"
