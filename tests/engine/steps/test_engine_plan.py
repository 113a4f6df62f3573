"""Goal: a plan decides threads and memory from the model and the machine, and says why."""

import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tandem._native import kernel_isas, read_topology, recommend_threads
from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigError
from tandem.core.spec import KvSharing
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine import planning as building
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.memory import DEFAULT_FRACTION
from tandem.engine.planning import plan_engine
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.models.config import ModelConfig


def plan(threads=0, **model):
    return plan_engine(ModelConfig(path="demo", **model), EngineConfig(threads=threads))


def test_native_models_share_their_work_and_torch_does_not():
    native = plan(dtype="bfloat16")
    assert native.config.threads == recommend_threads(read_topology()).threads
    assert (native.torch_threads, native.torch_threads_reason) == (
        1,
        "all matrices run on native kernels",
    )
    small = plan(dtype="float32", linear_format="none")
    assert small.torch_threads == 1
    assert "too few to share" in small.torch_threads_reason
    mixed = plan(dtype="bfloat16", linear_format="none")
    assert "native" not in mixed.torch_threads_reason


def test_a_wish_for_too_many_threads_is_warned_about(caplog):
    advised = recommend_threads(read_topology()).threads
    with caplog.at_level(logging.WARNING):
        assert plan(threads=advised).config.threads == advised
        assert not caplog.records
        assert plan(threads=advised + 3).config.threads == advised + 3
    assert f"event=many_threads threads={advised + 3} advised={advised}" in caplog.text


