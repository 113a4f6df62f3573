"""Mixers with a recurrent state: recognition of such modules, and their specs.

A copy of the module with few inputs and outputs is run on a few tokens and compared with our rules;
this determines options that configurations leave open (gate, norm, range of an update).
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from tandem.core.model.layers import (
    GatedDeltaSpec,
    KimiDeltaSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateMixerSpec,
)
from tandem.kernels.gated_delta import GatedDeltaRows, StateSlots
from tandem.kernels.operators.gated_delta import list_rows, make_rule
from tandem.kernels.state_space.kimi_delta import make_kimi_delta_rule, project_kimi_delta
from tandem.kernels.state_space.mixers import make_mamba2_rule
from tandem.kernels.state_space.rules import ShortConvRule, StateRows
from tandem.kernels.state_space.torch_form import run_mamba2, run_short_conv
from tandem.kernels.torch.gated_delta import run_gated_delta
from tandem.models.planning.probes import UnfitModuleError, key_module

__all__ = ["is_kimi_delta", "is_mamba2", "is_state_mixer", "observe_state_mixers"]

PARTS = ("conv1d", "A_log", "dt_bias")
"""Modules and parameters of every gated delta rule of transformers."""
PROJECTIONS = (
    (("in_proj_qkvz",), ("in_proj_ba",), "out_proj"),
    (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), "out_proj"),
    (("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"), "o_proj"),
)
"""Names of the projections to queries, keys, values and z; to b and a; and to the output."""
KIMI_PARTS = ("conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj")
"""Parts of Kimi delta attention beside the projections to queries, keys and values."""
KIMI_PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj"),
    *("g_b_proj", "forget_gate.f_b_proj"),
)
"""Projections of the hidden state, and of their results."""
NORM_NAMES = ("norm", "o_norm")
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
PROBE_WIDTH, PROBE_TOKENS, PROBE_CHUNK = 8, 5, 4
TOLERANCE = 1e-3
"""Tolerance relative to the largest output; transformers' computation in chunks adds float32
rounding.
"""


def is_state_mixer(module: Any) -> bool:
    """Return True if a module has the parts of a supported mixer with a state."""
    return _choose_finder(module) is not None


def is_mamba2(module: Any) -> bool:
    """Return True if a module has the parts of Mamba2's state space."""
    return all(hasattr(module, name) for name in (*PARTS, "D", "in_proj", "out_proj"))


def is_kimi_delta(module: Any) -> bool:
    """Return True if a module has the parts of Kimi delta attention."""
    return all(hasattr(module, name) for name in KIMI_PARTS)


def _choose_finder(module: Any) -> "Callable[[Any], StateMixerSpec] | None":
    if is_mamba2(module):
        return _find_mamba2
    if is_kimi_delta(module):
        return _find_kimi_delta
    if all(hasattr(module, name) for name in PARTS):
        return _find_gated_delta
    conv = getattr(module, "conv", None)
    is_conv = isinstance(conv, nn.Conv1d) and conv.groups == conv.in_channels
    has_projections = hasattr(module, "in_proj") and hasattr(module, "out_proj")
    return _find_short_conv if is_conv and has_projections else None


def observe_state_mixers(model: Any) -> dict[str, StateMixerSpec | str]:
    """Return the spec of each stateful mixer of a skeleton, by path; an error text if it does not
    fit.

    Mixers of the same sizes are run once.
    """
    found: dict[str, StateMixerSpec | str] = {}
    seen: dict[object, StateMixerSpec | str] = {}
    for name, module in model.named_modules():
        find = _choose_finder(module)
        if find is None:
            continue
        key = key_module(module)
        if key not in seen:
            try:
                seen[key] = find(module)
            except UnfitModuleError as error:
                seen[key] = str(error)
        found[name] = seen[key]
    return found


def _find_short_conv(module: Any) -> ShortConvSpec:
    """Return the spec of a short convolution.

    Raises: UnfitModuleError (it computes something else).
    """
    conv, kind = module.conv, type(module).__name__
    size = conv.in_channels
    if (module.in_proj.out_features, module.out_proj.in_features) != (3 * size, size):
        raise UnfitModuleError(f"{kind} is a convolution of another kind")
    biases = [m.bias is not None for m in (conv, module.in_proj, module.out_proj)]
    if len(set(biases)) > 1 or conv.kernel_size[0] < 2:
        raise UnfitModuleError(f"{kind} has biases of some parts alone, or keeps no inputs")
    spec = ShortConvSpec(hidden_size=size, conv_width=conv.kernel_size[0], has_bias=biases[0])

    def run(made: Any, x_TD: Tensor) -> Tensor:
        rule = ShortConvRule(made.conv.weight[:, 0].T, made.conv.bias)
        rows, slots = StateRows((0, len(x_TD)), (0,)), _allocate(rule)
        return made.out_proj(run_short_conv(rule, made.in_proj(x_TD), rows, slots))

    return _compare(module, (("in_proj",), "out_proj", size), [(spec, run)])


