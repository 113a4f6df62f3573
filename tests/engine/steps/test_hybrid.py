"""Goal: a decode step with experts on the host, beside a device, gives bitwise the CPU's tokens.

Method: the demo model, and a tiny DeepSeek-V3 with shared experts and a dense layer, through the
whole engine on a device that is none: its streams are threads, its memory is closed to the host.
Work is held back at seeded moments. Tokens are compared with the same model without a device.
"""

import random
import threading
import time
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="models need the `serve` extra")
transformers = pytest.importorskip("transformers", reason="models need the `serve` extra")

from far_device import FarDevice  # noqa: E402 - after the skip

from quick import rest_slow  # noqa: E402
from tandem.core.clock import MonotonicClock  # noqa: E402
from tandem.core.errors import ConfigError, UnsupportedError  # noqa: E402
from tandem.core.wire import AddRequest, FinishReason, SamplingParams  # noqa: E402
from tandem.engine import planning  # noqa: E402
from tandem.engine.build import build_engine  # noqa: E402
from tandem.engine.config import EngineConfig  # noqa: E402
from tandem.kernels.cpu.experts import NativeExperts  # noqa: E402
from tandem.kernels.cpu.hosted_experts import HostedExperts  # noqa: E402
from tandem.kernels.devices import open_device as open_named  # noqa: E402
from tandem.kernels.fake.device import FakeDevice  # noqa: E402
from tandem.kernels.hybrid import HybridDecoder  # noqa: E402
from tandem.kernels.lanes.loads import PackedLoads  # noqa: E402
from tandem.kernels.lanes.slots import ExpertSlots  # noqa: E402
from tandem.kernels.lanes.streams import ExpertStream  # noqa: E402
from tandem.models.config import ModelConfig  # noqa: E402
from tandem.models.loading import loader  # noqa: E402
from tandem.placement.experts.cache import EXPERT_POLICIES, LruPolicy, StaticPolicy  # noqa: E402

PROMPTS = [[(7 * i * i + 3) % 120 + 3 for i in range(n)] for n in (20, 9, 33)]
LENGTHS = (12, 5, 8)
WAIT_S = 60.0


def save_random(config, path):
    """Write a checkpoint whose matrices keep the size of what passes through."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
            else:
                tensor.normal_(1, 0.1)
    model.save_pretrained(path)
    return path


def make_gemma4():
    """Experts beside MLPs, inputs of each layer, a layer that shares another's KV, windows."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma4TextConfig(
        vocab_size=131,
        vocab_size_per_layer_input=131,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=96,
        num_hidden_layers=4,
        num_kv_shared_layers=1,
        layer_types=kinds,
        sliding_window=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=64,
        max_position_embeddings=512,
    )


