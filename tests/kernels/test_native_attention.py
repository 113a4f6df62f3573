"""Goal: native attention is exact, invariant, and refuses what would read out of bounds.

Method: keys and values go into scattered blocks by ``store``; results are compared with the
float64 oracle within the derived bound, on every ISA here, for every layout and rule; mutants must
leave the bound; alone and in company, whole and in chunks, prefilled and decoded are bitwise equal.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from each import each
from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.kernels import tolerance
from tandem.kernels.oracles import reference

LAYERS, LAYER = 2, 1
ISAS = _native.kernel_isas()
DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = each("dtype", DTYPES)


def view(tensor):
    return None if tensor is None else _native.TensorView(tensor)


@dataclass
class Case:
    """Sequences whose whole context is drawn; ``attend`` runs the last tokens of some of them."""

    lengths: list[int]
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int | None = None
    """None is GQA; a size is MLA: one head, values within the keys."""
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | str = torch.float32
    """A string is a coded format."""
    seed: int = 0
    rule: dict = field(default_factory=dict)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.block_size) for length in self.lengths]
        self.num_blocks = sum(counts) + 2
        order = torch.randperm(self.num_blocks, generator=self.generator)
        self.table = order[0].repeat(len(counts), max(counts))
        used = 0
        for s, count in enumerate(counts):
            self.table[s, :count] = order[used : used + count]
            used += count
        self.q = [self.draw(n, self.heads, self.key_dim) for n in self.lengths]
        kinds = 1 if self.value_dim else 2
        self.kv = [self.draw(n, kinds * self.kv_heads, self.key_dim) for n in self.lengths]
        self.scale = self.key_dim**-0.5
        self.pool, self.memory = self.make_pool()
        self.written = [0] * len(counts)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def make_pool(self):
        blocks, size, d = self.num_blocks, self.block_size, self.key_dim
        if self.value_dim and isinstance(self.kv_dtype, str):
            memory = torch.full((blocks, LAYERS, size * (d + 2)), 255, dtype=torch.uint8)
            args = (self.kv_dtype, size, d, self.value_dim)
            return _native.KvPool.coded_latent(view(memory), *args), memory
        if self.value_dim:
            memory = torch.full((blocks, LAYERS, size, d), math.nan, dtype=self.kv_dtype)
            return _native.KvPool.latent(view(memory), self.value_dim), memory
        if isinstance(self.kv_dtype, str):
            rows = 2 * self.kv_heads * size
            memory = torch.full((blocks, LAYERS, rows * (d + 2)), 255, dtype=torch.uint8)
            pool = _native.KvPool.coded(view(memory), self.kv_dtype, self.kv_heads, size, d)
            return pool, memory
        shape = (blocks, LAYERS, 2, self.kv_heads, size, d)
        memory = torch.full(shape, math.nan, dtype=self.kv_dtype)
        return _native.KvPool.grouped(view(memory)), memory

    def attend(self, parts, *, isa="", pool=None, rule=None):
        """Compute tokens parts[s] = (start, end) of each sequence as one step; None skips it."""
        rows = [(s, *part) for s, part in enumerate(parts) if part is not None]
        starts = [0]
        for _, a, b in rows:
            starts.append(starts[-1] + b - a)
        plan = _native.PlannedAttention(
            self.pool,
            self.table[[s for s, _, _ in rows]].contiguous(),
            starts,
            [b for _, _, b in rows],
            pool,
            isa,
        )
        plan.store(LAYER, view(torch.cat([self.kv[s][a:b] for s, a, b in rows])))
        q = torch.cat([self.q[s][a:b] for s, a, b in rows])
        out = q.new_full((len(q), self.heads, self.value_dim or self.key_dim), math.nan)
        rule = dict(self.rule if rule is None else rule)
        rule["sinks"] = view(rule.get("sinks"))
        plan.attend(LAYER, view(q), view(out), self.scale, **rule)
        sizes = [b - a for _, a, b in rows]
        return dict(zip([s for s, _, _ in rows], out.split(sizes), strict=True))

    def stored(self, s):
        """Keys and values [C, K, d] as the pool's type holds them, in float64."""
        kv = self.kv[s].double().numpy()
        if isinstance(self.kv_dtype, str):
            kv = code(kv, self.kv_dtype)
        else:
            kv = self.kv[s].to(self.kv_dtype).double().numpy()
        if self.value_dim:
            return kv, kv[..., : self.value_dim]
        return kv[:, : self.kv_heads], kv[:, self.kv_heads :]

    def oracle(self, s, start, end):
        keys, values = (part[:end] for part in self.stored(s))
        rule = dict(self.rule)
        sinks = rule.pop("sinks", None)
        rule["sinks_H"] = None if sinks is None else sinks.double().numpy()
        args = (self.q[s][start:end].double().numpy(), keys, values, self.scale)
        return reference.attention(*args, **rule), tolerance.attention(*args, self.dtype, **rule)


