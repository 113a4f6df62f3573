"""Probes: what a skeleton's module computes, found by running it on a few numbers.

Modules of transformers' families have the same parts but use them differently: a norm may add 1 to
its weight, a router may use a softmax or a sigmoid. Instead of knowing each class by name, a copy
of the module with random weights is run and compared with our operators. A wrong guess does no
harm: the proof of the whole model refuses it.
"""

import copy
import inspect
import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.core.model.layers import Activation, RoutingRule
from tandem.kernels.activation import activate, apply_function
from tandem.kernels.interfaces import AttentionRule
from tandem.kernels.operators.operator import running
from tandem.kernels.torch.execution import TorchExecution

__all__ = [
    "ROTARY_NAMES",
    "AttentionCall",
    "UnfitModuleError",
    "find_activation",
    "find_expert_activation",
    "find_layer_norm",
    "find_layer_type",
    "find_mlp_activation",
    "find_norm_offset",
    "find_routing",
    "gives_whole_angles",
    "key_module",
    "observe_attention",
    "observe_frequencies",
    "read_frequencies",
    "takes_choices",
    "takes_positions",
]

PLAIN_NAMES = ("silu", "gelu", "gelu_tanh", "relu2")
TOLERANCE = 1e-5
"""Relative tolerance with which a probe compares a module's output with a candidate function: far
above float32's rounding, far below the difference of two functions.
"""
ROTARY_NAMES = ("rotary_emb", "pos_emb")
SCALE_NAMES = ("routed_scaling_factor", "router_scaling_factor")
"""Attribute names of a router's factor on its weights."""
PROBE_ITEMS = 8
ROUTED_TOKENS = 1024
"""Tokens of a router's probe: two rules with groups may choose alike for most tokens."""


class UnfitModuleError(Exception):
    """Error for a module that does not fit an operator; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments with which an attention module calls the attention function."""

    scale: float
    rule: AttentionRule
    """Window, cap and sinks; the sinks are on the meta device."""
    interleaved_size: int = 0
    """Items of a head that are rotated as pairs of neighbours; 0 if halves are rotated."""
    rotates: bool = True
    """False if the attention uses no RoPE angles."""


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def _make_real(module: nn.Module, generator: torch.Generator) -> Any:
    """Return a copy of a module on the CPU with random weights and buffers."""
    made = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.requires_grad_(False)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def find_norm_offset(module: nn.Module) -> float:
    """Return the offset that an RMSNorm adds to its weight.

    Raises: UnfitModuleError (it is another norm).
    """
    generator = torch.Generator().manual_seed(0)
    made = _make_real(module, generator)
    parameters = dict(made.named_parameters())
    weight = parameters.pop("weight", None)
    if weight is None or parameters:
        what = ", ".join(parameters) or "no weight"
        raise UnfitModuleError(f"{type(module).__name__} has {what}: it is not an RMSNorm")
    x = torch.randn(3, len(weight), generator=generator)
    eps = getattr(made, "variance_epsilon", getattr(made, "eps", None))
    if eps is None:
        raise UnfitModuleError(f"{type(module).__name__} has no epsilon")
    with torch.inference_mode():
        normed = torch.rms_norm(x, weight.shape, None, eps)
        theirs = _run_norm(made, x)
        for offset in (0.0, 1.0):
            if _is_close(theirs, normed * (weight + offset)):
                return offset
    raise UnfitModuleError(f"{type(module).__name__} is not an RMSNorm")


def _run_norm(made: Any, x: Tensor) -> Tensor:
    if "gate" in inspect.signature(type(made).forward).parameters:
        raise UnfitModuleError(f"{type(made).__name__} also takes a gate")
    try:
        return made(x)
    except TypeError as error:
        raise UnfitModuleError(f"{type(made).__name__} takes more than its input") from error