def _find_mamba2(module: Any) -> Mamba2Spec:
    """Return the spec of a Mamba2 state space.

    Raises: UnfitModuleError (a part is missing, or it computes something else).
    """
    kind = type(module).__name__
    sizes = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "norm")
    missing = [name for name in sizes if not hasattr(module, name)]
    if missing:
        raise UnfitModuleError(f"{kind} has no {', '.join(missing)}")
    biases = [m.bias is not None for m in (module.in_proj, module.out_proj)]
    low, high = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    spec = Mamba2Spec(
        hidden_size=module.in_proj.in_features,
        num_heads=module.num_heads,
        head_dim=module.head_dim,
        num_groups=module.n_groups,
        state_dim=module.ssm_state_size,
        conv_width=module.conv1d.kernel_size[0],
        has_conv_bias=module.conv1d.bias is not None,
        has_bias=biases[0],
        norm_eps=getattr(module.norm, "variance_epsilon", getattr(module.norm, "eps", 1e-6)),
        dt_min=float(low),
        dt_max=None if high == float("inf") else float(high),
    )
    rows = spec.num_values + spec.num_channels + spec.num_heads
    if len(set(biases)) > 1 or spec.num_heads % spec.num_groups:
        raise UnfitModuleError(f"{kind} has a bias of one projection, or heads in unequal groups")
    if (module.in_proj.out_features, module.conv1d.in_channels) != (rows, spec.num_channels):
        raise UnfitModuleError(f"{kind} projects to something else than z, x, B, C and dt")

    def run(made: Any, x_TD: Tensor) -> Tensor:
        conv, end = made.conv1d, spec.num_values + spec.num_channels
        vectors = (made.A_log, made.dt_bias, made.D, made.norm.weight)
        rule = make_mamba2_rule(spec, conv.weight, *vectors, conv.bias)
        projected = made.in_proj(x_TD)
        z, x, dt = projected.split([spec.num_values, spec.num_channels, spec.num_heads], -1)
        assert end + dt.shape[1] == rows, (end, rows)
        parts = (StateRows((0, len(x_TD)), (0,)), _allocate(rule))
        return made.out_proj(run_mamba2(rule, x, z, dt, *parts))

    return _compare(module, (("in_proj",), "out_proj", spec.num_values), [(spec, run)])


def _find_kimi_delta(module: Any) -> KimiDeltaSpec:
    """Return the spec of Kimi delta attention.

    Raises: UnfitModuleError (a part is missing, or it computes something else).
    """
    kind = type(module).__name__
    names = (*KIMI_PROJECTIONS, "o_proj", "conv1d")
    try:
        parts = {name: module.get_submodule(name) for name in names}
    except AttributeError as error:
        raise UnfitModuleError(f"{kind} has not all projections: {error}") from error
    biased = [name for name, part in parts.items() if part.bias is not None]
    if biased:
        raise UnfitModuleError(f"{kind} has biases of {', '.join(biased)}")
    norm = module.o_norm
    spec = KimiDeltaSpec(
        hidden_size=module.q_proj.in_features,
        num_heads=module.num_heads,
        head_dim=module.head_dim,
        conv_width=module.conv1d.kernel_size[0],
        decay_waist=parts["forget_gate.f_a_proj"].out_features,
        gate_waist=module.g_a_proj.out_features,
        norm_eps=getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)),
    )
    if module.conv1d.in_channels != spec.num_channels:
        raise UnfitModuleError(f"{kind} convolves something else than queries, keys and values")

    def run(made: Any, x_TD: Tensor) -> Tensor:
        gate = made.forget_gate
        vectors = (made.conv1d.weight, gate.A_log, gate.dt_bias, made.o_norm.weight)
        rule = make_kimi_delta_rule(spec, *vectors)
        rows = project_kimi_delta(made, x_TD, (0, len(x_TD)), (0,))
        return made.o_proj(run_gated_delta(rule, rows, _allocate(rule)))

    widths = (KIMI_PROJECTIONS[:6], "o_proj", spec.num_values)
    # transformers' code computes all pairs of a chunk for each channel, which at the real chunk
    # size takes more memory than the model.
    return _compare(module, widths, [(spec, run)], chunk_size=PROBE_CHUNK)


