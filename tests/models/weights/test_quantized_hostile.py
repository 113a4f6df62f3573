"""Goal: a quantized checkpoint that lies is refused with the name of what is wrong.

Method: good checkpoints with one thing changed, in a tensor or in ``quantization_config``; and, by
hypothesis, configurations of any JSON, which give an answer or an error of ours, never another.
"""

import copy
import json
import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import load_checkpoint
from quantized import CODERS, write_quantized
from safetensors.torch import load_file, save_file

from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    NotFoundError,
    ShapeError,
    UnsupportedError,
)
from tandem.core.errors import TandemError as AnyError
from tandem.models.planning.planner import describe_model, plan_model
from tandem.models.planning.quantization import METHODS, read_quantization

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def good(tmp_path_factory, make_config, save_model):
    """Return ``make(kind)``: a coded folder, made once; nobody writes to it."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("good")
            save_model(make_config("llama", num_key_value_heads=2, **SIZES), folder)
            write_quantized(folder, kind)
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture
def copy_of(good, tmp_path):
    def make(kind):
        folder = tmp_path / "copy"
        folder.mkdir()
        for path in good(kind).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return folder

    return make


def cut(name):
    return lambda t: t.__setitem__(name, t[name][:-1].contiguous())


def drop(name):
    return lambda t: t.pop(name)


def cast(name, dtype):
    return lambda t: t.__setitem__(name, t[name].to(dtype))


def fill(name, value):
    return lambda t: t[name].fill_(value)


TENSORS = {
    "fp8: no scales": ("fp8 blocks", drop(f"{Q}.weight_scale_inv"), NotFoundError, "weight_scale"),
    "fp8: scales cut": ("fp8 blocks", cut(f"{Q}.weight_scale_inv"), ShapeError, "weight_scale_inv"),
    "fp8: scales of integers": (
        "fp8 blocks",
        cast(f"{Q}.weight_scale_inv", torch.int32),
        ShapeError,
        "weight_scale_inv' .* dtype I32",
    ),
    "fp8: codes of another kind": (
        "fp8 blocks",
        cast(f"{Q}.weight", torch.float8_e5m2),
        ShapeError,
        "q_proj.weight' .* F8_E5M2",
    ),
    "fp8: an infinite scale": (
        "fp8 blocks",
        fill(f"{Q}.weight_scale_inv", float("inf")),
        UnsupportedError,
        "not finite",
    ),
    "fp8: NaN codes": (
        "fp8 tensor",
        lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F),
        CorruptionError,
        "holds NaN",
    ),
    "ct: no scales": ("ct int4 g32 sym", drop(f"{Q}.weight_scale"), NotFoundError, "weight_scale"),
    "ct: no shape": ("ct int4 g32 sym", drop(f"{Q}.weight_shape"), NotFoundError, "weight_shape"),
    "ct: no zero points": (
        "ct int4 g32 asym",
        drop(f"{Q}.weight_zero_point"),
        NotFoundError,
        "weight_zero_point",
    ),
    "ct: a shape that lies": (
        "ct int4 g32 sym",
        lambda t: t[f"{Q}.weight_shape"].mul_(2),
        ShapeError,
        r"says \[512, 256\]|weight_packed' .* has shape",
    ),
    "ct: a vast shape": (
        "ct int4 g32 sym",
        fill(f"{Q}.weight_shape", 1 << 61),
        ShapeError,
        "weight_shape",
    ),
    "ct: a negative shape": (
        "ct int4 g32 sym",
        fill(f"{Q}.weight_shape", -128),
        ShapeError,
        "weight_shape",
    ),
    "ct: words of another size": (
        "ct int4 g32 sym",
        cast(f"{Q}.weight_packed", torch.int64),
        ShapeError,
        "weight_packed' .* I64",
    ),
    "ct: NaN scales": (
        "ct w8a8",
        fill(f"{Q}.weight_scale", float("nan")),
        UnsupportedError,
        "q_proj.weight' has a scale",
    ),
    "gptq: no zeros": ("gptq 4 g128", drop(f"{Q}.qzeros"), NotFoundError, "qzeros"),
    "gptq: zeros that are not symmetric": (
        "gptq 4 g128",
        fill(f"{Q}.qzeros", 0),
        CorruptionError,
        "zero point other than 8",
    ),
    "gptq: an order without desc_act": (
        "gptq 4 g32 asym",
        lambda t: t.__setitem__(f"{Q}.g_idx", t[f"{Q}.g_idx"].flip(0)),
        CorruptionError,
        "g_idx' orders inputs",
    ),
    "gptq: a group beyond": (
        "gptq 4 g32 act-order",
        fill(f"{Q}.g_idx", 4),
        CorruptionError,
        "g_idx",
    ),
    "gptq: a negative group": (
        "gptq 4 g32 act-order",
        fill(f"{Q}.g_idx", -1),
        CorruptionError,
        "g_idx",
    ),
    "gptq: no order": ("gptq 4 g32 act-order", drop(f"{Q}.g_idx"), NotFoundError, "g_idx"),
    "gptq: codes cut": ("gptq 8 rows", cut(f"{Q}.qweight"), ShapeError, "q_proj"),
    "awq: scales cut": ("awq g128", cut(f"{Q}.scales"), ShapeError, "scales"),
    "awq: no zeros": ("awq g128", drop(f"{Q}.qzeros"), NotFoundError, "qzeros"),
    "awq: no codes": ("awq g128", drop(f"{Q}.qweight"), NotFoundError, "q_proj.weight"),
    "awq: codes without dimensions": (
        "awq g128",
        lambda t: t.__setitem__(f"{Q}.qweight", torch.tensor(3, dtype=torch.int32)),
        ShapeError,
        "qweight",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_named(name, copy_of, edit_weights):
    kind, change, error, text = TENSORS[name]
    folder = copy_of(kind)
    edit_weights(folder, change)
    for options in ({}, {"linear_format": "none"}):
        if error in (UnsupportedError, CorruptionError) and options and "g_idx" not in text:
            # Decoded, these are values that a tensor of floats may have.
            continue
        with pytest.raises(error, match=text):
            load_checkpoint(folder, dtype="float32", **options)


CONFIGS = {
    "another group": ("gptq 4 g128", {"group_size": 32}, ShapeError, "scales"),
    "other bits": ("gptq 4 g128", {"bits": 8}, ShapeError, "q_proj"),
    "three bits": ("gptq 4 g128", {"bits": 3}, UnsupportedError, "3 bits"),
    "bits of text": ("gptq 4 g128", {"bits": "4"}, ConfigError, "bits is '4'"),
    "no group": ("gptq 4 g128", {"group_size": 0}, ConfigError, "group_size is 0"),
    "marlin": ("gptq 4 g128", {"checkpoint_format": "marlin"}, UnsupportedError, "marlin"),
    "settings by module": (
        "gptq 4 g128",
        {"dynamic": {"+:.*down.*": {"bits": 8}}},
        UnsupportedError,
        "dynamic",
    ),
    "sym of text": ("gptq 4 g128", {"sym": "yes"}, ConfigError, "sym is 'yes'"),
    "gemv": ("awq g128", {"version": "gemv"}, UnsupportedError, "gemv"),
    "awq of eight bits": ("awq g128", {"bits": 8}, UnsupportedError, "8 bits"),
    "e5m2": ("fp8 blocks", {"fmt": "e5m2"}, UnsupportedError, "e5m2"),
    "one block size": ("fp8 blocks", {"weight_block_size": [128]}, ConfigError, "two numbers"),
    "blocks of nothing": (
        "fp8 blocks",
        {"weight_block_size": [0, 128]},
        ConfigError,
        "two numbers",
    ),
    "smaller blocks": (
        "fp8 blocks",
        {"weight_block_size": [64, 64]},
        ShapeError,
        "weight_scale_inv",
    ),
    "coded, and said not to be": (
        "fp8 blocks",
        {"modules_to_not_convert": ["model.layers.0.self_attn"]},
        ConfigError,
        "q_proj.weight' is coded",
    ),
    "a pattern without end": (
        "fp8 blocks",
        {"modules_to_not_convert": ["(a+)+$"]},
        UnsupportedError,
        "too involved",
    ),
    "no pattern": ("fp8 blocks", {"modules_to_not_convert": ["(("]}, ConfigError, "no pattern"),
    "names of numbers": (
        "fp8 blocks",
        {"modules_to_not_convert": [3]},
        ConfigError,
        "list of names",
    ),
    "no groups": ("ct w8a8", {"config_groups": {}}, ConfigError, "config_groups is empty"),
    "groups in a list": ("ct w8a8", {"config_groups": []}, ConfigError, "need an object"),
    "sparse": ("ct w8a8", {"sparsity_config": {"format": "sparse-24"}}, UnsupportedError, "sparse"),
    "rotated": ("ct w8a8", {"transform_config": {"r1": {}}}, UnsupportedError, "transforms"),
    "not compressed": ("ct w8a8", {"quantization_status": "frozen"}, UnsupportedError, "frozen"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_configurations_are_named(name, copy_of, edit_config):
    kind, changes, error, text = CONFIGS[name]
    folder = copy_of(kind)
    edit_config(folder, quantization_config=CODERS[kind][1] | changes)
    with pytest.raises(error, match=text):
        load_checkpoint(folder, dtype="float32")


def test_folders_of_ktransformers_are_refused_with_what_to_run(copy_of, edit_weights):
    folder = copy_of("awq g128")
    (folder / "_layer_0" / "_numa_0").mkdir(parents=True)
    packed = folder / "_layer_0" / "_numa_0" / "INT4_down_0_512Byte_quant_.kt"
    packed.write_bytes(b"")
    for act in (describe_model, plan_model):
        with pytest.raises(UnsupportedError, match="tandem convert CHECKPOINT --format"):
            act(folder)
    packed.unlink()
    name = "blk.0.ffn_gate_exps.3.numa.1.weight"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(4, dtype=torch.int8)}))
    with pytest.raises(UnsupportedError, match=name):
        load_checkpoint(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = sorted({key for _, config in CODERS.values() for key in config} | {"dynamic", "fmt"})


def mutate(config, path, value):
    """Put a value where the path, as far as it goes, leads."""
    config = copy.deepcopy(config)
    place = config
    for step in path[:-1]:
        children = [key for key, child in place.items() if isinstance(child, dict)]
        if not children:
            break
        place = place[children[step % len(children)]]
    keys = [*place, *FIELDS]
    place[keys[path[-1] % len(keys)]] = value
    return config


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(CODERS)),
    path=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    value=JSON,
)
def test_any_configuration_gives_an_answer_or_an_error_of_ours(kind, path, value):
    check_configuration(mutate(CODERS[kind][1], path, value))


def check_configuration(config):
    raw = json.loads(json.dumps({"quantization_config": config}))
    try:
        found = read_quantization(raw)
    except AnyError as error:
        assert "quantiz" in str(error) or "compressed" in str(error) or error.field
    else:
        assert found is None or found.method in METHODS
        if found is not None:
            scheme = found.find_scheme(Q)
            assert scheme is None or str(scheme)
            assert scheme is None or scheme.find_format(256) is None or scheme.bits in (4, 8)


def damage_tensors(tensors, choose):
    """Change one tensor's shape, dtype or bytes; ``choose(n)`` gives a number below n."""
    names = sorted(tensors)
    name = names[choose(len(names))]
    tensor = tensors[name]
    dtypes = [torch.int32, torch.uint8, torch.float16, torch.float8_e4m3fn, torch.int64]
    kind = choose(5)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = torch.zeros(tensor.shape, dtype=dtypes[choose(len(dtypes))])
    elif kind == 2:
        shape = [size + choose(3) - 1 for size in tensor.shape] or [2]
        tensors[name] = torch.zeros([max(0, size) for size in shape], dtype=tensor.dtype)
    elif kind == 3:
        tensors[name] = tensor.reshape(-1) if choose(2) else tensor[None]
    else:
        data = tensor.reshape(-1).view(torch.uint8)
        for _ in range(4):
            if len(data):
                data[choose(len(data))] = choose(256)