def find_layer_norm(module: nn.Module) -> tuple[float, float]:
    """Return (offset that a LayerNorm adds to its weight, its epsilon).

    Raises: UnfitModuleError (it is another norm).
    """
    generator = torch.Generator().manual_seed(0)
    made = _make_real(module, generator)
    parameters = dict(made.named_parameters())
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    eps = getattr(made, "variance_epsilon", getattr(made, "eps", None))
    if weight is None or weight.dim() != 1 or parameters or eps is None:
        raise UnfitModuleError(f"{type(module).__name__} is neither an RMSNorm nor a LayerNorm")
    x = torch.randn(3, len(weight), generator=generator) + 1.0
    with torch.inference_mode():
        theirs = _run_norm(made, x)
        for offset in (0.0, 1.0):
            ours = functional.layer_norm(x, weight.shape, weight + offset, bias, eps)
            if _is_close(theirs, ours):
                return offset, float(eps)
    raise UnfitModuleError(f"{type(module).__name__} is neither an RMSNorm nor a LayerNorm")


def find_activation(module: Any) -> Activation:
    """Return the activation of a dense MLP, found by its function object.

    Raises: UnfitModuleError (it has none, or an unknown one).
    """
    function = _find_function(module)
    if function is None:
        raise UnfitModuleError(f"{type(module).__name__} has no activation")
    x = torch.linspace(-6, 6, 97)
    theirs = function(x)
    for name in PLAIN_NAMES:
        if _is_close(theirs, apply_function(name, x)):
            return Activation(name)
    raise UnfitModuleError(f"its activation is {type(function).__name__}")


def _find_function(module: Any) -> Any:
    names = ("act_fn", "activation_fn", "act", "activation")
    found = (getattr(module, name, None) for name in names)
    return next((function for function in found if callable(function)), None)


def find_mlp_activation(module: Any, gate: str, up: str, down: str) -> Activation:
    """Return the activation of a dense MLP, which may call a function without holding it.

    Args:
        module: the MLP.
        gate: name of its gate matrix; that of up if there is no gate.
        up: name of its up matrix; that of gate if one matrix holds both.
        down: name of its last matrix.

    Raises: UnfitModuleError (an unknown activation).
    """
    if _find_function(module) is not None or gate == up:
        return find_activation(module)
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    for name in (gate, up, down):
        shell._modules[name] = nn.Linear(PROBE_ITEMS, PROBE_ITEMS, bias=False, device="meta")
    made = _make_real(shell, torch.Generator().manual_seed(0))
    x = torch.linspace(-2, 2, 4 * PROBE_ITEMS).view(4, PROBE_ITEMS)
    with torch.inference_mode():
        theirs = made(x)
        gated, raised, last = (getattr(made, name) for name in (gate, up, down))
        for name in PLAIN_NAMES:
            ours = last(apply_function(name, gated(x)) * raised(x))
            if torch.allclose(theirs, ours, rtol=TOLERANCE, atol=PROBE_ITEMS * TOLERANCE):
                return Activation(name)
    raise UnfitModuleError(f"{type(module).__name__} has another activation")


def find_expert_activation(module: Any) -> Activation:
    """Return the activation between gate, up and down of routed experts.

    Raises: UnfitModuleError (our experts do not compute it).
    """
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return find_activation(module)
    generator = torch.Generator().manual_seed(0)
    gate_up = 8 * torch.randn(4, 64, generator=generator)
    gate, up = gate_up.chunk(2, -1)
    is_concatenated = getattr(module, "is_concatenated", True)
    theirs = apply_gate(gate_up if is_concatenated else torch.stack((gate, up), -1).flatten(-2))
    candidates = [Activation(name) for name in PLAIN_NAMES]
    if isinstance(getattr(module, "limit", None), (int, float)):
        alpha, limit = float(getattr(module, "alpha", 1.0)), float(module.limit)
        candidates += [Activation(alpha=alpha, limit=limit, up_offset=o) for o in (0.0, 1.0)]
    for activation in candidates:
        if _is_close(theirs, activate(activation, gate_up.clone())):
            return activation
    raise UnfitModuleError(f"{type(module).__name__} has another activation")