def code(kv, kv_format):
    """What int8 or fp8 codes with an fp16 scale per token and head stand for."""
    largest = {"int8": 127, "fp8": 448}[kv_format]
    scale = (np.abs(kv).max(-1, keepdims=True).astype(np.float32) / np.float32(largest)).astype(
        np.float16
    )
    # A scale that fp16 holds as zero stands for zeros.
    inverse = np.float32(1) / np.where(scale == 0, np.inf, scale.astype(np.float32))
    scaled = kv.astype(np.float32) * inverse.astype(np.float32)
    scaled = np.clip(scaled, -largest, largest)
    if kv_format == "int8":
        codes = np.rint(scaled)
    else:
        codes = torch.from_numpy(scaled).to(torch.float8_e4m3fn).double().numpy()
    return codes.astype(np.float64) * scale.astype(np.float64)


WHOLE = [1, 16, 17, 70, 131]


@each("isa", ISAS)
@each("key_dim", [16, 20, 64])
@both_dtypes
@each("kv_dtype", [torch.float32, torch.bfloat16, "int8", "fp8"])
def test_equals_the_oracle(isa, key_dim, dtype, kv_dtype, count_outside):
    case = Case(WHOLE, key_dim=key_dim, dtype=dtype, kv_dtype=kv_dtype, block_size=24)
    # The rest of each context first, then one token here, several there.
    last = [(0, 1), (0, 16), (16, 17), (50, 70), (111, 131)]
    case.attend([(0, start) if start else None for start, _ in last], isa=isa)
    for s, out in case.attend(last, isa=isa).items():
        assert count_outside(out, *case.oracle(s, *last[s])) == 0


RULES = {
    "window": {"window": 37},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, -90.0])},
    "all": {"window": 50, "soft_cap": 5.0, "sinks": torch.arange(6.0) - 2},
}


@each("isa", ISAS)
@each("name", RULES)
@both_dtypes
def test_rules(isa, name, dtype, count_outside):
    case = Case([131, 90], dtype=dtype, kv_dtype=dtype, rule=RULES[name])
    case.attend([(0, 130), (0, 40)], isa=isa)
    parts = [(130, 131), (40, 90)]
    for s, out in case.attend(parts, isa=isa).items():
        assert count_outside(out, *case.oracle(s, *parts[s])) == 0


@each("isa", ISAS)
@each("kv_format", ["int8", "fp8"])
@each("value_dim", [None, 64])
@both_dtypes
def test_rules_over_coded_kv(isa, kv_format, value_dim, dtype, count_outside):
    case = Case(
        [131, 90],
        kv_heads=1 if value_dim else 2,
        key_dim=80,
        value_dim=value_dim,
        dtype=dtype,
        kv_dtype=kv_format,
        rule=RULES["all"],
    )
    case.attend([(0, 130), (0, 40)], isa=isa)
    parts = [(130, 131), (40, 90)]
    for s, out in case.attend(parts, isa=isa).items():
        assert count_outside(out, *case.oracle(s, *parts[s])) == 0


