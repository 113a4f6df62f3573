"""Goal: sizes are those of the real modules, and the cost model predicts what was published."""

import msgspec
import pytest

from tandem.core.errors import ConfigError
from tandem.placement.catalog import find_hardware, find_model, list_models, read_published
from tandem.placement.costs import ITEM_NORMS, Efficiencies, Placement, decode_time, prefill_time
from tandem.placement.fitting import (
    FITTED,
    fit,
    fit_own,
    median_error,
    predict_row,
    predict_rows,
    read_efficiencies,
)
from tandem.placement.predictions import LARGE_ERROR, explain_figure, render_predictions
from tandem.placement.shape import FORMAT_BYTES, read_shape

EFF = Efficiencies(cpu_bandwidth=0.5, cpu_avx=0.25, cpu_amx=0.25, staging=0.25, handover_us=0)


def shape_of(name):
    return read_shape(find_model(name).config, name)


QUICK = ("deepseek-v2-lite", "qwen3-30b-a3b", "qwen3.6-35b-a3b")
"""One of each kind of attention; the others are large even without weights."""


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in list_models()],
)
def test_weights_are_those_of_transformers_modules(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**find_model(name).config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    # Norms and routers' biases are left out; gpt-oss's router and sinks have more of them.
    assert shape_of(name).num_weights == pytest.approx(count, rel=4e-4)


@pytest.mark.parametrize(
    ("name", "kv", "state_mib"),
    [
        ("deepseek-v3", 61 * 576 * 2, 0),
        ("deepseek-v3.2", 61 * (576 * 2 + 256), 0),
        ("glm-5", 89_856 + 78 * 256, 0),
        ("qwen3-30b-a3b", 96 * 1024, 0),
        ("qwen3-next-80b-a3b", 24_576, 73.7),
        ("qwen3.6-35b-a3b", 20_480, 61.4),
    ],
)
def test_caches_are_those_of_the_tables(name, kv, state_mib):
    shape = shape_of(name)
    assert shape.kv_bytes == kv
    assert shape.state_bytes / 2**20 == pytest.approx(state_mib, abs=0.05)


def test_classes_of_deepseek_v3_are_the_talks():
    shape = shape_of("deepseek-v3")
    assert shape.expert_weights / 1e9 == pytest.approx(654, rel=0.005)
    rest = shape.num_weights - shape.expert_weights
    assert rest / 1e9 == pytest.approx(17, rel=0.02)
    # "~5B for 128K": items, two bytes each.
    assert shape.kv_bytes / 2 * 128 * 1024 / 1e9 == pytest.approx(5, rel=0.1)


def test_windows_and_chosen_tokens_bound_a_cache_and_its_reads():
    shape = shape_of("gpt-oss-120b")
    long, short = shape.count_cache_bytes(100_000), shape.count_cache_bytes(128)
    assert short == 128 * shape.kv_bytes
    assert long == (18 * 100_000 + 18 * 128) * shape.kv_bytes // 36


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_configuration_without_a_field_is_refused_by_its_name(field):
    config = {**find_model("qwen3-30b-a3b").config}
    del config[field]
    with pytest.raises(ConfigError, match=field):
        read_shape(config, "model")


def test_one_tokens_experts_take_their_bytes_over_the_bandwidth():
    spec = find_hardware("6454s-4090d")
    shape = shape_of("deepseek-v3")
    place = Placement(expert_format="int8", dense_format="int4", accelerators=1, sockets=2)
    step = decode_time(spec, shape, place, EFF, users=1, context=1)
    size = 58 * 8 * 3 * 7168 * 2048 * FORMAT_BYTES["int8"]
    assert step.parts.cpu_experts == pytest.approx(size / (614.4e9 * 0.5), rel=1e-6)
    one = msgspec.structs.replace(place, sockets=1)
    half = decode_time(spec, shape, one, EFF, users=1, context=1)
    assert half.parts.cpu_experts == pytest.approx(2 * step.parts.cpu_experts)


def test_deferral_hides_the_gpu_behind_the_cpu_and_no_more():
    spec, shape = find_hardware("6454s-4090d"), shape_of("deepseek-v3")
    place = Placement(expert_format="int8", dense_format="int4", accelerators=1, sockets=2)
    times = [
        decode_time(
            spec, shape, msgspec.structs.replace(place, deferred=d), EFF, users=1, context=1
        )
        for d in range(9)
    ]
    seconds = [step.seconds for step in times]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[8] < seconds[0]
    assert seconds[8] >= times[0].parts.cpu_experts


def test_experts_on_the_gpu_save_the_cpu_their_share():
    spec, shape = find_hardware("8488c-4090-48g"), shape_of("qwen3-30b-a3b")
    cpu = []
    for count in (0, 64, 128):
        place = Placement(
            expert_format="int8", dense_format="bf16", accelerators=1, sockets=2, gpu_experts=count
        )
        step = decode_time(spec, shape, place, EFF, users=1, context=1)
        cpu.append(step.parts.cpu_experts)
        assert (step.parts.gpu_experts > 0) == (count > 0)
    assert cpu[1] == pytest.approx(cpu[0] / 2)
    assert cpu[2] == 0


@pytest.mark.parametrize(("parallel", "passes"), [("tensor", 2), ("expert", 1)])
def test_collectives_move_their_bytes_over_the_link(parallel, passes):
    spec, shape = find_hardware("8468v-8xh800"), shape_of("llama3-70b")
    fields = {"expert_format": "bf16", "dense_format": "bf16", "sockets": 2}
    one = Placement(accelerators=8, parallel=parallel, **fields)
    slow = msgspec.structs.replace(spec.accelerator, peer_link_gbps=1)
    slower = msgspec.structs.replace(spec, accelerator=slow)
    times = [prefill_time(s, shape, one, EFF, tokens=8192).parts.gpu for s in (spec, slower)]
    moved = passes * 7 / 8 * 8192 * 8192 * 2 * 2 * 80
    want = moved / 0.8e9 * (1 - 1 / 200)
    assert times[1] - times[0] == pytest.approx(want, rel=1e-6)


def test_a_pipeline_hands_over_once_between_gpus():
    spec, shape = find_hardware("8468v-8xh800"), shape_of("llama3-70b")
    fields = {"expert_format": "bf16", "dense_format": "bf16", "sockets": 2}
    alone = Placement(accelerators=1, parallel="pipeline", **fields)
    line = msgspec.structs.replace(alone, accelerators=8)
    times = [decode_time(spec, shape, p, EFF, users=4, context=9).seconds for p in (alone, line)]
    passed = 7 * (4 * 8192 * 2 / (200e9 * 0.8) + 10e-6)
    assert times[1] - times[0] == pytest.approx(passed, rel=1e-6)


def test_streamed_experts_cost_their_load_once_a_chunk():
    spec, shape = find_hardware("8488c-4090-48g"), shape_of("minimax-m2")
    place = Placement(
        expert_format="fp8", dense_format="fp8", accelerators=1, sockets=2, prefill="streamed"
    )
    short, long = (prefill_time(spec, shape, place, EFF, tokens=n).parts for n in (512, 16384))
    assert long.stream == pytest.approx(2 * short.stream)
    size = shape.expert_weights * FORMAT_BYTES["fp8"]
    want = size / (31.5e9 * 0.8) + size / (614.4e9 * 0.25)
    assert short.stream == pytest.approx(want, rel=1e-6)
    assert short.cpu_experts == 0


def test_the_fit_gives_the_efficiencies_of_the_file_and_meets_its_rows():
    fitted, kept = fit(), read_efficiencies("published")
    for name in FITTED:
        assert getattr(fitted, name) == pytest.approx(getattr(kept, name), rel=1e-4)
    published = read_published()
    for row in published.rows:
        if row.id in published.fitted:
            for figure in predict_row(row, fitted):
                assert figure.error == pytest.approx(0, abs=1e-6)


def test_plans_count_with_what_our_own_kernels_reach():
    """The file has the medians; two memory channels' worth of decode is near the roofline."""
    assert read_efficiencies() == fit_own()
    kernels = read_efficiencies().formats
    assert all(0.5 < shares.bandwidth < 1 for shares in kernels.values())
    spec, shape = find_hardware("reference"), shape_of("qwen3-30b-a3b")
    place = Placement(
        expert_format="int8", dense_format="int8", is_dense_on_gpu=False, is_attention_on_gpu=False
    )
    step = decode_time(spec, shape, place, read_efficiencies(), users=1, context=128)
    roofline = shape.active_weights * FORMAT_BYTES["int8"] / (spec.cpu_bandwidth_gbps * 1e9)
    assert 0.8 < roofline / step.seconds < 1.0


def test_published_speeds_are_predicted_within_a_quarter_in_the_median():
    figures = [f for f in predict_rows(read_efficiencies("published")) if not f.is_fitted]
    assert len(figures) >= 25
    assert median_error(figures) <= 0.25
    for figure in figures:
        is_large = abs(figure.error) > LARGE_ERROR
        assert bool(explain_figure(figure)) or not is_large, figure
    large = {explain_figure(f) for f in figures if abs(f.error) > LARGE_ERROR}
    assert {explain_figure(f) for f in figures} - {""} == large


def test_the_page_is_what_the_command_prints(request, capsys):
    from tandem.cli.commands.plan import plan

    page = request.config.rootpath / "docs" / "reference" / "predictions.md"
    plan(published=True, json=False, help_all=False)
    assert page.read_text("utf-8") == capsys.readouterr().out == render_predictions()


def test_calls_of_experts_count_where_there_are_experts():
    """And the work between products by tokens, where the plan says how much of it there is."""
    spec = find_hardware("reference")
    place = Placement(
        expert_format="int8", dense_format="int8", is_dense_on_gpu=False, is_attention_on_gpu=False
    )
    plain = read_efficiencies()
    told = msgspec.structs.replace(
        plain, step_us=500.0, layer_us=10.0, experts_us=1000.0, norm_ns=1.0
    )
    for name, calls_us in (("llama3-70b", 500 + 80 * 10), ("qwen3-30b-a3b", 500 + 48 * 1010)):
        shape = shape_of(name)
        times = [
            decode_time(spec, shape, place, eff, users=1, context=64).seconds
            for eff in (plain, told)
        ]
        assert times[1] - times[0] == pytest.approx(calls_us * 1e-6)
    layers = tuple(msgspec.structs.replace(layer, row_items=1000) for layer in shape.layers)
    longer = msgspec.structs.replace(shape, layers=layers)
    ours, without = (
        prefill_time(spec, each, place, told, tokens=100).seconds for each in (longer, shape)
    )
    assert ours - without == pytest.approx(48 * 100 * 1000 * ITEM_NORMS * 1e-9)