@pytest.mark.parametrize("expert_format", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_formats_leave_more_memory(expert_format):
    plain, packed = plan(dtype="bfloat16"), plan(dtype="bfloat16", expert_format=expert_format)
    assert packed.model.weight_bytes < plain.model.weight_bytes
    rows = {what: (value, why) for what, value, why in packed.rows()}
    value, why = rows["experts"]
    assert value.startswith(packed.model.experts.weight_format)
    assert why == "as asked for; products of int8"


def test_parts_of_experts_are_one_for_each_node():
    assert plan(dtype="bfloat16").model.expert_parts == len(read_topology().numa_nodes)
    split = plan(dtype="bfloat16", expert_parts=2)
    rows = {what: (value, why) for what, value, why in split.rows()}
    assert rows["expert parts"][0] == "2"
    assert "copied" in rows["expert parts"][1]


def test_adapters_take_memory_from_kv(tmp_path):
    """What is loaded at the start is counted before it is loaded, and told; what cannot be read is
    named, and refused when it is loaded.
    """
    memory = {"memory": "1280MiB", "max_running": 4096}

    def plan_kv(**model):
        return plan_engine(ModelConfig(path="demo", **model), EngineConfig(**memory))

    without = plan_kv()
    assert without.adapters is None
    places = [place for layer in without.model.layers for place in layer.adapters]
    tensors = {}
    for place in places:
        name = f"base_model.model.{place.module}"
        tensors[f"{name}.lora_A.weight"] = torch.zeros(1000, place.in_features)
        tensors[f"{name}.lora_B.weight"] = torch.zeros(place.out_features, 1000)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    planned = plan_kv(adapter=(f"a={tmp_path}", "b=/nowhere"), adapter_folder="/")
    sizes = sum(tensor.numel() for tensor in tensors.values())
    assert planned.adapters.num_adapters == 1
    assert planned.adapters.size_bytes >= 2 * sizes
    held = planned.model.weight_bytes + planned.kv.size_bytes + planned.adapters.size_bytes
    assert planned.memory_bytes == held
    taken = (without.kv.num_blocks - planned.kv.num_blocks) * without.kv.block_bytes
    fraction = planned.adapters.size_bytes * DEFAULT_FRACTION
    assert taken == pytest.approx(fraction, abs=2 * without.kv.block_bytes)
    (row,) = [row for row in planned.rows() if row[0] == "adapters"]
    assert row[1] == f"1, {planned.adapters.size_bytes / 2**20:.1f} MiB"
    assert "cannot be read: b" in row[2]
    assert "loaded while serving are not counted" in row[2]


def test_the_served_context_chooses_the_factors_of_a_longrope(tmp_path):
    """Asked for, the model's own, or what fits: what is loaded and what is told is one choice."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=256,
        rope_parameters=rope | factors,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    cases = (
        ({}, 256, "long"),
        ({"max_model_len": 65}, 65, "long"),
        ({"max_model_len": 64}, 64, "short"),
        ({"num_kv_blocks": 4, "block_size": 16}, 64, "short"),
    )
    for wish, context, length in cases:
        planned = plan_engine(ModelConfig(path=str(tmp_path)), EngineConfig(**wish))
        assert planned.config.max_model_len == context
        assert planned.model.rope_factors == {"0": f"{length}_factor"}
        (row,) = [row for row in planned.rows() if row[0] == "RoPE"]
        assert row[1] == f"{length} factors"
        assert "original 64 tokens" in row[2]


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_coded_kv_makes_room_for_more_blocks(kv_dtype):
    def plan_kv(kv_dtype):
        return plan_engine(
            ModelConfig(path="demo", dtype="bfloat16"),
            EngineConfig(kv_dtype=kv_dtype, kv_cache_gib=0.25),
        )

    plain, coded = plan_kv("auto"), plan_kv(kv_dtype)
    head_dim = plain.model.spec.head_dim
    share = (head_dim + 2) / (2 * head_dim)  # A code an item and a scale a row.
    assert coded.layout.bytes_per_token == share * plain.layout.bytes_per_token
    assert coded.kv.num_blocks == int(0.25 * 2**30) // coded.layout.bytes_per_block
    assert coded.kv.num_blocks > 1.7 * plain.kv.num_blocks


@pytest.mark.parametrize(
    "wish", [{"kv_cache_gib": 2.0**20}, {"num_kv_blocks": 10**9}, {"num_kv_blocks": 10**40}]
)
def test_more_kv_than_the_machine_has_is_refused_before_anything_loads(wish):
    with pytest.raises(
        ConfigError, match=f"are more than the machine's .* lower engine.{next(iter(wish))}"
    ):
        plan_engine(ModelConfig(path="demo", dtype="bfloat16"), EngineConfig(**wish))


def test_the_default_context_is_what_fits_and_only_a_wish_is_refused(monkeypatch):
    def plan_context(max_model_len=0):
        config = EngineConfig(max_model_len=max_model_len)
        return plan_engine(ModelConfig(path="demo", dtype="bfloat16"), config)

    whole = plan_context()
    own = whole.model.spec.max_position_embeddings
    assert whole.config.max_model_len == own
    assert whole.kv.max_model_len_reason == "the model's own"
    room = int(10.5 * whole.layout.bytes_per_block / 0.4)
    monkeypatch.setattr(building, "_share_memory", lambda *_: room)
    fitting = plan_context()
    assert fitting.config.max_model_len == 10 * 64 < own
    assert f"what fits of the model's {own}: 10 blocks" in fitting.kv.max_model_len_reason
    assert plan_context(640).config.max_model_len == 640
    with pytest.raises(ConfigError, match=r"one request of 641 tokens, .* lower --max-model-len"):
        plan_context(641)
    with pytest.raises(ConfigError, match=f"knows {own} positions: lower --max-model-len"):
        plan_context(own + 1)
    room = -1
    # Experts that are no packed codes cannot stay on disk.
    plain = ModelConfig(path="demo", dtype="bfloat16", expert_format="none")
    with pytest.raises(ConfigError, match="cannot hold one request"):
        plan_engine(plain, EngineConfig())


@pytest.fixture(scope="module")
def build():
    def build_one(kv_dtype, expert_parts=0, kv_sharing: KvSharing = "relaxed"):
        model = ModelConfig(path="demo", dtype="bfloat16", expert_parts=expert_parts)
        config = EngineConfig(
            kv_dtype=kv_dtype,
            kv_sharing=kv_sharing,
            num_kv_blocks=24,
            max_model_len=256,
            threads=1,
        )
        return build_engine(model, config, ManualClock())

    return build_one


def generate(engine, request_id, prompt, salt=""):
    """Return the tokens of a greedy request, and how many of its prompt were cached."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add(
        AddRequest(request_id=request_id, prompt_ids=prompt, sampling=params, cache_salt=salt)
    )
    outputs = []
    for _ in range(50):
        if engine.has_requests:
            outputs += engine.step()
    assert not engine.has_requests
    cached = max(output.cached_len for output in outputs)
    return [token for output in outputs for token in output.token_ids], cached


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_coded_kv_serves_and_is_shared(kv_dtype, build):
    """A prefix in the cache, shared blocks and a copied tail, gives the tokens of an empty one."""
    engine = build(kv_dtype).engine
    prompt = [5 + i * 7 % 300 for i in range(150)]
    first, cached = generate(engine, "first", prompt)
    assert cached == 0
    assert len(first) == 8
    again, cached = generate(engine, "again", prompt)
    assert cached > 128  # Two blocks of 64 and a part of the third.
    assert again == first


