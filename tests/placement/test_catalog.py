"""Goal: what the package knows of machines, models and published speeds is whole and checked."""

import json

import pytest

from tandem.core.errors import ConfigError, NotFoundError
from tandem.placement.catalog import (
    find_hardware,
    find_model,
    list_hardware,
    list_models,
    parse_hardware,
    read_hardware,
    read_published,
)

TALK = {"h800": (80, 3300, 1000), "h20": (96, 4000, 200), "a100": (80, 2039, 312)}


@pytest.mark.parametrize("name", list_hardware())
def test_a_machine_has_prices_and_sources(name):
    spec = find_hardware(name)
    assert spec.price_usd > 0
    for part in (spec.processor, spec.accelerator):
        assert part is None or (part.source and part.price_source)
    assert spec.source
    assert spec.processor is None or spec.memory_gib > 0


@pytest.mark.parametrize(("name", "figures"), TALK.items())
def test_accelerators_of_the_talk_have_its_figures(name, figures):
    part = find_hardware(name).accelerator
    assert (part.memory_gib, part.bandwidth_gbps, part.bf16_tflops) == figures


def test_the_processor_of_the_talk_has_its_figures():
    spec = find_hardware("xeon-spr")
    assert (spec.memory_gib, spec.cpu_bandwidth_gbps) == (512, 320)
    assert spec.price_usd == pytest.approx(8000, rel=0.01)
    # 2048 operations a cycle and core with AMX, 8 times those of AVX-512.
    amx = spec.cpu_tflops(is_int8=True)
    assert amx == pytest.approx(32 * 2.2 * 2048 / 1e3)
    assert amx == 8 * spec.cpu_tflops(is_int8=True, isa="avx512")


def test_a_share_of_a_machine_has_its_cores_and_up_to_all_its_bandwidth():
    share, whole = find_hardware("xeon6430-4090"), find_hardware("xeon6430x2-4090")
    assert share.cores == 8
    assert whole.cores == 64
    assert share.cpu_tflops(is_int8=False) == pytest.approx(whole.cpu_tflops(is_int8=False) / 8)
    assert share.cpu_bandwidth_gbps == pytest.approx(whole.cpu_bandwidth_gbps / 4)


def test_a_file_names_parts_or_describes_them(tmp_path):
    text = "processor: {title: P, cores: 4, ghz: 3, isa: avx2, bandwidth_gbps: 50, price_usd: 1,\n"
    text += "  price_source: shop, source: box}\naccelerator: rtx4090\nnum_accelerators: 2\n"
    text += "memory_gib: 64\n"
    file = tmp_path / "box.yaml"
    file.write_text(text)
    spec = read_hardware(str(file))
    assert (spec.name, spec.cores, spec.num_accelerators) == ("box.yaml", 4, 2)
    assert spec.accelerator == find_hardware("6454s-4090").accelerator
    assert spec.price_usd == 1 + 64 * 5 + 2 * 1599


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "mapping"),
        ("a: [", "YAML"),
        ("processor: z80", "z80"),
        ("accelerator: rtx4090", "go together"),
        ("memory_gib: 3", "a processor or an accelerator"),
        ("processor: epyc-9355\nmemory_gib: -1", "memory_gib"),
        ("processor: epyc-9355\nmemroy_gib: 1", "memroy_gib"),
        ("processor: epyc-9355\nsockets: 0", "sockets"),
        ("#" * (1 << 17), "characters"),
    ],
)
def test_a_wrong_file_is_refused_by_field(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_hardware(text, "box.yaml")


def test_unknown_names_are_refused_with_those_that_exist():
    with pytest.raises(NotFoundError, match="6454s-4090d"):
        read_hardware("nothing")
    with pytest.raises(NotFoundError, match="deepseek-v3"):
        find_model("nothing")


@pytest.mark.parametrize("name", list_models())
def test_a_model_is_a_configuration_that_transformers_takes(name):
    from transformers import AutoConfig

    known = find_model(name)
    assert known.source.startswith("https://huggingface.co/")
    config = AutoConfig.for_model(**known.config)
    for key, value in known.config.items():
        if key not in ("model_type", "architectures", "full_attention_interval"):
            assert getattr(config, key, None) == value, key


def test_published_rows_name_what_is_known():
    published = read_published()
    ids = [row.id for row in published.rows]
    assert len(ids) == len(set(ids)) >= 25
    assert len(published.fitted) == 3
    assert set(published.fitted) < set(ids)
    for row in published.rows:
        assert row.prefill_rate or row.decode_rate, row.id
        machine = find_hardware(row.machine)
        assert row.sockets <= machine.sockets, row.id
        assert row.accelerators <= machine.num_accelerators, row.id
        assert find_model(row.model).config, row.id


def test_the_list_names_every_machine_and_model(capsys):
    from tandem.cli.commands.plan import plan

    plan(list_known=True, json=False, help_all=False)
    text = capsys.readouterr().out
    assert all(name in text for name in list_hardware() + list_models())
    plan(list_known=True, json=True, help_all=False)
    report = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in report["models"]] == list_models()
    assert report["machines"][0]["accelerator"]["price_source"]
