"""Goal: attention that chooses its tokens is bitwise one model, however a sequence was computed.

Method: a tiny DeepSeek-V3.2 and a tiny GLM-5, whose layers share an index, run whole, in chunks, in
company, on one thread and two, after a prefix that was copied, with every type of KV. Below the
limit they are compared with the same weights without an index; above it a token that no layer chose
is changed in the cache, which changes nothing.
"""

import pytest
import torch
from loading import load_checkpoint

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.core.errors import UnsupportedError
from tandem.core.spec import MlaLayout
from tandem.kernels.paged import PagedBatch
from tandem.models.planning.planner import describe_model, plan_model

TOP = 21
PROMPT = [(7 * i * i + 3) % 120 + 3 for i in range(75)]
OTHERS = [[(7 * i + 11 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((1, 33, 40), 1)]
INDEX = {"index_topk": TOP, "index_n_heads": 8, "index_head_dim": 24}
FAMILIES = {
    "deepseek_v32": INDEX,
    "glm_moe_dsa": {
        **INDEX,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
}
KINDS = [
    ("deepseek_v32", "float32", "auto"),
    ("deepseek_v32", "bfloat16", "int8"),
    ("glm_moe_dsa", "bfloat16", "auto"),
    ("glm_moe_dsa", "bfloat16", "fp8"),
]


@pytest.fixture
def folder(checkpoint):
    def make(family, **changes):
        sizes = {"hidden_size": 64, "intermediate_size": 64, **FAMILIES[family], **changes}
        return checkpoint(family, **sizes)

    return make


@pytest.mark.parametrize(("family", "dtype", "kv_dtype"), rest_slow([KINDS[0], KINDS[3]], KINDS))
def test_one_model_in_every_regime(family, dtype, kv_dtype, folder, open_session):
    path = folder(family)
    model = load_checkpoint(path, dtype=dtype, pool=ThreadPool(2))
    assert model.is_fused

    def open_own(loaded=model, **options):
        cache = loaded.allocate_kv(64, block_size=16, kv_dtype=kv_dtype)
        return open_session(loaded, cache=cache, **options)

    whole = open_own().run(PROMPT)
    for sizes in ([30, 1, 44], [1] * 75):
        session = open_own()
        pieces = [session.run(list(piece)) for piece in torch.tensor(PROMPT).split(sizes)]
        assert torch.equal(whole, torch.cat(pieces)), sizes
    cache = model.allocate_kv(64, block_size=16, kv_dtype=kv_dtype)
    prompts = [PROMPT, *OTHERS]
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(prompts))]
    sessions = [open_session(model, cache=cache, table=table) for table in tables]
    chunks = [s.chunk(prompt) for s, prompt in zip(sessions, prompts, strict=True)]
    together = model.forward(PagedBatch.build(chunks, 16), cache)
    assert torch.equal(together[: len(PROMPT)], whole)
    # As the prefix cache does: whole blocks shared, and the last one's first tokens copied.
    cache.copy_block(3, 40, 7)
    resumed = open_session(model, cache=cache, table=[0, 1, 2, 40, 41])
    resumed.length = 3 * 16 + 7
    assert torch.equal(resumed.run(PROMPT[resumed.length :]), whole[3 * 16 + 7 :])
    alone = load_checkpoint(path, dtype=dtype, pool=ThreadPool(1))
    assert torch.equal(open_own(alone).run(PROMPT), whole)
    model._fused = None
    assert torch.equal(open_own().run(PROMPT), whole)


def test_below_the_limit_it_is_the_model_without_an_index(
    folder, checkpoint, edit_config, edit_weights, open_session
):
    path = folder("deepseek_v32")
    sparse = load_checkpoint(path, dtype="bfloat16")
    edit_weights(path, lambda t: [t.pop(name) for name in list(t) if ".indexer." in name])
    without = dict.fromkeys((*INDEX, "layer_types", "mlp_layer_types"))
    names = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    edit_config(path, **names, **without)
    dense = load_checkpoint(path, dtype="bfloat16")
    ours, theirs = (open_session(model).run(PROMPT) for model in (sparse, dense))
    assert torch.equal(ours[:TOP], theirs[:TOP])
    assert not torch.equal(ours[TOP:], theirs[TOP:])


def test_what_no_index_chose_is_not_read(folder, open_session):
    """NaN in the latent of a token that is not chosen would show in any sum."""
    model = load_checkpoint(folder("deepseek_v32", num_hidden_layers=1), dtype="float32")
    session = open_session(model, table=list(range(24)))
    session.run(PROMPT)
    cache, changed = session.cache, 0
    want = session.run([5])
    for position in range(len(PROMPT)):
        session.length = len(PROMPT)
        row = cache.slots[0][position // 16, position % 16]
        kept = row.clone()
        row.fill_(float("nan"))
        changed += not torch.equal(session.run([5]), want)
        row.copy_(kept)
    # The token itself is one of those that it may choose.
    assert TOP - 1 <= changed <= TOP


def test_blocks_have_index_keys_in_the_layers_that_choose(folder):
    path = folder("glm_moe_dsa")
    spec = describe_model(path)
    assert (spec.index_dim, spec.index_layers) == (24, (0, 2))
    model = load_checkpoint(path, dtype="bfloat16")
    for kv_dtype, item, scale in (("bfloat16", 2, 0), ("int8", 1, 2)):
        layout = model.kv_layout(16, kv_dtype)
        assert isinstance(layout, MlaLayout)
        latents, keys = 40 * item + scale, 24 * item + scale
        assert layout.bytes_per_token == 4 * latents + 2 * keys
        slices = [layout.layer_slice(1, layer) for layer in range(4)]
        assert slices[0].offset == layout.bytes_per_block
        ends = [part.offset + part.length for part in slices]
        assert ends == [*(part.offset for part in slices[1:]), 2 * layout.bytes_per_block]
        assert [part.length // 16 for part in slices] == [latents + keys, latents] * 2


def test_the_plan_counts_the_index(folder):
    path = folder("glm_moe_dsa")
    plan = plan_model(path, dtype="bfloat16")
    model = load_checkpoint(path, dtype="bfloat16")
    assert model.weight_bytes == plan.weight_bytes
    # With queries and latents, with queries, and of its own.
    shapes = {m.role: m.shape for m in plan.matrices if m.module == "model.layers.0.self_attn"}
    assert shapes["qkv"] == (32 + 40 + 24, 64)
    assert shapes["q_up"] == (4 * 24 + 8 * 24, 32)
    assert shapes["gates"] == (8, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "shares a choice that no layer"),
        ({"scoring_func": "softmax"}, "softmax"),
    ],
)
def test_what_does_not_run_is_refused_by_name(changes, words, folder, edit_config):
    path = folder("glm_moe_dsa")
    edit_config(path, **changes)
    with pytest.raises(UnsupportedError, match=words):
        plan_model(path)
