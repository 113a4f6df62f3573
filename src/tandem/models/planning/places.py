"""The device of each layer's matrices in a plan, condensed for ``/server_info``. Pure."""

from collections.abc import Iterable
from itertools import groupby

from tandem.core.model.plan import LayerSpec, MatrixPlan, ModelPlan, MoeSpec
from tandem.core.wire import PlacedLayers, PlacedPart

__all__ = ["list_placed_layers"]

DISK = "disk"
"""Device name for routed experts of which memory holds only some."""
_MIXERS = {
    "gqa": "attention",
    "mla": "latent attention",
    "gated_delta": "gated delta rule",
    "kimi_delta": "Kimi delta attention",
    "short_conv": "short convolution",
    "mamba2": "state space",
}


def list_placed_layers(plan: ModelPlan) -> list[PlacedLayers]:
    """Return the layers in order, with runs of layers placed alike as one entry.

    Embedding and head, which belong to no layer, come last.
    """
    is_on_disk = plan.tier is not None
    described = [
        (layer.index, _name(layer), _sum_up(layer.matrices, is_on_disk=is_on_disk))
        for layer in plan.layers
    ]
    placed: list[PlacedLayers] = []
    for (kind, parts), group in groupby(described, key=lambda each: each[1:]):
        indexes = [index for index, _, _ in group]
        placed.append(
            PlacedLayers(first=indexes[0], num_layers=len(indexes), kind=kind, parts=parts)
        )
    others = _sum_up(plan.other_matrices, is_on_disk=False)
    if others:
        placed.append(PlacedLayers(first=-1, num_layers=1, kind="embedding, head", parts=others))
    return placed


def _name(layer: LayerSpec) -> str:
    words: list[str] = []
    if layer.mixer is not None:
        mixer = str(layer.mixer.__struct_config__.tag)
        words.append(_MIXERS.get(mixer, mixer))
    if layer.mlp is not None:
        mlp = layer.mlp
        words.append(f"{mlp.num_experts} experts" if isinstance(mlp, MoeSpec) else "MLP")
    return ", ".join(words)


def _sum_up(matrices: Iterable[MatrixPlan], *, is_on_disk: bool) -> list[PlacedPart]:
    sizes: dict[tuple[str, str, str], int] = {}
    for matrix in matrices:
        device = DISK if is_on_disk and matrix.role == "experts" else matrix.device
        key = (matrix.role, device, matrix.weight_format)
        sizes[key] = sizes.get(key, 0) + matrix.size_bytes
    return [
        PlacedPart(role=role, device=device, weight_format=weight_format, size_bytes=size)
        for (role, device, weight_format), size in sizes.items()
    ]