@each("isa", ISAS)
@each("kv_dtype", ["as queries", "int8", "fp8"])
@both_dtypes
def test_latent_heads(isa, kv_dtype, dtype, count_outside):
    """MLA: 130 query heads share one key of 72 items, whose first 64 are the value."""
    kv_dtype = dtype if kv_dtype == "as queries" else kv_dtype
    shape = {"heads": 130, "kv_heads": 1, "key_dim": 72, "value_dim": 64}
    case = Case([80], **shape, dtype=dtype, kv_dtype=kv_dtype)
    for part in ((0, 3), (3, 79), (79, 80)):
        # The oracle of many heads is slow; of a few tokens it says as much.
        out = case.attend([part], isa=isa)[0]
        checked = (max(part[0], part[1] - 2), part[1])
        assert count_outside(out[checked[0] - part[0] :], *case.oracle(0, *checked)) == 0


MUTANTS = ["last token", "scale", "other head", "window", "no cap", "no sink"]


@each("mutant", MUTANTS)
@both_dtypes
def test_the_bound_catches_mutants(mutant, dtype, count_outside):
    rule = {"window": 60, "soft_cap": 3.0, "sinks": torch.full((6,), 4.0)}
    case = Case([70, 40], dtype=dtype, kv_dtype=dtype, rule=rule)
    case.attend([(0, 69), (0, 39)])
    parts = [(69, 70), (39, 40)]
    wrong = dict(rule)
    if mutant == "last token":
        case.kv[0][-1] = 0
        oracle = Case([70, 40], dtype=dtype, kv_dtype=dtype, rule=rule).oracle(0, 69, 70)
    else:
        oracle = case.oracle(0, 69, 70)
    if mutant == "scale":
        case.scale *= 1.5
    elif mutant == "other head":
        case.q[0] = case.q[0].flip(1)
    elif mutant == "window":
        wrong["window"] = 55
    elif mutant == "no cap":
        wrong["soft_cap"] = 0.0
    elif mutant == "no sink":
        wrong["sinks"] = None
    assert count_outside(case.attend(parts, rule=wrong)[0], *oracle) > 0


LAYOUTS = ["grouped", "latent", "int8", "latent int8"]
FED = [(isa, dtype, layout) for isa in ISAS for dtype in DTYPES for layout in LAYOUTS]
# Plain code is the slowest: it equals the others bitwise, below, and is fed in two layouts.
FED = [
    (isa, dtype, layout)
    for isa, dtype, layout in FED
    if isa != "plain" or (dtype == torch.float32 and layout in ("grouped", "latent int8"))
]


@each(("isa", "dtype", "layout"), FED)
def test_bitwise_however_the_tokens_are_fed(isa, dtype, layout):
    """Longer than a split, so that partial results are merged, and with a window."""
    length = 1100 if isa != "plain" else 1030
    shape = {"key_dim": 16}
    if "latent" in layout:
        shape = {"kv_heads": 1, "key_dim": 24, "value_dim": 16}
    kv_dtype = "int8" if "int8" in layout else dtype
    rule = {"window": 1040, "soft_cap": 20.0}
    case = Case([length, 300, 65], heads=4, dtype=dtype, kv_dtype=kv_dtype, rule=rule, **shape)
    whole = case.attend([(0, length), (0, 300), (0, 65)], isa=isa)
    pool = _native.ThreadPool(3, oversubscribe=True)
    for cuts in ([64, 100, 1025], [1, 2, 3, 1029], [500]):
        case.memory.fill_(255 if case.memory.dtype == torch.uint8 else math.nan)
        bounds = [0, *cuts, length]
        chunks = [
            case.attend([(a, b), None, None], isa=isa, pool=pool)[0] for a, b in pairwise(bounds)
        ]
        assert torch.equal(torch.cat(chunks), whole[0])
    case.attend([None, (0, 299), (0, 64)], isa=isa)
    decoded = case.attend([(length - 1, length), (299, 300), (64, 65)], isa=isa, pool=pool)
    for s, out in decoded.items():
        assert torch.equal(out[0], whole[s][-1])