def _allocate(rule: Any) -> StateSlots:
    return StateSlots.allocate(rule, 1, torch.float32)


def _find_gated_delta(module: Any) -> GatedDeltaSpec:
    """Return the spec of a gated delta rule.

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
    """Return the spec with the options that reproduce the module's results."""
    orders = (True, False) if len(spec.qkvz_names) == 1 else (False,)
    options = product(orders, (1.0, 2.0), ("silu", "sigmoid"), (0.0, 1.0))
    tried = [
        msgspec.structs.replace(
            spec,
            is_by_key_head=is_by_key_head,
            beta_scale=beta_scale,
            gate=gate,
            norm_offset=offset,
        )
        for is_by_key_head, beta_scale, gate, offset in options
    ]
    parts = ((*spec.qkvz_names, *spec.ba_names), spec.out_name, spec.all_values)
    return _compare(module, parts, [(each, partial(_run_ours, spec=each)) for each in tried])


Parts = tuple[tuple[str, ...], str, int]
"""Names of a mixer's input projections, name of its output projection, and that one's inputs."""
AnySpec = TypeVar("AnySpec", bound=StateMixerSpec)


def _compare(
    module: Any,
    parts: Parts,
    options: Iterable[tuple[AnySpec, Callable[[Any, Tensor], Tensor]]],
    **arguments: Any,
) -> AnySpec:
    """Return the first of several specs whose function reproduces the module's results.

    Args:
        module: the mixer; a copy of it is run.
        parts: its projections.
        options: specs, each with a function of the copy and its inputs.
        arguments: keyword arguments for the module's call.

    Raises: UnfitModuleError (no spec does, or the module cannot be run).
    """
    generator = torch.Generator().manual_seed(0)
    from transformers.utils import logging as transformers_logging

    made = _make_narrow(module, parts, generator)
    x = torch.randn(1, PROBE_TOKENS, PROBE_WIDTH, generator=generator)
    kind = type(module).__name__
    verbosity = transformers_logging.get_verbosity()
    # transformers warns that its fast kernels are missing; they are not needed here, so the warning
    # is silenced.
    transformers_logging.set_verbosity_error()
    try:
        with torch.inference_mode():
            theirs = made(x, **arguments)[0]
    except Exception as error:
        # transformers' code may raise any exception, so all are caught.
        raise UnfitModuleError(f"{kind} cannot be run alone: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    with torch.inference_mode():
        for spec, run in options:
            difference = (run(made, x[0]) - theirs).abs().max()
            if difference <= TOLERANCE * theirs.abs().max():
                return spec
    raise UnfitModuleError(f"{kind} computes nothing that is known here")


def _make_narrow(module: Any, parts: Parts, generator: torch.Generator) -> Any:
    """Return a copy on the CPU with random weights and a small hidden size."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    first, last, num_mixed = parts
    for name in first:
        old = module.get_submodule(name)
        narrow = nn.Linear(PROBE_WIDTH, old.out_features, bias=old.bias is not None, device="meta")
        _replace_part(shell, name, narrow)
    has_bias = getattr(module, last).bias is not None
    shell._modules[last] = nn.Linear(num_mixed, PROBE_WIDTH, bias=has_bias, device="meta")
    if hasattr(shell, "chunk_size"):
        # The chunk size only changes the order of the sums, and work grows with its square, so the
        # probe uses a small one.
        shell.chunk_size = PROBE_CHUNK
    made = copy.deepcopy(shell).to_empty(device="cpu").float().eval()
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def _replace_part(shell: Any, name: str, part: nn.Module) -> None:
    """Replace a part of a shallow copy of a module without changing the original."""
    parent, _, rest = name.partition(".")
    if not rest:
        shell._modules[name] = part
        return
    inner = copy.copy(shell._modules[parent])
    inner._modules = dict(inner._modules)
    shell._modules[parent] = inner
    _replace_part(inner, rest, part)


def _run_ours(made: Any, x_TD: Tensor, spec: GatedDeltaSpec) -> Tensor:
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
