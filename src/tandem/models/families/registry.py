"""The families that were proved in CI, and what is special to the few that differ.

A family without a file of its own is a ``Family`` of defaults: its operators are found by the roles
of its modules (``tandem.models.planning.roles``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.models.families import deepseek, gpt_oss

__all__ = ["FAMILIES", "PROVED_WITH", "Family", "classifies", "find_family", "take_decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is special to a family; sizes are read off its modules."""

    model_type: str
    config_type: str = ""
    """The ``model_type`` of transformers that reads its configuration; empty is its own."""
    composite: str = ""
    """The ``model_type`` of models of this decoder that also take images; only text runs."""
    is_moe: bool = False
    """Whether it has routed experts: for the nearest family that a refusal names."""
    expert_formats: tuple[str, ...] = ()
    """Weight formats in which checkpoints may store experts, by ``quant_method``."""
    find_problem: Callable[[Any], tuple[str, str] | None] | None = None
    """Given transformers' configuration, returns (field, what) that does not run; None: nothing."""

    @property
    def architecture(self) -> str:
        """The class of transformers that generates text; empty if it knows none."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.config_type or self.model_type, "")

    @property
    def classifier(self) -> str:
        """The class that has a head of labels instead; empty if transformers knows none."""
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        )

        name = self.config_type or self.model_type
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name, "")


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama"),
        Family(model_type="mistral"),
        Family(model_type="qwen2"),
        Family(model_type="qwen3"),
        Family(model_type="gemma2"),
        Family(model_type="gemma3_text"),
        Family(model_type="phi3"),
        Family(model_type="glm4"),
        Family(model_type="mixtral", is_moe=True),
        Family(model_type="qwen2_moe", is_moe=True),
        Family(model_type="qwen3_moe", is_moe=True),
        Family(model_type="olmoe", is_moe=True),
        Family(model_type="glm4_moe", is_moe=True),
        Family(model_type="minimax_m2", is_moe=True),
        Family(model_type="deepseek_v2", is_moe=True, find_problem=deepseek.find_problem),
        Family(model_type="deepseek_v3", is_moe=True, find_problem=deepseek.find_problem),
        Family(
            model_type="kimi_k2",
            config_type="deepseek_v3",
            is_moe=True,
            find_problem=deepseek.find_problem,
        ),
        Family(model_type="qwen3_next", is_moe=True),
        Family(model_type="qwen3_5_text", composite="qwen3_5"),
        Family(model_type="qwen3_5_moe_text", composite="qwen3_5_moe", is_moe=True),
        Family(model_type="olmo_hybrid"),
        Family(model_type="gpt_oss", is_moe=True, expert_formats=gpt_oss.EXPERT_FORMATS),
    )
}
"""The families that CI proves, by ``model_type``."""

PROVED_WITH = "5.24"
"""The version of transformers whose eager code CI compares with."""


def take_decoder(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder within that of a model that also takes images.

    Returns: ``raw`` itself where no family here is such a model's decoder.
    """
    composite, inner = raw.get("model_type"), raw.get("text_config")
    family = next((f for f in FAMILIES.values() if f.composite and f.composite == composite), None)
    if family is None or not isinstance(inner, dict):
        return raw
    outer = {name: raw[name] for name in OF_THE_WHOLE if name in raw}
    return {**outer, **inner, "model_type": family.model_type, "architectures": None}


OF_THE_WHOLE = (
    "tie_word_embeddings",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
)
"""Fields that a composite configuration may state for its parts."""


def find_family(model_type: str) -> Family | None:
    """Return the family of a ``model_type``; None where transformers knows no such decoder.

    One that is not in ``FAMILIES`` has to be proved before its first model is loaded.
    """
    family = FAMILIES.get(model_type) or Family(model_type=model_type)
    return family if family.architecture else None


def classifies(config: Any) -> bool:
    """Return whether a configuration's model has a head of labels instead of one of tokens."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