@each("isa", ISAS)
@each("group", [1, 4, 5, 7, 8])
@each("kv_dtype", [torch.float32, torch.bfloat16, "fp8"])
def test_few_rows_are_bitwise_those_of_many(isa, group, kv_dtype):
    """A decode whose rows fit into registers leaves values where they lie; a prefill packs them."""
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    case = Case([131], heads=2 * group, block_size=24, dtype=dtype, kv_dtype=kv_dtype)
    whole = case.attend([(0, 131)], isa=isa)[0]
    for token in (0, 1, 63, 64, 130):
        alone = case.attend([(token, token + 1)], isa=isa)[0]
        assert torch.equal(alone[0], whole[token])


@each("kv_dtype", [torch.float32, torch.bfloat16, "int8", "fp8"])
def test_float_queries_agree_bitwise_across_isas(kv_dtype):
    rule = {"soft_cap": 4.0, "sinks": torch.zeros(6)}
    case = Case([100], key_dim=20, kv_dtype=kv_dtype, rule=rule)
    results = [case.attend([(0, 100)], isa=isa)[0] for isa in ISAS]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_threads_share_a_large_step_bitwise():
    case = Case([2500, 700], heads=8, kv_heads=1, key_dim=64, block_size=64)
    case.attend([(0, 2499), (0, 650)])
    parts = [(2499, 2500), (650, 700)]
    one = case.attend(parts)
    many = case.attend(parts, pool=_native.ThreadPool(3, oversubscribe=True))
    assert all(torch.equal(one[s], many[s]) for s in one)


def test_queries_and_keys_of_a_fused_projection():
    case = Case([9], heads=4, kv_heads=2, key_dim=16)
    expected = case.attend([(0, 9)])[0]
    qkv = torch.cat((case.q[0], case.kv[0]), 1)
    plan = _native.PlannedAttention(case.pool, case.table, [0, 9], [9])
    plan.store(LAYER, view(qkv), 4)
    out = torch.empty_like(expected)
    plan.attend(LAYER, view(qkv), view(out), case.scale)
    assert torch.equal(out, expected)


def test_extreme_scores_and_nan_stay_where_they_are():
    case = Case([9, 9], heads=2, key_dim=16)
    case.q[0] *= 1e4  # One weight takes all: exp underflows to 0, never to NaN.
    case.q[1][:, 1] = math.nan
    out = case.attend([(0, 9), (0, 9)])
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1][:, 0]).all()
    assert torch.isnan(out[1][:, 1]).all()
    case.q[1][:, 1] = 0
    case.kv[0][:] = math.nan
    out = case.attend([(0, 9), (0, 9)])
    assert torch.isnan(out[0]).all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_codes_hold_hard_rows(kv_format):
    """Zeros, denormals and what only a NaN scale can say; each stays in its own row."""
    case = Case([4], heads=1, kv_heads=1, key_dim=16, kv_dtype=kv_format)
    case.kv[0][0] = 0
    case.kv[0][1] = 1e-30
    case.kv[0][2] *= 1e4
    case.q[0][:] = 0
    out = case.attend([(0, 4)])[0]
    values = case.stored(0)[1][:, 0]
    means = np.cumsum(values, 0) / np.arange(1, 5)[:, None]
    np.testing.assert_allclose(out[:, 0].numpy(), means, rtol=1e-5, atol=1e-6)
    case.kv[0][3, 1, 5] = math.inf
    assert torch.isfinite(case.attend([(0, 3)])[0]).all()
    assert torch.isnan(case.attend([(3, 4)])[0]).all()