def make_llama4():
    """Experts whose inputs the router scales, in some layers, beside shared ones."""
    return transformers.Llama4TextConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=96,
        num_hidden_layers=4,
        moe_layers=[0, 2, 3],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_chunk_size=32,
        max_position_embeddings=512,
        pad_token_id=0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three layers: one dense, two with routed and shared experts."""
    config = transformers.DeepseekV3Config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        max_position_embeddings=512,
    )
    return save_random(config, tmp_path_factory.mktemp("deepseek_v3"))


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    """Return checkpoints by name."""
    made = {"demo": "demo", "deepseek": folder}
    for name, make in (("gemma4", make_gemma4), ("llama4", make_llama4)):
        made[name] = save_random(make(), tmp_path_factory.mktemp(name))
    return made


def build(path, *, deferred=0):
    config = EngineConfig(kv_cache_gib=0.02, block_size=16, max_batch_tokens=64)
    model = ModelConfig(
        path=str(path),
        dtype="bfloat16",
        expert_format="bf16",
        packed_cache="off",
        deferred_experts=deferred,
    )
    return build_engine(model, config, MonotonicClock())


def generate(engine, prompts=PROMPTS, lengths=LENGTHS):
    """Tokens and last output of each prompt; batches shrink as requests end."""
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
    tokens, last = [[] for _ in prompts], {}
    for _ in range(500):
        if not engine.has_requests:
            break
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
            last[int(output.request_id)] = output
    assert not engine.has_requests
    return tokens, [last[i] for i in range(len(prompts))]


@pytest.fixture
def open_device():
    """Return ``open(delay)``: a fake device that is closed after the test."""
    opened = []

    def make(delay=lambda _: None):
        opened.append(FakeDevice(delay))
        return opened[-1]

    yield make
    for device in opened:
        device.close()


def hold_back(seed):
    """Delay some pieces of work by up to two milliseconds."""
    chance = random.Random(seed)
    return lambda _: time.sleep(0.002 * chance.random() if chance.random() < 0.2 else 0)


MODELS = [("demo", 0), ("demo", 2), ("deepseek", 0), ("deepseek", 2), ("gemma4", 0), ("llama4", 0)]
QUICK = [("demo", 0, True), ("deepseek", 2, True)]
QUICK += [("deepseek", 0, False)]


@pytest.mark.parametrize(
    ("model", "deferred", "is_captured"),
    rest_slow(QUICK, [(*model, flag) for model in MODELS for flag in (True, False)]),
)
def test_tokens_are_those_of_the_cpu(folders, open_device, model, is_captured, deferred):
    path = folders[model]
    # The demo model has two experts a token: one of them is deferred.
    deferred = min(deferred, 1) if model == "demo" else deferred
    expected, _ = generate(build(path, deferred=deferred).engine)
    built = build(path, deferred=deferred)
    hybrid = built.model.enable_hybrid(open_device(hold_back(1)), is_captured=is_captured)
    launched = []
    queue = HybridDecoder._queue
    hybrid._queue = lambda batch, n: (launched.append(batch.size), queue(hybrid, batch, n))
    for _ in range(2):
        assert generate(built.engine)[0] == expected
    # Three live tokens use the graph of four; each size is captured once.
    assert set(launched) == {1, 2, 4}
    assert (len(launched) == 3) == is_captured
    hybrid.close()


def test_the_host_computes_living_rows_from_places_that_stay(folder, open_device, monkeypatch):
    built = build(folder)
    seen = []
    run = NativeExperts.run

    def note(self, x, ids, weights, out):
        if threading.current_thread().name.startswith("tandem-hybrid"):
            seen.append((len(x.tensor), x.tensor.data_ptr(), out.tensor.data_ptr()))
        run(self, x, ids, weights, out)

    monkeypatch.setattr(NativeExperts, "run", note)
    hybrid = built.model.enable_hybrid(open_device())
    generate(built.engine)
    by_rows = {rows: {s[1:] for s in seen if s[0] == rows} for rows in (1, 2, 3)}
    assert {s[0] for s in seen} == {1, 2, 3}
    # Two layers with experts take turns.
    assert all(len(places) == 2 for places in by_rows.values())
    hybrid.close()


def test_shared_experts_run_while_the_host_computes(folder, open_device, monkeypatch):
    """The host's experts do not end before the device has run the shared ones."""
    is_shared_done = threading.Event()
    built = build(folder)
    expected, _ = generate(build(folder).engine)
    run, run_shared = NativeExperts.run, HybridDecoder._run_shared
    num_overlapped = []

    def wait(self, x, ids, weights, out):
        if threading.current_thread().name.startswith("tandem-hybrid"):
            assert is_shared_done.wait(WAIT_S)
            is_shared_done.clear()
            num_overlapped.append(1)
        run(self, x, ids, weights, out)

    def note(self, batch):
        run_shared(self, batch)
        is_shared_done.set()

    monkeypatch.setattr(NativeExperts, "run", wait)
    monkeypatch.setattr(HybridDecoder, "_run_shared", note)
    hybrid = built.model.enable_hybrid(open_device())
    assert generate(built.engine)[0] == expected
    assert len(num_overlapped) > 10
    hybrid.close()