def find_routing(gate: Any, choice_bias: Tensor | None) -> RoutingRule:
    """Return the rule by which a router chooses and weighs experts.

    Args:
        gate: the router's module with ``weight`` [E, D] and ``top_k``.
        choice_bias: bias [E] of the block, if the router has none of its own.

    Raises: UnfitModuleError (no known rule gives the router's result, or it fails, as with more
        groups to choose than exist).
    """
    generator = torch.Generator().manual_seed(0)
    made = _make_real(gate, generator)
    num_experts, hidden = made.weight.shape
    # The router's weights are scaled so that logits are of a size at which softmax, sigmoid and
    # bias all affect the result.
    made.weight.mul_(1.5 * hidden**-0.5)
    bias: Tensor | None = getattr(made, "e_score_correction_bias", None)
    if bias is None and choice_bias is not None:
        bias = torch.randn(num_experts, generator=generator)
    if bias is not None:
        bias.mul_(0.2)
    linear_bias = getattr(made, "bias", None)
    takes_bias = len(inspect.signature(type(gate).forward).parameters) > 2
    rules = _list_rules(made)
    x = torch.randn(ROUTED_TOKENS, hidden, generator=generator)
    with torch.inference_mode():
        logits = functional.linear(x, made.weight, linear_bias)
        try:
            outputs = made(x, bias) if takes_bias else made(x)
        except Exception as error:  # A library's module, with any numbers.
            raise UnfitModuleError(f"{type(gate).__name__} fails: {error}") from error
        weights, ids = (outputs[1], outputs[2]) if len(outputs) > 2 else outputs
        if ids.is_floating_point():
            # This router returns dense weights over all experts, which are 0 for experts that
            # are not chosen, and the logits.
            theirs = weights.float()
        else:
            theirs = torch.zeros_like(logits).scatter_(1, ids, weights.float())
        rules = [rule for rule in rules if _gives(theirs, logits, made.top_k, rule, bias)]
    # All remaining rules give the same result, such as scorings of a single expert whose weight is
    # always 1.
    if rules:
        return rules[0]
    raise UnfitModuleError(f"{type(gate).__name__} chooses or weighs in another way")


def _gives(
    weights: Tensor, logits: Tensor, top_k: int, rule: RoutingRule, bias: Tensor | None
) -> bool:
    """Return True if a routing rule makes these weights of the router's logits, with 0 for experts
    that are not chosen.
    """
    from tandem.kernels.native import Buffer

    held = None if bias is None else Buffer(bias.float())
    ours, ids = TorchExecution().route(logits, top_k, rule, held)
    return _is_close(weights, torch.zeros_like(logits).scatter_(1, ids, ours))


def _list_rules(gate: Any) -> list[RoutingRule]:
    groups = getattr(gate, "n_group", getattr(gate, "num_group", None)) or 1
    top_groups = getattr(gate, "topk_group", None) or 1
    scale = next((float(getattr(gate, name)) for name in SCALE_NAMES if hasattr(gate, name)), 1.0)
    choices: tuple[Literal[1, 2], ...] = (2, 1)
    sizes: list[tuple[int, int, Literal[1, 2]]] = [(1, 1, 2)]
    if top_groups < groups:
        sizes = [*((groups, top_groups, count) for count in choices), *sizes]
    scales = dict.fromkeys((scale, 1.0))
    return [
        RoutingRule(
            scoring, is_normalised, sizes_of[0], sizes_of[1], sizes_of[2], weight_scale=weight_scale
        )
        for sizes_of, weight_scale, scoring, is_normalised in product(
            sizes, scales, ("softmax", "sigmoid"), (True, False)
        )
    ]


