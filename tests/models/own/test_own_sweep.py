"""Goal: of all decoder classes of transformers, at least 88 % are served, and none is served wrong.

Method: the list of ``test_sweep``. Those that operators do not run are proved by transformers' own
modules with a tiny model of the class's default configuration, and refused with a reason if that
fails. Eager in float64 is the oracle.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from published import PUBLISHED, make_published
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quick import rest_slow
from tandem.cli.commands.verify import verify
from tandem.core.errors import UnsupportedError
from tandem.core.model.plan import WHOLE_PROMPT
from tandem.models.families import FAMILIES
from tandem.models.own import caches
from tandem.models.own.classes import IN_PIECES, WHOLE_PROMPTS
from tandem.models.own.prove import prove_own
from tandem.models.own.shrink import list_tiny
from tandem.models.proof.prove import prove_config
from tandem.models.proof.shrink import NUM_TOKENS, require_crossed

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

from test_sweep import BROKEN_DEFAULTS, SERVED

MIN_SHARE = 0.88
DECODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
]
"""Classes that are encoders unless their configuration says otherwise."""
SETTINGS = {
    # As MiniMax-Text-01, whose first layers keep no KV.
    "minimax": {
        "num_hidden_layers": 80,
        "layer_types": ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)],
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 1, "clip_qkv": 8.0}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
        }
    },
}
"""Fields that a class leaves open and every checkpoint of it has."""
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - BROKEN_DEFAULTS)


def make_config(name):
    fields = SETTINGS.get(name, {}) | ({"is_decoder": True} if name in DECODERS else {})
    return CONFIG_MAPPING[name](**fields)


def read_page():
    """Return the names of the reference page that are called proved."""
    text = (Path(__file__).parents[3] / "docs/reference/models.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `\w+For", text, re.MULTILINE)
    own = text.partition("- Proved by transformers' own modules")[2].partition("\n- ")[0]
    found = re.findall(r"`([\w-]+)`", own)
    return sorted({*table, *found})


def test_the_lists_are_of_the_classes_and_enough():
    served = {*SERVED, *IN_PIECES, *WHOLE_PROMPTS}
    assert served <= set(NAMES)
    assert read_page() == sorted({*FAMILIES, *IN_PIECES, *WHOLE_PROMPTS})
    assert len(served) >= MIN_SHARE * len(NAMES)


def test_a_prompt_crosses_each_length_that_a_class_names():
    """A window, a chunk, a floor or an original length beyond it would hide what comes after."""
    for name in (*IN_PIECES, *WHOLE_PROMPTS):
        for tiny in list_tiny(make_config(name)):
            require_crossed(tiny)
    tiny = next(list_tiny(make_config("gpt_neo")))
    tiny.window_size = NUM_TOKENS + 1
    with pytest.raises(UnsupportedError, match="window_size is 53 in the tiny model"):
        require_crossed(tiny)
    # The operators' tiny models know fewer names, and give way to transformers' own modules.
    assert "keep_window_size is 2048" in prove_config(make_config("doge")).problem


def test_a_cache_that_forgets_is_refused(monkeypatch):
    """The mutant goes on without what the sequence before a piece gave."""
    extend = caches.SequenceCache.extend

    def forget(self, *args, **fields):
        rows = extend(self, *args, **fields)
        self.past = None
        return rows

    monkeypatch.setattr(caches.SequenceCache, "extend", forget)
    proof = prove_own(CONFIG_MAPPING["gpt2"](n_layer=1, n_embd=32, n_head=2))
    assert "computes something else" in proof.problem


def test_positions_are_told_where_the_first_layer_keeps_no_kv():
    """Its cache object says that it has seen no token; so it makes masks of pieces as well, which
    stay wrong.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    kinds = ["linear_attention", "full_attention"]
    proof = prove_own(CONFIG_MAPPING["minimax"](**sizes, **heads, layer_types=kinds))
    assert proof.problem == ""
    assert proof.piece == WHOLE_PROMPT


@pytest.mark.parametrize("name", rest_slow(["llama"], read_page()))
def test_verify_proves_each_name_of_the_page(name, tmp_path, capsys):
    """Who reads a name there and runs ``tandem verify`` must not be told that it is refused."""
    families = {model_type: key for key, (model_type, _) in reversed(PUBLISHED.items())}
    model_type = "deepseek_v3" if name == "kimi_k2" else name
    is_ours = name in FAMILIES
    config = make_published(families[model_type]) if is_ours else make_config(name)
    names = {n: family.architecture for n, family in FAMILIES.items()}
    architecture = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | names)[name]
    config.architectures = [architecture if isinstance(architecture, str) else architecture[0]]
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": name}))
    verify(str(tmp_path), again=True, json=True)
    told = json.loads(capsys.readouterr().out)
    is_proved = told.get("is_proved", False)
    assert is_proved if is_ours else is_proved or told["own_modules"]["is_proved"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SERVED])
def test_every_other_decoder_is_served_by_its_own_modules_or_refused(name):
    proof = prove_own(make_config(name))
    assert proof.is_proved is (name in {*IN_PIECES, *WHOLE_PROMPTS}), proof.problem
    if proof.is_proved:
        assert proof.piece == (WHOLE_PROMPT if name in WHOLE_PROMPTS else 0)
