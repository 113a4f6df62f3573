"""Goal: of all decoder classes of transformers, those listed run right, and none runs wrong.

The list is drawn by this rule: every class registered for causal language models, with the
configuration that its class has by default, shrunk. What is not served is refused in words; an
exception of another kind would be a traceback for whoever tries such a model.
"""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tandem.models.families.refused import find_refusal
from tandem.models.proof.prove import prove_config

SERVED = [
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "arcee",
    "aria_text",
    "axk1",
    "bamba",
    "bitnet",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoehybrid",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4_text",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "sarvam_mla",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
]
SETTINGS = {
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 8},
}
"""Fields that a class leaves open and every checkpoint of it has."""
BROKEN_DEFAULTS = {"gemma4_assistant", "musicgen", "musicgen_melody"}
"""Classes that cannot be made without arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - BROKEN_DEFAULTS))
def test_every_decoder_is_served_right_or_refused_in_words(name):
    config = CONFIG_MAPPING[name](**SETTINGS.get(name, {}))
    if find_refusal(config.to_dict()) is not None:
        assert name not in SERVED
        return
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    config.architectures = [architecture if isinstance(architecture, str) else architecture[0]]
    proof = prove_config(config, with_flips=False)
    assert (proof.problem == "") is (name in SERVED), proof.problem
    assert proof.is_proved is (name in SERVED)
