"""The skeleton: transformers' module tree on the meta device, with our attention plugged in.

No module has weights. Tensors that transformers computes when it builds a module (RoPE frequencies)
are on the meta device too and are replaced with the operator that owns them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.core.errors import ConfigError
from tandem.kernels.interfaces import AttentionRule
from tandem.kernels.native import Buffer
from tandem.kernels.operators.operator import current_step
from tandem.models.deferred_imports import computing_shapes
from tandem.models.families import choose_auto_class, classifies
from tandem.placement.rules import ModuleInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ATTENTION_NAME", "build_skeleton", "list_modules"]

ATTENTION_NAME = "tandem_paged"
"""Name under which our attention is registered in transformers."""


UNSTATED = -1
"""Default for modules that pass no window; None is a module's explicit statement that it
has none.
"""


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = UNSTATED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer of transformers' model over paged KV.

    Shapes: query [1, H, T, d], key and value [1, K, T, d] after RoPE; the result [1, T, H, d].
    """
    assert attention_mask is None, "the skeleton built a mask for an attention it does not know"
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width, value_dim = key.shape[-1], value.shape[-1]
    padded = value if value_dim == width else functional.pad(value, (0, width - value_dim))
    kv = torch.stack((key[0], padded[0])).permute(2, 0, 1, 3)
    step = current_step()
    step.write_kv(layer_idx, kv)
    sinks = None if s_aux is None else Buffer(s_aux.float())
    window = sliding_window
    if window == UNSTATED:
        # Qwen2-MoE's attention applies its window only through the mask, which is not built here,
        # so the window is read from the module.
        window = getattr(module, "sliding_window", None)
    rule = AttentionRule(
        0 if window is None else window, 0.0 if softcap is None else softcap, sinks
    )
    mixed = step.attend(layer_idx, query[0].transpose(0, 1), kv, scale, rule)
    out = mixed.view(1, mixed.shape[0], query.shape[1], -1)
    return (out if value_dim == width else out[..., :value_dim]), None


@computing_shapes()
def build_skeleton(config: Any, attention: str | None = ATTENTION_NAME) -> "PreTrainedModel":
    """Build the model of ``config`` on the meta device.

    Args:
        config: transformers' configuration.
        attention: transformers' name of the attention implementation; None: transformers' choice.
            Ours reads paged KV and has no gradients.

    Raises: ConfigError if transformers cannot build it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend_paged)
    try:
        with torch.device("meta"):
            model = choose_auto_class(config).from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
    except Exception as error:
        # transformers' classes do not check all values, such as a step of 0 between layers or a
        # null width, so any exception may come.
        text = " ".join(str(error).split())[:300]
        what = f"transformers fails: {type(error).__name__}: {text}: is config.json right?"
        raise ConfigError("models.build_skeleton", what) from error
    if classifies(config):
        with torch.device("meta"):
            # A classifier's head replaces the LM head under the name lm_head, where other code
            # looks for the head.
            model.lm_head = nn.Linear(config.hidden_size, config.num_labels, bias=False)
    return model.eval()


def list_modules(model: nn.Module) -> list[ModuleInfo]:
    """Return all modules below the root, depth first, as plain data that placement rules are
    matched with.
    """
    return [
        ModuleInfo(
            name, _path(type(module)), tuple(_path(base) for base in type(module).__mro__[1:])
        )
        for name, module in model.named_modules()
        if name
    ]


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