class _Recorder:
    """A stand-in for a running step, which records how a module calls attention instead of
    computing it.
    """

    def __init__(self) -> None:
        self.call: AttentionCall | None = None

    def write_kv(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Do nothing: this trial run of a module (a probe) stores no KV."""

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Record scale and rule (which tokens see which) of the call; return the queries as the
        result.
        """
        del layer_idx, kv_T2Kd
        self.call = AttentionCall(scale, rule)
        return q_THd.flatten(1)

    def run_layer_(self, layer: nn.Module, x_TD: Tensor) -> None:
        """Raise an error: a trial run of a module (a probe) runs attention modules only."""
        raise AssertionError("attention alone runs in a probe")

    def complete_(self, x_TD: Tensor) -> None:
        """Raise an error: a trial run of a module (a probe) runs attention modules only."""
        raise AssertionError("attention alone runs in a probe")

    def mix(self, attention: nn.Module, h_TD: Tensor) -> Tensor:
        """Raise an error: a trial run of a module (a probe) runs transformers' modules, not
        operators.
        """
        raise AssertionError("a probe runs modules of transformers")


def observe_attention(model: Any, module: Any) -> AttentionCall:
    """Run an attention module on the meta device and return how it calls attention.

    Args:
        model: the skeleton, before rules are applied.
        module: one of its attention modules.

    Raises: UnfitModuleError (the module does not call the attention function in the usual way).
    """
    recorder = _Recorder()
    rotary = next(
        (part for name in ROTARY_NAMES if (part := getattr(model.model, name, None)) is not None),
        None,
    )
    x = torch.empty(1, 1, model.config.hidden_size, device="meta")
    try:
        with torch.inference_mode():
            angles = None if rotary is None else _compute_angles(rotary, x, module)
            _run_attention(module, x, angles, recorder)
            rotates = angles is not None and not _runs_without_angles(module, x)
    except Exception as error:
        what = f"{type(module).__name__} cannot be run alone: {error}"
        raise UnfitModuleError(what) from error
    if recorder.call is None:
        raise UnfitModuleError(f"{type(module).__name__} does not call the attention function")
    if angles is None:
        return recorder.call
    if isinstance(angles, Tensor):
        # The angles are complex numbers, each of which rotates two neighbouring values.
        size = 2 * angles.shape[-1] if rotates else 0
        return replace(recorder.call, interleaved_size=size, rotates=rotates)
    width = angles[0].shape[-1]
    is_interleaved = rotates and gives_whole_angles(rotary) and _has_interleaved_rope(module, width)
    return replace(recorder.call, interleaved_size=width if is_interleaved else 0, rotates=rotates)


def _run_attention(module: Any, x: Tensor, angles: Any, recorder: _Recorder) -> None:
    stated: dict[str, Any] = {}
    if takes_positions(module):
        stated["position_ids"] = torch.empty(1, 1, device="meta")
    if "shared_kv_states" in inspect.signature(type(module).forward).parameters:
        stated["shared_kv_states"] = _AnyStates()
    with running(recorder):
        module(hidden_states=x, position_embeddings=angles, attention_mask=None, **stated)


def takes_choices(module: Any) -> bool:
    """Return True if experts take each token's choices, instead of tokens sorted by expert."""
    return len(inspect.signature(type(module).forward).parameters) > 2


class _AnyStates(dict[str, tuple[Tensor, Tensor]]):
    """A stand-in for keys and values that layers share, before any layer has computed them."""

    def __missing__(self, name: str) -> tuple[Tensor, Tensor]:
        state = torch.empty(1, 1, 1, 1, device="meta")
        return state, state


def takes_positions(module: Any) -> bool:
    """Return True if an attention requires positions in addition to their angles."""
    stated = inspect.signature(type(module).forward).parameters.get("position_ids")
    return stated is not None and stated.default is inspect.Parameter.empty


def _runs_without_angles(module: Any, x: Tensor) -> bool:
    """Return True if an attention never uses cos and sin, so its layer has no RoPE."""
    try:
        _run_attention(module, x, (None, None), _Recorder())
    except (AttributeError, TypeError):
        return False
    return True


def key_module(module: nn.Module) -> object:
    """Return a key by which mixers of one model differ: plain attributes and types of parts."""
    values = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, type(None))) and name != "layer_idx"
    }
    parts = [(name, type(part)) for name, part in module.named_children()]
    return (type(module), *sorted(values.items(), key=str), *parts)


