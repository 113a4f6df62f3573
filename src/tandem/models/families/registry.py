"""The families proved in CI, and the special traits of the few that need any.

A family without special traits is a ``Family`` of defaults: its operators are found by the roles of
its modules (``tandem.models.planning.roles``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.models.families import deepseek, gpt_oss, kimi
from tandem.models.families.refused import WITH_STATES

__all__ = [
    "FAMILIES",
    "PROVED_WITH",
    "Family",
    "choose_auto_class",
    "classifies",
    "find_family",
    "take_decoder",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models (a ``model_type`` of transformers): what must be known of it beside its
    modules' sizes.
    """

    model_type: str
    config_type: str = ""
    """transformers' ``model_type`` that reads the family's configuration; empty: the
    family's own.
    """
    composite: str = ""
    """``model_type`` of models with images that contain this decoder; only their text part runs. If
    several decoders share it, the text part's own type decides.
    """
    is_moe: bool = False
    """True if the family has routed experts; used to name the nearest family in a refusal."""
    expert_formats: tuple[str, ...] = ()
    """Values of ``quant_method`` in which checkpoints of the family may store experts."""
    find_problem: Callable[[Any], tuple[str, str] | None] | None = None
    """Function that returns (field, problem) of a configuration that is not supported, or None."""

    @property
    def architecture(self) -> str:
        """Name of the transformers class of the family that generates text; empty if there is
        none.
        """
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

        name = self.config_type or self.model_type
        found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, "")
        # transformers registers some decoders only in the mapping of image-and-text models.
        other = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name, "")
        return found or (other if str(other).endswith("ForCausalLM") else "")

    @property
    def image_class(self) -> str:
        """Name of the transformers class of the family that also takes images; empty if there is
        none.
        """
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(self.composite, "")
        return name if isinstance(name, str) else ""

    @property
    def classifier(self) -> str:
        """Class of transformers with a classification head; empty if there is none."""
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        )

        name = self.config_type or self.model_type
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name, "")


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama"),
        Family(model_type="llama4_text", composite="llama4", is_moe=True),
        Family(model_type="mistral", composite="mistral3"),
        Family(model_type="ministral3", composite="mistral3"),
        Family(model_type="mistral4", composite="mistral3", is_moe=True),
        Family(model_type="qwen2"),
        Family(model_type="qwen3"),
        Family(model_type="gemma2"),
        Family(model_type="gemma3_text"),
        Family(model_type="gemma4_text", composite="gemma4"),
        Family(model_type="gemma4_unified_text", composite="gemma4_unified"),
        Family(model_type="phi3"),
        Family(model_type="glm4"),
        Family(model_type="mixtral", is_moe=True),
        Family(model_type="qwen2_moe", is_moe=True),
        Family(model_type="qwen3_moe", is_moe=True),
        Family(model_type="olmoe", is_moe=True),
        Family(model_type="glm4_moe", is_moe=True),
        Family(model_type="minimax_m2", is_moe=True),
        Family(model_type="mimo_v2_flash", is_moe=True),
        Family(model_type="deepseek_v2", is_moe=True, find_problem=deepseek.find_problem),
        Family(model_type="deepseek_v3", is_moe=True, find_problem=deepseek.find_problem),
        Family(model_type="deepseek_v32", is_moe=True, find_problem=deepseek.find_problem),
        Family(model_type="glm_moe_dsa", is_moe=True, find_problem=deepseek.find_problem),
        Family(
            model_type="kimi_k2",
            config_type="deepseek_v3",
            is_moe=True,
            find_problem=deepseek.find_problem,
        ),
        Family(model_type="kimi_linear", is_moe=True, find_problem=kimi.find_problem),
        Family(model_type="qwen3_next", is_moe=True),
        Family(model_type="qwen3_5_text", composite="qwen3_5"),
        Family(model_type="qwen3_5_moe_text", composite="qwen3_5_moe", is_moe=True),
        Family(model_type="olmo_hybrid"),
        Family(model_type="lfm2"),
        Family(model_type="lfm2_moe", is_moe=True),
        Family(model_type="bamba"),
        Family(model_type="granitemoehybrid", is_moe=True),
        Family(model_type="nemotron_h", is_moe=True),
        Family(model_type="gpt_oss", is_moe=True, expert_formats=gpt_oss.EXPERT_FORMATS),
    )
}
"""Model families that CI proves (compares with transformers on tiny models), by ``model_type``."""

PROVED_WITH = "5.24"
"""Version of transformers whose eager code CI compares our operators with."""


def take_decoder(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text decoder that a configuration describes or contains.

    The family is given by ``model_type``; for a model with images, by its decoder's. If
    transformers does not know the type, the class in ``architectures`` or the auto map may name a
    family with stateful layers.

    Returns: ``raw`` itself if nothing changes, or no supported family is meant.
    """
    name, inner = raw.get("model_type"), raw.get("text_config")
    families = [f for f in FAMILIES.values() if name and f.composite == name]
    own = inner.get("model_type") if isinstance(inner, dict) else None
    family = next((f for f in families if f.model_type == own), next(iter(families), None))
    if family is None and isinstance(name, str):
        known = find_family(name)
        if known is None:
            family = _find_by_class(_list_classes(raw))
        elif known.image_class and known.image_class in _list_classes(raw):
            family = known
    if family is None:
        return raw
    decoder = raw
    if family.composite and isinstance(inner, dict):
        decoder = {name: raw[name] for name in OF_THE_WHOLE if name in raw} | inner
    return decoder | {"model_type": family.model_type, "architectures": None}


def _list_classes(raw: dict[str, Any]) -> list[str]:
    """Return the class names in a configuration, ignoring entries of other types."""
    listed, mapped = raw.get("architectures"), raw.get("auto_map")
    names = list(listed) if isinstance(listed, list) else []
    if isinstance(mapped, dict):
        names += [mapped.get(key) for key in AUTO_CLASSES]
    return [name.rpartition(".")[2] for name in names if isinstance(name, str)]


def _find_by_class(names: list[str]) -> Family | None:
    """Return the stateful family whose class, with or without images, is among the names.

    Other families are found by ``model_type`` only: those are old enough that an unknown type is
    another model.
    """
    families = [FAMILIES[name] for name in WITH_STATES]
    return next(
        (f for name in names for f in families if name in (f.architecture, f.image_class)), None
    )


AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
"""Keys of an auto map, whose values end in a class name; their code is never run."""


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


def choose_auto_class(config: Any) -> Any:
    """Return transformers' auto class that builds the decoder of a configuration object."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def find_family(model_type: str) -> Family | None:
    """Return the family of a ``model_type``; None if transformers knows no such decoder.

    A family outside of ``FAMILIES`` must be proved before its first model is loaded.
    """
    family = FAMILIES.get(model_type) or Family(model_type=model_type)
    return family if family.architecture else None


def classifies(config: Any) -> bool:
    """Return True if a configuration's model has a classification head instead of an LM head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
