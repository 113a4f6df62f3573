"""Goal: a gpt-oss checkpoint as it is published, experts in mxfp4, runs as its weights say.

Method: a random model's experts are coded by a naive coder of this file and stored in the published
layout; transformers' own model with the decoded weights, in float64, is the oracle. Hostile headers
and codes are refused by name.
"""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tandem._native import ThreadPool
from tandem.core.errors import NotFoundError, ShapeError, UnsupportedError
from tandem.kernels import tolerance
from tandem.models.codecs.mxfp4 import E2M1, decode_mxfp4
from tandem.models.convert import convert_model
from tandem.models.planning.planner import describe_model, plan_model

IDS = [(37 * i) % 120 + 3 for i in range(70)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 6}
"""All experts chosen, so that no near tie of the router hides an error."""
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def code_mxfp4(weights_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks [N, K / 32, 16], exponents [N, K / 32]): the nearest codes, one by one."""
    groups = weights_NK.double().reshape(len(weights_NK), -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    magnitudes = (scaled.abs()[..., None] - E2M1.double()).abs().argmin(-1)
    codes = (magnitudes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory, make_config, save_model):
    """A folder in the published layout, and transformers' model with the same weights."""
    folder = tmp_path_factory.mktemp("published") / "published"
    reference = save_model(make_config("gpt_oss", **SIZES), folder)
    tensors = load_file(folder / "model.safetensors")
    state = reference.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        coded = [code_mxfp4(weights.t()) for weights in tensors.pop(name)]
        blocks, scales = (torch.stack(part) for part in zip(*coded, strict=True))
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    reference.load_state_dict(state)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, reference


@pytest.fixture
def published(made, tmp_path):
    """Copies of both, which a test may change."""
    folder, reference = made
    return shutil.copytree(folder, tmp_path / "published"), copy.deepcopy(reference)


def measure_excess(logits, reference, dtype):
    """How many times the bound the worst logit is off float64."""
    model = AutoModelForCausalLM.from_config(
        reference.config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.load_state_dict(reference.state_dict())
    model = model.to(dtype).double()
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS])).last_hidden_state[0]
        exact = model.lm_head(hidden).numpy()
    weight = model.lm_head.weight.detach().numpy()
    bound = tolerance.logits(hidden.numpy(), weight, reference.config.num_hidden_layers, dtype)
    return np.max(np.abs(logits.double().numpy() - exact) / bound)


def run(session):
    return torch.cat([session.run(IDS[:40]), session.run(IDS[40:41]), session.run(IDS[41:])])