def _compute_angles(rotary: Any, x: Tensor, attention: Any) -> Any:
    # Call the undecorated forward: transformers' decorator reads the longest position, which a meta
    # tensor does not have.
    forward = inspect.unwrap(type(rotary).forward)
    positions = torch.empty(1, 1, device="meta")
    if "layer_type" in inspect.signature(forward).parameters:
        return forward(rotary, x, positions, find_layer_type(attention, rotary.config))
    return forward(rotary, x, positions)


def find_layer_type(attention: Any, config: Any) -> str:
    """Return the layer type whose RoPE an attention uses; not every class stores its own type."""
    stated: str | None = getattr(attention, "layer_type", None)
    return config.layer_types[attention.layer_idx] if stated is None else stated


def read_frequencies(rotary: Any, layer_type: str) -> tuple[Tensor, float]:
    """Return a rotary embedding's inverse frequencies [r / 2] and its factor on cos and sin.

    Args:
        rotary: the skeleton's module; its buffers are on the meta device.
        layer_type: layer type of the RoPE; empty if all layers share one.

    Raises: UnfitModuleError (it cannot be built in the usual way).
    """
    prefix = f"{layer_type}_" if layer_type else ""
    try:
        made = type(rotary)(rotary.config)
        inv_freq: Tensor = getattr(made, f"{prefix}inv_freq")
        return inv_freq.float(), float(getattr(made, f"{prefix}attention_scaling"))
    except Exception as error:
        # transformers' code may raise any exception, so all are caught.
        what = f"{type(rotary).__name__} does not tell its frequencies: {error}"
        raise UnfitModuleError(what) from error


def observe_frequencies(
    rotary: Any, layer_type: str, context: int, num_pairs: int
) -> tuple[Tensor, float]:
    """Return the inverse frequencies [r / 2] and the factor on cos and sin with which a rotary
    embedding rotates a sequence of ``context`` tokens, as its angles at position 1 show them.

    Other arguments, and errors, as for ``read_frequencies``. Frequencies of half a turn and more
    come out as others.
    """
    try:
        made, x = type(rotary)(rotary.config), torch.empty(1, 1, 1)
        stated = (layer_type,) if layer_type else ()
        cos, sin = made(x, torch.tensor([[1, context - 1]]), *stated)
        cos, sin = (each[0, 0, :num_pairs] for each in (cos, sin))
        return torch.atan2(sin, cos), float(torch.hypot(sin, cos)[0])
    except Exception as error:
        # transformers' code may raise any exception, so all are caught.
        what = f"{type(rotary).__name__} does not tell its angles: {error}"
        raise UnfitModuleError(what) from error


def gives_whole_angles(rotary: Any) -> bool:
    """Return True if a rotary embedding gives an angle per item, not per pair as gpt-oss's does."""
    if not hasattr(rotary, "inv_freq"):
        return True
    x = torch.empty(1, 1, 1, device="meta")
    angles = _compute_angles(rotary, x, None)
    if isinstance(angles, Tensor):
        # DeepSeek-V2's angles are complex numbers; its attention is always replaced, never run from
        # the skeleton.
        return True
    return angles[0].shape[-1] > rotary.inv_freq.shape[-1]


def _has_interleaved_rope(module: nn.Module, width: int) -> bool:
    """Return True if attention rotates neighbours (2 i, 2 i + 1), not halves (i, i + r / 2)."""
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        raise UnfitModuleError(f"{type(module).__name__} rotates in another way")
    x = torch.arange(1.0, width + 1).view(1, 1, 1, width)
    zeros, ones = torch.zeros(1, 1, width), torch.ones(1, 1, width)
    is_single = "k" not in inspect.signature(rotate).parameters
    turned = (rotate(x, zeros, ones) if is_single else rotate(x, x, zeros, ones)[0]).flatten()
    if _is_close(turned[: width // 2], -x.flatten()[width // 2 :]):
        return False
    if _is_close(turned[0::2], -x.flatten()[1::2]):
        return True
    raise UnfitModuleError(f"{type(module).__name__} rotates in another way")