@pytest.mark.parametrize("deferred", rest_slow([2], [0, 2]))
def test_what_a_worker_raises_is_its_requests_error(folder, open_device, monkeypatch, deferred):
    """Layer 2's experts fail for one request's token at its third step; the others go on."""
    expected, _ = generate(build(folder, deferred=deferred).engine)
    built = build(folder, deferred=deferred)
    marked = built.model.skeleton.model.layers[2].mlp.experts
    bad_rows = []
    run = NativeExperts.run

    def fail(self, x, ids, weights, out):
        if self is marked and threading.current_thread().name.startswith("tandem-hybrid"):
            rows = [row.tolist() for row in x.tensor[:, :4].float()]
            if len(rows) == 3 and len(bad_rows) < 3:
                bad_rows.append(rows[1])
            if len(bad_rows) == 3 and bad_rows[-1] in rows:
                raise ValueError("a worker broke")
        run(self, x, ids, weights, out)

    monkeypatch.setattr(NativeExperts, "run", fail)
    hybrid = built.model.enable_hybrid(open_device(hold_back(2)))
    tokens, last = generate(built.engine)
    failed = [output.finish_reason is FinishReason.ERROR for output in last]
    assert failed == [False, True, False]
    assert "a worker broke" in last[1].error_text
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert 0 < len(tokens[1]) < LENGTHS[1]
    assert tokens[1] == expected[1][: len(tokens[1])]
    monkeypatch.setattr(NativeExperts, "run", run)
    assert generate(built.engine)[0] == expected
    hybrid.close()


class Turns:
    """A split that goes through all numbers of uploads, whatever the times."""

    def __init__(self):
        self.num_chosen, self.noted = 0, []

    def choose(self, num_missed):
        self.num_chosen += 1
        return num_missed * (self.num_chosen % 5) // 4

    def note(self, *times):
        self.noted.append(times)


@pytest.mark.parametrize(
    ("deferred", "is_captured"),
    rest_slow([(2, True)], [(0, True), (0, False), (2, True), (2, False)]),
)
def test_no_bit_depends_on_which_experts_are_uploaded(folder, open_device, is_captured, deferred):
    expected, _ = generate(build(folder, deferred=deferred).engine)
    built, turns = build(folder, deferred=deferred), Turns()
    hybrid = built.model.enable_hybrid(
        open_device(hold_back(3)), is_captured=is_captured, split=turns
    )
    for _ in range(2):
        assert generate(built.engine)[0] == expected
    counts = {(num_host == 0, num_uploaded == 0) for num_host, _, num_uploaded, _ in turns.noted}
    assert {(False, True), (False, False)} <= counts
    assert all(t >= 0 for _, host_s, _, upload_s in turns.noted for t in (host_s, upload_s))
    hybrid.close()


# The orders that policies make are placement's own tests; these differ in deferral and capture.
@pytest.mark.parametrize("policy", rest_slow(["lru"], [*EXPERT_POLICIES, "static"]))
def test_no_bit_depends_on_which_experts_stay_and_a_replay_hits_as_often(
    folder, open_device, policy
):
    """Experts stay on the device in three of eight slots, and are computed there or on the host."""
    num_slots, deferred = 3, 2 * (policy == "lru")
    make_policy = {
        **{name: partial(make, num_slots) for name, make in EXPERT_POLICIES.items()},
        "static": partial(StaticPolicy, num_slots, [0, 9, 1, 8, 2, 7, 3, 6]),
    }[policy]
    expected, _ = generate(build(folder, deferred=deferred).engine)
    built = build(folder, deferred=deferred)
    hybrid = built.model.enable_hybrid(
        open_device(hold_back(4)),
        split=Turns(),
        is_captured=policy != "frequency",
        num_slots=num_slots,
        make_policy=make_policy,
    )
    trace = {}
    admit = ExpertSlots.admit

    def record(self, expert_ids, max_uploads):
        trace.setdefault(self, []).append((list(expert_ids), max_uploads))
        return admit(self, expert_ids, max_uploads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertSlots, "admit", record)
        for _ in range(2):
            assert generate(built.engine)[0] == expected
    hits = misses = 0
    for steps in trace.values():
        replayed, held = make_policy(), set()
        for expert_ids, max_uploads in steps:
            hits += len(held.intersection(expert_ids))
            misses += len(set(expert_ids) - held)
            for expert_id, evicted in replayed.touch(expert_ids, max_uploads):
                held.discard(evicted)
                held.add(expert_id)
    assert built.model.count_expert_hits() == (hits, misses)
    assert hits and misses
    assert built.read_expert_hits().num_expert_hits == hits
    hybrid.close()


