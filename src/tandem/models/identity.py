"""The identity of a loaded model's KV: the facts that decide whether blocks may be shared.

``tandem.core.spec.KvIdentity`` defines the meaning of each field; this module reads the fields from
the configuration and the loaded modules.
"""

import hashlib
import json
from typing import Any

import torch
from torch import nn

from tandem._native import kernel_isas
from tandem.core.spec import (
    KvIdentity,
    KVLayout,
    KvSharing,
    ModelSpec,
    RoundingClass,
    WindowLayout,
)
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.cpu.hosted_experts import HostedExperts
from tandem.kernels.devices import name_arithmetic
from tandem.kernels.native import NATIVE_DTYPES
from tandem.kernels.operators.operator import Operator
from tandem.kernels.paged import TORCH_DTYPES
from tandem.kernels.torch.experts import Experts
from tandem.kernels.weights.formats import find_format
from tandem.kernels.weights.matrix import MatrixSettings
from tandem.models.loading.injection import find_module_format

__all__ = ["IGNORED_CONFIG", "list_config_values", "make_kv_identity"]

IGNORED_CONFIG = {
    "_name_or_path": "where the checkpoint came from",
    "architectures": "one architecture is accepted for each model_type",
    "attention_dropout": "of training",
    "bos_token_id": "which tokens are asked for, not what they give",
    "chunk_size_feed_forward": "in how many pieces transformers multiplies",
    "dtype": "of the stored weights, whose bytes are hashed",
    "eos_token_id": "which token ends a text",
    "id2label": "of classifiers",
    "initializer_range": "of training",
    "is_encoder_decoder": "only decoders are accepted",
    "label2id": "of classifiers",
    "linear_a_log_max": "of training",
    "linear_a_log_min": "of training",
    "linear_dt_init_floor": "of training",
    "linear_dt_max": "of training",
    "linear_dt_min": "of training",
    "output_attentions": "what transformers returns beside logits",
    "output_hidden_states": "what transformers returns beside logits",
    "output_router_logits": "what transformers returns beside logits",
    "pad_token_id": "no padding is computed",
    "problem_type": "of classifiers",
    "return_dict": "how transformers returns logits",
    "router_aux_loss_coef": "of training",
    "tokenizer_class": "text is not KV",
    "transformers_version": "who wrote the file",
    "use_cache": "whether transformers keeps KV of its own",
}
"""Configuration fields that do not affect KV values, with the reason. All other fields count."""

FORMAT_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
"""dtypes whose values a weight format stores exactly, by the format's name."""

IEEE_ISAS = ("plain", "avx2", "avx512_bw", "avx512_vnni")
"""Instruction sets whose native kernels give bitwise equal results; others round pairs of bf16 at
once.
"""


def list_config_values(config: Any) -> dict[str, str]:
    """Return the fields of a transformers configuration that affect values, as JSON."""
    values = config.to_dict()
    return {
        name: json.dumps(values[name], sort_keys=True, default=str)
        for name in sorted(values.keys() - IGNORED_CONFIG.keys())
    }


def make_kv_identity(
    skeleton: nn.Module,
    *,
    weights: str,
    config: dict[str, str],
    spec: ModelSpec,
    layout: KVLayout,
    sharing: KvSharing,
    num_deferred_experts: int = 0,
    rope_factors: dict[str, str] | None = None,
    windows: WindowLayout | None = None,
) -> KvIdentity:
    """Return the identity of the KV that a model computes.

    Args:
        skeleton: the loaded modules, with operators in place.
        weights: digest of ``WeightHasher.result``.
        config: result of ``list_config_values``.
        spec: the model, with the dtype in which it runs.
        layout: layout of the whole model's blocks.
        sharing: the user's policy for sharing.
        num_deferred_experts: deferred experts of a token.
        rope_factors: factors of a LongRoPE in force; None: the model has none.
        windows: blocks of layers with a window; None: they have no blocks of their own.
    """
    formats = _list_formats(skeleton, spec.dtype)
    return KvIdentity(
        weights=weights,
        config=config,
        dtype=spec.dtype,
        formats=formats,
        layout=layout,
        states=spec.state_layout,
        windows=windows,
        num_deferred_experts=num_deferred_experts,
        rope_factors=rope_factors or {},
        sharing=sharing,
        rounding=_find_rounding_class(skeleton, spec, layout, formats),
    )


def _list_formats(skeleton: nn.Module, dtype: str) -> dict[str, str]:
    found = {name: find_module_format(module) for name, module in skeleton.named_modules()}
    names = {
        name: FORMAT_DTYPES.get(weight_format.name, weight_format.name)
        for name, weight_format in found.items()
        if weight_format is not None
    }
    for name, module in skeleton.named_modules():
        if isinstance(module, Operator):
            names |= {f"{name}.{part}": held for part, held in module.code_formats.items()}
    return {name: format_name for name, format_name in names.items() if format_name != dtype}


def _find_rounding_class(
    skeleton: nn.Module, spec: ModelSpec, layout: KVLayout, formats: dict[str, str]
) -> RoundingClass:
    modules = list(skeleton.named_modules())
    operators = [module for _, module in modules]
    held = [m.native if isinstance(m, HostedExperts) else m for m in operators]
    parts = [experts.num_parts for experts in held if isinstance(experts, NativeExperts)]
    return RoundingClass(
        expert_parts=max(parts, default=1),
        bf16_unit=_find_bf16_unit(spec, layout, formats),
        operators=_hash_operators(modules),
        torch=_name_torch(modules) if _multiplies_in_torch(modules, layout) else "",
    )


def _find_bf16_unit(spec: ModelSpec, layout: KVLayout, formats: dict[str, str]) -> str:
    """Return the instruction set if it affects bf16 products; integer and float32 products never
    differ.
    """
    isa = kernel_isas()[-1]
    names = set(formats.values()) - set(FORMAT_DTYPES.values())
    has_bf16 = "bfloat16" in {spec.dtype, layout.dtype, *formats.values()} or any(
        not find_format(name).is_integer for name in names
    )
    return isa if has_bf16 and isa not in IEEE_ISAS else ""


def _hash_operators(modules: list[tuple[str, nn.Module]]) -> str:
    digest = hashlib.sha256()
    for name, module in modules:
        kind, weight_format = type(module), find_module_format(module)
        how = "" if weight_format is None else weight_format.name
        digest.update(f"{name}\0{kind.__module__}.{kind.__qualname__}\0{how}\0".encode())
    return digest.hexdigest()[:16]


def _multiplies_in_torch(modules: list[tuple[str, nn.Module]], layout: KVLayout) -> bool:
    """Return True if torch computes attention or a matrix product; looking up an embedding does not
    count.
    """
    if not layout.is_coded and TORCH_DTYPES[layout.dtype] not in NATIVE_DTYPES:
        return True
    for _, module in modules:
        settings = getattr(module, "settings", None)
        if isinstance(module, Experts):
            return True
        if isinstance(settings, MatrixSettings) and settings.weight_format is None:
            return True
        if not isinstance(module, (Operator, nn.Embedding)):
            own = module.parameters(recurse=False)
            if any(parameter.dim() > 1 for parameter in own):
                return True
    return False


def _name_torch(modules: list[tuple[str, nn.Module]]) -> str:
    """Return torch's version, and the ISA or device that determines its libraries' order of
    sums.
    """
    held = {p.device.type for _, module in modules for p in module.parameters(recurse=False)}
    names = {name_arithmetic(kind) for kind in held or {"cpu"}}
    return " ".join([torch.__version__, *sorted(names)])