def test_damaged_tensors_give_a_model_or_an_error_of_ours(good, tmp_path):
    run_tensor_fuzz(good, tmp_path, seeds=range(8))


def run_tensor_fuzz(good, tmp_path, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)

        def choose(count, generator=generator):
            return int(torch.randint(count, (1,), generator=generator))

        kinds = sorted(CODERS)
        source = good(kinds[choose(len(kinds))])
        tensors = {k: t.clone() for k, t in load_file(source / "model.safetensors").items()}
        damage_tensors(tensors, choose)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        try:
            load_checkpoint(tmp_path, dtype="float32", linear_format=["auto", "none"][choose(2)])
        except AnyError as error:
            assert str(error), seed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_of_damage(good, tmp_path):
    """The long form of the two before, from seeds that no run repeats."""
    ends, first = time.monotonic() + 590, time.time_ns() % (1 << 40)
    rng = random.Random(first)
    kinds, count = sorted(CODERS), 0
    values = [None, -1, 0, 1, 1 << 70, 3.5, "", "x", [], {}, [1, 2], {"a": {}}, True]
    while time.monotonic() < ends:
        run_tensor_fuzz(good, tmp_path, seeds=[first + count])
        for _ in range(50):
            path = [rng.randrange(40) for _ in range(rng.randrange(1, 4))]
            config = CODERS[rng.choice(kinds)][1]
            check_configuration(mutate(config, path, rng.choice(values)))
        count += 1
    assert count > 100
