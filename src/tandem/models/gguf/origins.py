"""The weights from which the tensors of a GGUF file are made: the inverse of ``names``."""

from dataclasses import dataclass
from typing import Any

from tandem.core.errors import UnsupportedError
from tandem.models.gguf.metadata import read_sizes
from tandem.models.gguf.names import How, Recipe, make_recipes
from tandem.models.loading.skeleton import build_skeleton

__all__ = ["Origin", "list_origins", "list_tensors"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The weight of transformers' model from which a tensor of the GGUF file to write is made."""

    weight: str
    shape: tuple[int, ...]
    """Shape of the weight in transformers' model."""
    recipe: Recipe
    part: int
    """Index of the tensor among those of the recipe."""


class _Names:
    """The tensor names that a model's file may have, as a container for ``make_recipes``; names of
    tensors that combine several others are not in it.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def __contains__(self, name: object) -> bool:
        words = str(name).split(".")
        if words[0] == "blk" and int(words[1]) >= self._num_layers:
            return False
        return "ffn_gate_up_exps" not in words


def list_origins(config: Any) -> dict[str, Origin]:
    """Return the tensors of a model's file in order, with the weights that they are made from.

    Args:
        config: transformers' configuration.

    Raises: UnsupportedError (the model, or one of its weights, cannot be written as GGUF).
    """
    sizes = read_sizes(config)
    recipes = make_recipes(sizes.architecture, _Names(sizes.num_layers))
    origins: dict[str, Origin] = {}
    skeleton = build_skeleton(config)
    stored = {n: b for n, b in skeleton.named_buffers() if n.endswith(".e_score_correction_bias")}
    for name, parameter in [*skeleton.named_parameters(), *stored.items()]:
        recipe = recipes.get(name)
        if recipe is None or recipe.how not in (How.PLAIN, How.UNPERMUTE, How.MINUS_ONE):
            what = f"{name!r} of {config.model_type} has no place in a GGUF file"
            raise UnsupportedError("models.export", f"{what}: use another format")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, tensor in enumerate(recipe.tensors):
            origins[tensor] = Origin(name, tuple(parameter.shape), recipe, part)
    return origins


def list_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by llama.cpp's names, outputs first.

    Raises: the errors of ``list_origins``.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, origin in list_origins(config).items():
        shapes[tensor] = origin.shape
        count = len(origin.recipe.tensors)
        if count > 1:
            experts, outputs, inputs = origin.shape
            shapes[tensor] = (experts, outputs // count, inputs)
    return shapes