def test_slots_are_right_after_a_step_has_failed(folder, open_device, monkeypatch):
    """An expert of the host raises, then one cannot be staged, then the device itself fails."""
    built = build(folder)
    expected, _ = generate(build(folder).engine)
    hybrid = built.model.enable_hybrid(
        open_device(), split=Turns(), num_slots=3, make_policy=partial(LruPolicy, 3)
    )
    calls = []

    def break_off(original, error):
        def run(*arguments):
            calls.append(1)
            if len(calls) == 7:
                raise error
            return original(*arguments)

        return run

    kinds = (
        (NativeExperts, "run", ValueError("no expert")),
        (PackedLoads, "stage", ValueError("no staging")),
        (PackedLoads, "run_pairs", ValueError("no device")),
    )
    for kind, name, error in kinds:
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, break_off(getattr(kind, name), error))
            # A step that fails is repeated in halves, which go well.
            assert generate(built.engine)[0] == expected
            assert len(calls) > 7
    assert generate(built.engine)[0] == expected
    assert built.model.count_expert_hits()[0] > 0
    hybrid.close()


def test_an_expert_that_cannot_be_staged_is_an_error_and_the_next_step_runs(
    folder, open_device, monkeypatch
):
    built = build(folder)
    expected, _ = generate(build(folder).engine)
    hybrid = built.model.enable_hybrid(open_device(), split=Turns())
    stage, num_staged = PackedLoads.stage, []

    def fail(self, expert_id, place):
        num_staged.append(1)
        if len(num_staged) == 5:
            raise ValueError("no staging")
        stage(self, expert_id, place)

    monkeypatch.setattr(PackedLoads, "stage", fail)
    # A step that fails is repeated in halves, which go well.
    assert generate(built.engine)[0] == expected
    assert len(num_staged) > 5
    hybrid.close()


def test_models_without_packed_experts_are_refused(open_device):
    config = EngineConfig(kv_cache_gib=0.02, block_size=16)
    model = ModelConfig(path="demo", dtype="float32", expert_format="none", packed_cache="off")
    built = build_engine(model, config, MonotonicClock())
    with pytest.raises(UnsupportedError, match="routed experts in a weight format"):
        built.model.enable_hybrid(open_device())


# A model on a device, from its configuration.


@pytest.fixture
def far(monkeypatch):
    with FarDevice() as device:
        for module in (planning, loader):
            monkeypatch.setattr(module, "open_device", lambda _name: device)
        yield device


def build_far(path, *, deferred=0, **settings):
    config = EngineConfig(kv_cache_gib=0.02, block_size=16, max_batch_tokens=64)
    model = ModelConfig(
        path=str(path),
        device="cuda",
        dtype="float32",
        packed_cache="off",
        deferred_experts=deferred,
        **settings,
    )
    return build_engine(model, config, MonotonicClock())


def test_tokens_are_those_of_the_host(far):
    config = EngineConfig(kv_cache_gib=0.02, block_size=16, max_batch_tokens=64)
    model = ModelConfig(path="demo", dtype="float32", packed_cache="off")
    expected, _ = generate(build_engine(model, config, MonotonicClock()).engine)
    built = build_far("demo")
    experts = [m for m in built.model.skeleton.modules() if isinstance(m, HostedExperts)]
    assert experts
    before = far.num_copies
    assert generate(built.engine)[0] == expected
    assert far.num_copies > before