def test_what_would_read_out_of_bounds_is_refused():
    case = Case([9, 9], heads=2, key_dim=16)
    starts, lens = [0, 1, 2], [9, 9]

    def plan(table=case.table, query_start=starts, context_lens=lens, isa=""):
        return _native.PlannedAttention(case.pool, table, query_start, context_lens, None, isa)

    for bad in (case.table + 99, case.table - 99):
        with pytest.raises(ShapeError, match="block"):
            plan(bad)
    for bad_lens in ([0, 1], [17, 1], [-1, 1]):
        with pytest.raises(ShapeError, match="context"):
            plan(context_lens=bad_lens)
    for bad_starts in ([0, 1], [0, 2, 1], [1, 2, 3], [0, 0, 1], [0, 10, 11]):
        with pytest.raises(ShapeError):
            plan(query_start=bad_starts)
    with pytest.raises(ConfigError):
        plan(isa="mmx")
    good = plan()
    q, out = torch.randn(2, 2, 16), torch.empty(2, 2, 16)
    for bad_q in (q[:1], q[..., :8], q[:, :1], q.half(), q.bfloat16(), q.transpose(1, 2)):
        with pytest.raises(ShapeError):
            good.attend(0, view(bad_q), view(out), 1.0)
    for bad_out in (out[:1], out[..., :8], torch.empty(2, 3, 16), torch.empty(2, 0, 16)):
        with pytest.raises(ShapeError):
            good.attend(0, view(q), view(bad_out), 1.0)
    for wrong in (
        {"window": -1},
        {"soft_cap": -1.0},
        {"soft_cap": math.nan},
        {"sinks": view(torch.zeros(3))},
        {"sinks": view(torch.zeros(2).bfloat16())},
    ):
        with pytest.raises(ShapeError):
            good.attend(0, view(q), view(out), 1.0, **wrong)
    with pytest.raises(ShapeError):
        good.attend(LAYERS, view(q), view(out), 1.0)
    rows = torch.randn(2, 4, 16)
    for bad_rows in (rows[:1], rows[:, :3], rows[..., :8], rows.half()):
        with pytest.raises(ShapeError):
            good.store(0, view(bad_rows))
    with pytest.raises(ShapeError):
        good.store(0, view(rows), 1)
    with pytest.raises(ShapeError):
        good.store(LAYERS, view(rows))


def test_pools_of_the_wrong_shape_are_refused():
    kv = torch.zeros(3, 2, 2, 2, 8, 16)
    for bad in (kv.half(), kv.transpose(3, 4), kv[:, :, 0], torch.zeros(3, 2, 3, 2, 8, 16)):
        with pytest.raises(ShapeError):
            _native.KvPool.grouped(view(bad))
    with pytest.raises(ShapeError):
        _native.KvPool.latent(view(torch.zeros(3, 2, 8, 16)), 17)
    codes = torch.zeros(3, 2, 2 * 2 * 8 * 18, dtype=torch.uint8)
    _native.KvPool.coded(view(codes), "int8", 2, 8, 16)
    with pytest.raises(ShapeError):
        _native.KvPool.coded(view(codes), "int8", 2, 8, 15)
    with pytest.raises(ConfigError):
        _native.KvPool.coded(view(codes), "int3", 2, 8, 16)
    latent = torch.zeros(3, 2, 8 * 18, dtype=torch.uint8)
    _native.KvPool.coded_latent(view(latent), "int8", 8, 16, 16)
    for sizes in ((8, 15, 8), (8, 16, 17), (8, 16, 0)):
        with pytest.raises(ShapeError):
            _native.KvPool.coded_latent(view(latent), "int8", *sizes)
    with pytest.raises(ConfigError):
        _native.KvPool.coded_latent(view(latent), "bf16", 8, 16, 16)