@pytest.mark.parametrize(
    ("dtype", "expert_format"),
    [
        ("bfloat16", "auto"),
        ("float32", "none"),
        pytest.param("bfloat16", "bf16", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_decoded_weights(dtype, expert_format, published, open_session):
    folder, reference = published
    model = load_checkpoint(folder, dtype=dtype, expert_format=expert_format)
    assert model.is_fused
    assert model.plan.experts.weight_format == {"auto": "mxfp4"}.get(expert_format, expert_format)
    torch_dtype = getattr(torch, dtype)
    assert measure_excess(run(open_session(model)), reference, torch_dtype) <= 1


def test_what_the_published_layout_adds_is_heard(published, open_session, edit_weights):
    """Sinks, biases of experts and router, and either tensor of a weight: each changes logits."""
    folder, _ = published
    expected = run(open_session(load_checkpoint(folder)))
    layer = "model.layers.1"
    names = [f"{layer}.self_attn.sinks", f"{layer}.mlp.router.bias"]
    names += [f"{layer}.mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    names = [*names[:2], *(f"{n}{s}" for n in names[2:] for s in ("_bias", "_blocks", "_scales"))]
    original = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    for name in names:

        def change(tensors, name=name):
            tensors.update(original)
            tensor = tensors[name] = original[name].clone()
            if tensor.dtype == torch.uint8:
                tensor.view(-1)[: 16 * 6] ^= 1
            else:
                tensor += torch.linspace(0, 1, tensor.numel()).view(tensor.shape)

        edit_weights(folder, change)
        assert not torch.equal(run(open_session(load_checkpoint(folder))), expected), name
    edit_weights(folder, lambda tensors: tensors.update(original))
    assert torch.equal(run(open_session(load_checkpoint(folder))), expected)


def test_decoding_is_exact_and_transformers_own():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    for exponent in (0, 1, 100, 127, 200, 250):
        scales = torch.full((16, 1), exponent, dtype=torch.uint8)
        ours = decode_mxfp4(codes, scales)
        low = [float(E2M1[c & 7]) * (-1 if c & 8 else 1) for c in range(256) for c in (c & 15,)]
        assert ours[:, 0::2].flatten().tolist() == [v * 2.0 ** (exponent - 127) for v in low]
        theirs = convert_moe_packed_tensors(codes[None], scales[None], dtype=torch.float32)
        assert torch.equal(ours, theirs[0].t())
        assert torch.equal(ours, ours.bfloat16().float())
    assert decode_mxfp4(codes, torch.full((16, 1), 255, dtype=torch.uint8)).isnan().all()


def test_packing_mxfp4_again_loses_nothing(published):
    """The packer chooses scales of its own; what it holds must be what was stored."""
    folder, reference = published
    model = load_checkpoint(folder)
    ours = model.skeleton.model.layers[0].mlp.experts
    theirs = reference.model.layers[0].mlp.experts.bfloat16()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 64, generator=generator).bfloat16()
    ids = torch.tensor([[0, 3], [5, 1], [-1, 2], [4, 4], [2, 0]])
    weights = torch.rand(5, 2, generator=generator)
    plain = load_checkpoint(folder, expert_format="bf16").skeleton.model.layers[0].mlp.experts
    assert torch.equal(ours(x, ids, weights), plain(x, ids, weights))
    safe = ids.clamp(min=0)
    masked = torch.where(ids < 0, 0, weights).bfloat16()
    torch.testing.assert_close(ours(x, ids, weights), theirs(x, safe, masked), rtol=0.1, atol=0.1)


def test_cache_threads_and_parts_change_nothing(published, open_session, tmp_path):
    """Biases are no part of the packed file: a second start must have them all the same."""
    folder, reference = published
    expected = run(open_session(load_checkpoint(folder)))
    cache = tmp_path / "cache"
    report = convert_model(folder, "mxfp4", packed_cache=str(cache), is_verified=True)
    assert (report.weight_format, report.num_packed) == ("mxfp4", 3)
    progress = []
    for threads in (1, 2):
        model = load_checkpoint(
            folder,
            packed_cache=str(cache),
            pool=ThreadPool(threads),
            progress=lambda done, total, _: progress.append((done, total)),
        )
        assert torch.equal(run(open_session(model)), expected)
    assert all(done <= total for done, total in progress)
    split = load_checkpoint(folder, packed_cache=str(cache), expert_parts=2)
    assert split.skeleton.model.layers[0].mlp.experts._experts.num_parts == 2
    assert measure_excess(run(open_session(split)), reference, torch.bfloat16) <= 1


def test_kept_modules_read_the_published_layout(published, open_session, tmp_path):
    """transformers' own experts, fed by our reader, below our block and our layers."""
    folder, reference = published
    path = tmp_path / "rules.yaml"
    path.write_text("- {match: {name: 'experts$'}, replace: {class: default}}")
    model = load_checkpoint(folder, dtype="float32", rules=path)
    assert not model.is_fused
    assert measure_excess(run(open_session(model)), reference, torch.float32) <= 1


def test_reports_say_the_format(published):
    folder, _ = published
    spec = describe_model(folder)
    assert (spec.expert_format, spec.sliding_window, spec.has_sinks) == ("mxfp4", 20, True)
    plan = plan_model(folder)
    notes = {m.module: (m.operator, m.weight_format) for m in plan.modules}
    assert notes["model.layers.0.mlp.experts"] == ("Experts", "mxfp4")
    assert notes["model.layers.0.mlp.router"][0] == "Router"
    assert notes["model.layers.0"][0] == "DecoderLayer"


def test_other_quantizations_are_refused(published, edit_config, checkpoint):
    folder, _ = published
    for wrong in ({"quant_method": "fp8"}, {}, "mxfp4", {"quant_method": ["mxfp4"]}):
        edit_config(folder, quantization_config=wrong)
        with pytest.raises(UnsupportedError, match="quantized"):
            describe_model(folder)
    other = checkpoint("qwen3_moe")
    edit_config(other, quantization_config=QUANTIZATION)
    with pytest.raises(UnsupportedError, match="mxfp4"):
        describe_model(other)


WRONG = {
    "no scales": (lambda t, n: t.pop(f"{n}_scales"), NotFoundError, "_scales' is missing"),
    "scales too short": (
        lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1].contiguous()}),
        ShapeError,
        "_scales' .* has shape",
    ),
    "blocks of another size": (
        lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"][..., :8].contiguous()}),
        ShapeError,
        "_blocks' .* has shape",
    ),
    "blocks in floats": (
        lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"].float()}),
        ShapeError,
        "dtype F32: need one of U8",
    ),
    "a scale of NaN": (
        lambda t, n: t[f"{n}_scales"][0, 0].fill_(255),
        UnsupportedError,
        "not finite",
    ),
    "no bias": (lambda t, n: t.pop(f"{n}_bias"), NotFoundError, "_bias' is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damaged_experts_are_refused(name, published, edit_weights):
    folder, _ = published
    change, error, text = WRONG[name]
    edit_weights(folder, lambda t: change(t, "model.layers.2.mlp.experts.down_proj"))
    with pytest.raises(error, match=text):
        load_checkpoint(folder)