@pytest.mark.parametrize(("model", "deferred"), rest_slow([("deepseek", 2)], MODELS[2:]))
def test_a_decode_that_waits_for_no_expert_gives_the_same_bits(far, folders, model, deferred):
    built = build_far(folders[model], deferred=deferred)
    assert built.model._hybrid is not None
    found = generate(built.engine)
    built = build_far(folders[model], deferred=deferred)
    built.model._hybrid.close()
    built.model._hybrid = None
    assert generate(built.engine)[0] == found[0]


def test_experts_that_stay_are_planned_and_counted(far, folder):
    """From the configuration: rows of the plan, their memory before that of KV, hits as metrics."""
    expected = generate(build_far(folder).engine)[0]
    built = build_far(folder, device_experts=3, expert_policy="frequency")
    assert any(
        row[0] == "experts on the device" and "3 a layer" in row[1] for row in built.info.plan
    )
    assert generate(built.engine)[0] == expected
    found = built.read_expert_hits()
    assert found.num_expert_hits > 0
    assert found.num_expert_misses > 0
    # All eight, though more were asked for.
    assert build_far(folder, device_experts=500).model._lane.find_slots(1).num_slots == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_uploads": 0}, "max_uploads of 1"),
        ({"expert_format": "none"}, "in a weight format"),
        ({"expert_device": "cuda"}, "on the cpu"),
    ],
)
def test_experts_that_nothing_brings_are_refused(far, folder, settings, words):
    with pytest.raises(ConfigError, match=words):
        build_far(folder, device_experts=2, **settings)


def test_more_experts_than_the_device_holds_are_refused(far, folder):
    plan = build_far(folder, device_experts=2).model.plan
    far.free_bytes = 2 * (plan.weight_bytes - plan.host_bytes) + 1000
    with pytest.raises(ConfigError, match="keep fewer"):
        build_far(folder, device_experts=8)


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(far):
    far.free_bytes = 1000
    with pytest.raises(ConfigError, match="GiB of weights for cuda"):
        build_far("demo")


def test_a_device_that_is_not_here_is_named():
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(UnsupportedError, match="libcuda"):
        open_named("cuda:0")


def test_a_prompt_whose_experts_are_streamed_gives_the_same_bits(far, folder):
    """Ranges of one, two and all experts of a layer; prompts of 20, 9 and 33 tokens from 16 on."""
    expected, _ = generate(build_far(folder, stream_tokens=0).engine)
    for num_experts in (1, 2, 100):
        built = build_far(folder, stream_tokens=0)
        size = built.model.hosted[0].native.view_packed().shape[1]
        stream = built.model.enable_stream(16, range_bytes=num_experts * size)
        sizes = []

        def note(layer, x, ids, weights, sizes=sizes, stream=stream):
            sizes.append((layer, len(x)))
            return ExpertStream.run(stream, layer, x, ids, weights)

        stream.run = note
        for _ in range(2):
            assert generate(built.engine)[0] == expected
        assert sizes
        assert {layer for layer, _ in sizes} == {0, 1}
        assert min(rows for _, rows in sizes) >= 16
        stream.close()


def test_a_range_that_cannot_be_staged_is_an_error_and_the_next_step_runs(far, folder, monkeypatch):
    built = build_far(folder, stream_tokens=16)
    expected, _ = generate(build_far(folder, stream_tokens=0).engine)
    stage, num_staged = PackedLoads.stage, []

    def fail(self, expert_id, place):
        num_staged.append(1)
        if len(num_staged) == 12:
            raise ValueError("no staging")
        stage(self, expert_id, place)

    monkeypatch.setattr(PackedLoads, "stage", fail)
    # A step that fails is repeated in halves, which go well.
    assert generate(built.engine)[0] == expected
    assert len(num_staged) > 12