@pytest.mark.slow  # tests/core/test_kv_identity.py compares identities field by field.
def test_other_kv_has_other_keys(build):
    wishes = [("bfloat16",), ("float32",), ("int8",), ("fp8",)]
    roots = [build(*wish).identity.root_key() for wish in wishes]
    assert len(set(roots)) == len(wishes)
    assert build("int8").identity.root_key() == roots[2]


def test_parts_share_keys_unless_sharing_is_strict(build):
    one, two = build("bfloat16"), build("bfloat16", 2)
    assert one.identity.root_key() == two.identity.root_key()
    assert one.info.system_fingerprint != two.info.system_fingerprint
    strict = [build("bfloat16", parts, "strict") for parts in (1, 2, 1)]
    roots = [built.identity.root_key() for built in strict]
    assert roots[0] != roots[1]
    assert roots[0] == roots[2]
    assert one.identity.root_key() not in roots
    assert [str(d) for d in strict[0].identity.compare(strict[1].identity)] == [
        "rounding.expert_parts: 1 here, 2 there"
    ]


def test_keys_of_requests_start_from_the_identity(build):
    """What the scheduler looks up is the chain of the identity's root and the request's salt."""
    built = build("bfloat16")
    # `/server_info` shows the plan, with the instruction set.
    [isa] = [value for what, value, _ in built.info.plan if what == "kernels"]
    assert isa in kernel_isas()
    prompt = [5 + i * 7 % 300 for i in range(130)]
    generate(built.engine, "first", prompt)
    index = PrefixIndex(BlockPool(1), 64, built.identity.digest)
    assert index.make_root_key("salt") == built.identity.root_key("salt")
    assert generate(built.engine, "salted", prompt, salt="salt")[1] == 0
    assert generate(built.engine, "again", prompt)[1] == 129


def test_only_mapped_experts_count_once_for_all_instances(monkeypatch):
    """Attention, the head and unpacked experts are in each process: two need them twice."""
    available = 300 << 20
    monkeypatch.setattr(building, "_count_available", lambda _: available)
    asked = []
    real = building.plan_kv_cache

    def look(*args, available_bytes, **options):
        asked.append(available_bytes)
        return real(*args, available_bytes=available_bytes, **options)

    monkeypatch.setattr(building, "plan_kv_cache", look)
    for wish, parts in (("off", 1), ("/kept", 1), ("/kept", 2)):
        config = ModelConfig(
            path="demo", expert_format="int8g32", packed_cache=wish, expert_parts=parts
        )
        model = plan_engine(config, EngineConfig(), num_siblings=2).model
        mapped = model.expert_bytes if (wish, parts) == ("/kept", 1) else 0
        used = 2 * (asked[-1] + model.weight_bytes - mapped) + mapped
        assert model.expert_bytes > 0
        assert available - 2 < used <= available


def test_deferral_is_planned_and_an_answer_is_the_same_when_it_is_computed_again():
    def build_with(num_blocks, deferred_experts):
        return build_engine(
            ModelConfig(path="demo", dtype="float32", deferred_experts=deferred_experts),
            EngineConfig(num_kv_blocks=num_blocks, block_size=16, max_model_len=64, threads=1),
            ManualClock(),
        ).engine

    def answer(engine):
        params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
        for name in "ab":
            prompt = [ord(name) + i * 7 % 300 for i in range(6)]
            engine.add(AddRequest(request_id=name, prompt_ids=prompt, sampling=params))
        outputs = []
        for _ in range(200):
            outputs += engine.step() if engine.has_requests else []
        assert not engine.has_requests
        return [[t for o in outputs if o.request_id == name for t in o.token_ids] for name in "ab"]

    roomy, tight = build_with(16, 2), build_with(5, 2)
    want = answer(roomy)
    assert answer(tight) == want
    assert any(told.num_preemptions for told in tight.list_timelines(["a", "b"]))
    assert answer(build_with(16, 0)) != want
    rows = {what: (value, why) for what, value, why in plan(deferred_experts="auto").rows()}
    assert rows["deferred experts"] == ("0", "no GPU to overlap with")
    with pytest.raises(ConfigError, match="relaxed"):
        plan_engine(ModelConfig(path="demo", deferred_experts=1), EngineConfig(kv_sharing="strict"))
