"""Mixers with a state: which modules are such, and the spec of a gated delta rule.

A copy of the module, narrow in what goes in and out, is run on a few tokens and compared with our
rule; what configurations leave open (gate, norm, range of an update) is found by that.
"""

import copy
from itertools import product
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from tandem.core.model.layers import GatedDeltaSpec
from tandem.kernels.gated_delta import GatedDeltaRows, StateSlots
from tandem.kernels.operators.gated_delta import list_rows, make_rule
from tandem.kernels.torch.gated_delta import run_gated_delta
from tandem.models.planning.probes import UnfitModuleError, key_module

__all__ = ["has_gated_delta", "observe_state_mixers"]

PARTS = ("conv1d", "A_log", "dt_bias")
"""The modules and parameters that every gated delta rule of transformers has."""
PROJECTIONS = (
    (("in_proj_qkvz",), ("in_proj_ba",), "out_proj"),
    (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), "out_proj"),
    (("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"), "o_proj"),
)
"""Names of the projections to queries, keys, values and z, of those to b and a, of the output."""
NORM_NAMES = ("norm", "o_norm")
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
PROBE_WIDTH, PROBE_TOKENS = 8, 5
TOLERANCE = 1e-3
"""Relative to the largest output: what transformers computes in chunks adds rounding of float32."""


def has_gated_delta(module: Any) -> bool:
    """Return True if a module has the parts of a gated delta rule."""
    return all(hasattr(module, name) for name in PARTS)


def observe_state_mixers(model: Any) -> dict[str, GatedDeltaSpec | str]:
    """Return the spec of each gated delta rule of a skeleton, by its path; why not, where it fails.

    Mixers of the same sizes are run once.
    """
    found: dict[str, GatedDeltaSpec | str] = {}
    seen: dict[object, GatedDeltaSpec | str] = {}
    for name, module in model.named_modules():
        if not has_gated_delta(module):
            continue
        key = key_module(module)
        if key not in seen:
            try:
                seen[key] = _find_gated_delta(module)
            except UnfitModuleError as error:
                seen[key] = str(error)
        found[name] = seen[key]
    return found


def _find_gated_delta(module: Any) -> GatedDeltaSpec:
    """Return the spec of a mixer.

    Raises: UnfitModuleError (a part is missing, or it computes something else).
    """
    kind = type(module).__name__
    missing = [name for name in (*PARTS, *SIZES) if not hasattr(module, name)]
    names = next((p for p in PROJECTIONS if all(hasattr(module, n) for n in _flatten(p))), None)
    norm_name = next((name for name in NORM_NAMES if hasattr(module, name)), None)
    if missing or names is None or norm_name is None:
        what = ", ".join(missing) or "projections or norm of a known gated delta rule"
        raise UnfitModuleError(f"{kind} has no {what}")
    qkvz_names, ba_names, out_name = names
    biased = [n for n in (*_flatten(names), "conv1d") if getattr(module, n).bias is not None]
    if biased:
        raise UnfitModuleError(f"{kind} has biases of {', '.join(biased)}")
    norm = getattr(module, norm_name)
    spec = GatedDeltaSpec(
        hidden_size=getattr(module, qkvz_names[0]).in_features,
        num_k_heads=module.num_k_heads,
        num_v_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        conv_width=module.conv1d.kernel_size[0],
        norm_eps=getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)),
        qkvz_names=qkvz_names,
        ba_names=ba_names,
        norm_name=norm_name,
        out_name=out_name,
    )
    return _probe(module, spec)


def _flatten(names: tuple[tuple[str, ...], tuple[str, ...], str]) -> tuple[str, ...]:
    return (*names[0], *names[1], names[2])


def _probe(module: Any, spec: GatedDeltaSpec) -> GatedDeltaSpec:
    """Return the spec with the options that give what the module computes."""
    generator = torch.Generator().manual_seed(0)
    from transformers.utils import logging as transformers_logging

    made = _make_narrow(module, spec, generator)
    x = torch.randn(1, PROBE_TOKENS, PROBE_WIDTH, generator=generator)
    kind = type(module).__name__
    verbosity = transformers_logging.get_verbosity()
    # It warns that its fast kernels are not installed, which nothing here needs.
    transformers_logging.set_verbosity_error()
    try:
        with torch.inference_mode():
            theirs = made(x)[0]
    except Exception as error:
        # Whatever code of transformers raises.
        raise UnfitModuleError(f"{kind} cannot be run alone: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    orders = (True, False) if len(spec.qkvz_names) == 1 else (False,)
    options = product(orders, (1.0, 2.0), ("silu", "sigmoid"), (0.0, 1.0))
    for is_by_key_head, beta_scale, gate, offset in options:
        tried = msgspec.structs.replace(
            spec,
            is_by_key_head=is_by_key_head,
            beta_scale=beta_scale,
            gate=gate,
            norm_offset=offset,
        )
        difference = (_run_ours(made, tried, x[0]) - theirs).abs().max()
        if difference <= TOLERANCE * theirs.abs().max():
            return tried
    raise UnfitModuleError(f"{kind} computes no gated delta rule that is known here")


def _make_narrow(module: Any, spec: GatedDeltaSpec, generator: torch.Generator) -> Any:
    """Return a copy off the meta device with random weights, whose hidden size is small."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    for name in (*spec.qkvz_names, *spec.ba_names):
        rows = getattr(module, name).out_features
        shell._modules[name] = nn.Linear(PROBE_WIDTH, rows, bias=False, device="meta")
    out = nn.Linear(spec.all_values, PROBE_WIDTH, bias=False, device="meta")
    shell._modules[spec.out_name] = out
    made = copy.deepcopy(shell).to_empty(device="cpu").float().eval()
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def _run_ours(made: Any, spec: GatedDeltaSpec, x_TD: Tensor) -> Tensor:
    qkvz, ba = (
        torch.cat([x_TD @ getattr(made, name).weight.T for name in names], -1)
        for names in (spec.qkvz_names, spec.ba_names)
    )
    qkvz_order, ba_order = list_rows(spec)
    if qkvz_order is not None and ba_order is not None:
        qkvz, ba = qkvz[:, qkvz_order], ba[:, ba_order]
    norm = getattr(made, spec.norm_name).weight
    rule = make_rule(spec, made.conv1d.weight, made.A_log, made.dt_bias, norm)
    b, a = ba.chunk(2, -1)
    channels = spec.num_channels
    rows = GatedDeltaRows(qkvz[:, :channels], qkvz[:, channels:], a, b, (0, len(x_TD)), (0,))
    mixed = run_gated_delta(rule, rows, StateSlots.allocate(rule, 1, torch.float32))
    return mixed @ getattr(made, spec.out_name).weight.T
