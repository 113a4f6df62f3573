"""The cost of one training step, found by running it on tensors without memory.

The run's model (transformers' modules, adapters, loss) goes forward and backward under torch's fake
tensors: shapes, dtypes and the order of operations are the real ones, and no number is computed.
The bytes that are alive at each moment and the work of the matrix products are counted. So no model
family needs a formula of its own.

Shapes: B rows, T tokens of a row.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tandem.core.model.layers import GatedDeltaSpec, KimiDeltaSpec
from tandem.core.model.plan import LayerSpec
from tandem.finetune.recipes.targets import find_expert_shapes, find_targets
from tandem.finetune.training.loss import LOGIT_KEYS, count_piece_rows
from tandem.kernels.operators.frozen_delta import freeze_mixer
from tandem.models.planning.state_mixers import observe_state_mixers

__all__ = ["StepCost", "StepShape", "simulate_step"]

EXPERT_FORWARD_PRODUCTS = 3
EXPERT_BACKWARD_PRODUCTS = 3
"""Products of hidden size x intermediate size that an expert computes for each of its tokens in the
backward pass. Gate and up are kept from the forward pass and not computed again.
"""
SCAN_FORWARD_OPERATIONS, SCAN_BACKWARD_OPERATIONS = 4, 12
"""Operations of a gated delta rule for each token and element of the state. Forward: decay, update,
two sums; backward: the same again, and the gradients.
"""

SUMMED = ("kept_bytes", "num_operations", "moved_bytes", "torch_flops", "native_flops")
"""Fields of ``StepCost`` that add up over the layers."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The facts of a training run on which the memory and the work of one step depend."""

    num_rows: int
    """B: sequences of one batch on the device; gradient accumulation adds none."""
    num_tokens: int
    """T: tokens of the longest row."""
    is_bf16: bool
    has_packed_experts: bool
    has_packed_linear: bool
    is_checkpointed: bool
    has_reference: bool = False
    """True if the step also has a forward pass without adapters and gradients, as in stage dpo."""
    has_f32_experts: bool = False
    """True if packed experts are in f32: they keep gate and up in float32, not in bf16."""


@dataclass(slots=True)
class StepCost:
    """The cost of one forward and backward pass over B rows of T tokens."""

    kept_bytes: int = 0
    """Bytes that are alive when the backward pass begins, without weights, adapters and the
    optimizer's state.
    """
    temporary_bytes: int = 0
    """Largest number of bytes that are alive in addition to ``kept_bytes`` at any moment of the
    step.
    """
    num_operations: int = 0
    moved_bytes: int = 0
    """Bytes read and written by operations other than torch's products."""
    torch_flops: int = 0
    native_flops: int = 0
    """Floating-point operations of the native kernels: products with packed weights, and
    recurrences.
    """

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes that are alive at once, without weights and the optimizer's
        state.
        """
        return self.kept_bytes + self.temporary_bytes

    def plus(self, more: "StepCost", less: "StepCost", times: int) -> "StepCost":
        """Return this cost plus ``times`` the difference ``more - less``.

        Temporary bytes do not add up: the result has the larger number of this cost and ``more``.
        """
        sums = {
            name: getattr(self, name) + times * (getattr(more, name) - getattr(less, name))
            for name in SUMMED
        }
        return StepCost(temporary_bytes=max(self.temporary_bytes, more.temporary_bytes), **sums)


class _Counter(TorchDispatchMode):
    """A torch mode that counts the bytes of live tensors, the operations and their cost."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self._cost = cost
        self._alive: dict[int, int] = {}
        self.alive_bytes = 0
        self.peak_bytes = 0

    def ignore(self, tensor: Tensor) -> None:
        """Count a tensor that exists before the step, such as a weight, as zero bytes."""
        self._alive[id(tensor.untyped_storage())] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        cost = self._cost
        results = list(_iter_tensors(out))
        for tensor in results:
            self._follow(tensor)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            cost.torch_flops += formula(*args, **(kwargs or {}), out_val=out)
        if not func.is_view:
            cost.num_operations += 1
            if formula is None:
                cost.moved_bytes += sum(t.nbytes for t in (*results, *_iter_tensors(args)))
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = size
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.alive_bytes -= self._alive.pop(key)


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_tensors(item)


class _FakeExperts(torch.autograd.Function):
    """A stand-in for the autograd node of packed experts (``kernels.cpu.autograd``).

    It allocates tensors of the same sizes, keeps the same ones for the backward pass, and computes
    nothing.
    """

    @staticmethod
    def forward(ctx: Any, owner: "_Experts", x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ctx.owner, ctx.dtype = owner, x.dtype
        kept = x.new_empty((ids.numel(), 2 * owner.inner), dtype=owner.inner_dtype)
        ctx.save_for_backward(ids, weights, kept)
        owner.count(ids.numel(), EXPERT_FORWARD_PRODUCTS)
        scratch = x.new_empty((ids.numel(), owner.inner), dtype=owner.inner_dtype)
        out = torch.empty_like(x, dtype=torch.float32).to(x.dtype)
        del scratch
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ids, weights, kept = ctx.saved_tensors
        ctx.owner.count(ids.numel(), EXPERT_BACKWARD_PRODUCTS)
        scratch = torch.empty_like(kept), torch.empty_like(grads[0], dtype=kept.dtype)
        d_x = torch.empty_like(grads[0], dtype=torch.float32).to(ctx.dtype)
        del scratch
        return None, d_x, None, torch.empty_like(weights)


class _FakeAdaptedExperts(torch.autograd.Function):
    """A stand-in for the autograd node of packed experts with LoRA
    (``kernels.cpu.adapted_experts``).
    """

    @staticmethod
    def forward(
        ctx: Any, owner: "_Experts", x: Tensor, ids: Tensor, weights: Tensor, *factors: Tensor
    ) -> Tensor:
        ctx.owner, pairs, rank = owner, ids.numel(), factors[0].shape[1]
        wide, inner = x.float(), owner.inner
        delta = x.new_empty((pairs, 2 * inner), dtype=torch.float32)
        kept = x.new_empty((pairs, 2 * inner), dtype=owner.inner_dtype)
        ctx.save_for_backward(x, ids, weights, kept, *factors)
        owner.count(pairs, EXPERT_FORWARD_PRODUCTS)
        owner.count_factors(pairs * rank * (2 * owner.hidden + 3 * inner))
        out = torch.empty_like(wide).to(x.dtype)
        del delta, wide
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, ids, weights, kept, *factors = ctx.saved_tensors
        owner, pairs, rank = ctx.owner, ids.numel(), factors[0].shape[1]
        wide = torch.empty_like(x, dtype=torch.float32), grads[0].float()
        d_factors = [torch.zeros_like(factor) for factor in factors]
        extra = x.new_empty((pairs, owner.inner), dtype=torch.float32)
        scratch = torch.empty_like(kept), torch.empty_like(kept)
        owner.count(pairs, EXPERT_BACKWARD_PRODUCTS)
        owner.count_factors(pairs * rank * (5 * owner.hidden + 7 * owner.inner))
        d_x = torch.empty_like(x, dtype=torch.float32).to(x.dtype)
        del wide, extra, scratch
        return None, d_x, None, torch.empty_like(weights), *d_factors


class _Experts(nn.Module):
    """A stand-in for a layer's routed experts, packed or not, that counts the cost of their
    products.
    """

    def __init__(self, old: Any, cost: StepCost, shape: StepShape) -> None:
        super().__init__()
        self.is_transposed = bool(getattr(old, "is_transposed", False))
        # PEFT finds expert weights by the names and shapes of parameters, so the stand-in has the
        # same ones.
        self.gate_up_proj: nn.Parameter
        self.down_proj: nn.Parameter
        for name in find_expert_shapes(old):
            self.register_parameter(name, getattr(old, name))
        _, self.hidden, self.inner = find_expert_shapes(old)["down_proj"]
        self._cost = cost
        self._is_packed = shape.has_packed_experts
        self.inner_dtype = torch.float32 if shape.has_f32_experts else torch.bfloat16

    def count_factors(self, num_products: int) -> None:
        self._cost.torch_flops += 2 * num_products

    def count(self, num_rows: int, num_products: int) -> None:
        self._cost.native_flops += 2 * num_rows * num_products * self.hidden * self.inner

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self._is_packed:
            out = _FakeExperts.apply(self, x, top_k_index, top_k_weights)
            assert isinstance(out, Tensor)
            return out
        return self._run(x, top_k_weights, *self._list_weights())

    def run_adapted(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, factors: Any
    ) -> Tensor:
        x, f = hidden_states.reshape(-1, hidden_states.shape[-1]), factors
        if self._is_packed:
            tensors = (f.gate_up_a, f.gate_up_b, f.down_a, f.down_b)
            out = _FakeAdaptedExperts.apply(self, x, top_k_index, top_k_weights, *tensors)
            assert isinstance(out, Tensor)
            return out
        # Without our kernels PEFT adds the adapters to the weights: it makes merged weights of all
        # experts.
        gate_up, down = self._list_weights()
        gate_up = _merge(gate_up, f.gate_up_b, f.gate_up_a)
        return self._run(x, top_k_weights, gate_up, _merge(down, f.down_b, f.down_a))

    def _list_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of one layer's routed experts, gate_up [E, 2 F, D] and down [E, D,
        F].
        """
        if self.is_transposed:
            return self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return self.gate_up_proj, self.down_proj

    def _run(self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return the experts' output [T, D], computed for all (token, expert) pairs with one
        expert's weights.

        This costs as much as transformers' grouped products with the weights of all experts.
        """
        top_k = weights.shape[-1]
        pairs = x.repeat_interleave(top_k, dim=0)
        gate, up = nn.functional.linear(pairs, gate_up[0].to(x.dtype)).chunk(2, dim=-1)
        out = nn.functional.linear(nn.functional.silu(gate) * up, down[0].to(x.dtype))
        out = out * weights.reshape(-1, 1).to(out.dtype)
        return out.view(-1, top_k, self.hidden).sum(1).to(x.dtype)


class _FakeScan(torch.autograd.Function):
    """A stand-in for the recurrence of ``kernels.cpu.delta_scan`` over one sequence."""

    @staticmethod
    def forward(ctx: Any, cost: StepCost, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *parts, state = inputs
        held = [part.contiguous() for part in parts]
        last, begun, out = state.clone(), state.clone(), torch.empty_like(held[2])
        ctx.cost, ctx.num_operations = cost, out.shape[0] * state.numel()
        cost.native_flops += SCAN_FORWARD_OPERATIONS * ctx.num_operations
        ctx.save_for_backward(*held, begun)
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, k, v, decay, beta, _ = ctx.saved_tensors
        ctx.cost.native_flops += SCAN_BACKWARD_OPERATIONS * ctx.num_operations
        d_q, d_k = (k.new_empty(*v.shape[:2], k.shape[2]) for _ in range(2))
        d_v, d_decay, d_beta = (torch.empty_like(part) for part in (v, decay, beta))
        d_q, d_k = (d.unflatten(1, (k.shape[1], -1)).sum(2) for d in (d_q, d_k))
        return None, d_q, d_k, d_v, d_decay, d_beta, None


def _merge(weight: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return torch.baddbmm(weight, b.to(weight.dtype), a.to(weight.dtype))


class _FakeProduct(torch.autograd.Function):
    """A stand-in for ``multiply_frozen``: counts a product and keeps no tensor for the backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, owner: "_Linear", x: Tensor) -> Tensor:
        ctx.owner = owner
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return owner.multiply(x.shape[:-1], owner.out_features, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.owner.multiply(ctx.shape[:-1], ctx.owner.in_features, ctx.dtype)


class _Linear(nn.Linear):
    """A stand-in for a packed matrix that counts its products; an ``nn.Linear``, so that PEFT
    adapts it.
    """

    def __init__(self, old: nn.Linear, cost: StepCost) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = old.in_features, old.out_features
        self.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
        self.bias = None  # type: ignore[assignment]
        self._cost = cost

    def multiply(self, leading: torch.Size, width: int, dtype: torch.dtype) -> Tensor:
        rows = leading.numel()
        self._cost.native_flops += 2 * rows * self.in_features * self.out_features
        return torch.empty((*leading, width), dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        out = _FakeProduct.apply(self, input)
        assert isinstance(out, Tensor)
        return out


class _FakeLoss(torch.autograd.Function):
    """A stand-in for the loss of ``training.loss`` over a frozen head [V, D]: allocates tensors of
    the same sizes, as if all rows were learned.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, hidden: Tensor) -> Tensor:
        d_hidden = torch.zeros_like(hidden)
        for rows in hidden.split(count_piece_rows(len(weight))):
            logits = (rows.to(weight.dtype) @ weight.t()).float()
            _ = (logits.to(weight.dtype) @ weight).to(d_hidden.dtype)
            del logits
        ctx.save_for_backward(d_hidden)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (d_hidden,) = ctx.saved_tensors
        return None, d_hidden * grads[0].to(d_hidden.dtype)


def _take_loss(model: Any, ids: Tensor, shape: StepShape) -> tuple[Tensor, Any]:
    """Run the forward pass and the loss in the way that the run does.

    Returns: the loss, and the object that keeps further tensors alive as in the run; None if none
        are.
    """
    base = model.get_base_model()
    head, text = base.get_output_embeddings(), base.config.get_text_config()
    is_plain = type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad
    has_own_loss = any(getattr(text, key, None) for key in LOGIT_KEYS)
    if is_plain and not has_own_loss and not shape.has_reference:
        hidden = base.base_model(input_ids=ids)[0][:, :-1].flatten(0, 1)
        loss = _FakeLoss.apply(head.weight, hidden)
        assert isinstance(loss, Tensor)
        return loss, None
    out = model(input_ids=ids, labels=ids)
    if shape.is_bf16:
        # accelerate converts logits to float32 in mixed precision; the stand-in does the same, so
        # that memory is equal.
        out.logits = out.logits.float()
    return out.loss, out


def _replace_packed(model: Any, shape: StepShape, cost: StepCost) -> None:
    """Replace routed experts, gated delta rules and packed matrices by stand-ins that count their
    cost.
    """
    for name, module in list(model.named_modules()):
        if find_expert_shapes(module):
            stand_in = _Experts(module, cost, shape)
            model.set_submodule(name, stand_in)
    for name, spec in observe_state_mixers(model).items():
        if isinstance(spec, GatedDeltaSpec | KimiDeltaSpec):
            frozen = freeze_mixer(model.get_submodule(name), spec, partial(_FakeScan.apply, cost))
            model.set_submodule(name, frozen)
    if shape.has_packed_linear:
        for name in find_targets(model, "all"):
            model.set_submodule(name, _Linear(model.get_submodule(name), cost))


def _make_fake(model: Any, dtype: torch.dtype) -> None:
    """Replace the model's parameters and buffers by fake tensors on the CPU, frozen ones in
    ``dtype`` and trained ones in float32. Tied parameters stay tied.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if old not in made:
                kind = torch.float32 if old.requires_grad else dtype
                data = torch.empty(old.shape, dtype=kind, device="cpu")
                made[old] = nn.Parameter(data, requires_grad=old.requires_grad)
            setattr(module, name, made[old])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))


def simulate_step(
    make_skeleton: Callable[[], Any],
    layers: Sequence[LayerSpec],
    shape: StepShape,
    adapt: Callable[[Any], Any],
) -> StepCost:
    """Return the cost of a training step, found by running a few layers of the model on fake
    tensors.

    Layers with equal specifications cost the same. So one layer of each kind is run, then, for each
    kind, the same with one more layer of it: the difference is the cost of each further layer.

    Args:
        make_skeleton: returns transformers' model on the meta device, which is changed here.
        layers: the model's decoder layers.
        shape: sizes and options of the step.
        adapt: returns the model that it is given with the run's adapters.
    """
    kinds: dict[LayerSpec, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer.index)
    first = [members[0] for members in kinds.values()]
    once = _run_step(make_skeleton(), sorted(first), shape, adapt)
    total = once
    for members in kinds.values():
        if len(members) > 1:
            twice = _run_step(make_skeleton(), sorted([*first, members[1]]), shape, adapt)
            total = total.plus(twice, once, len(members) - 1)
    return total


def _run_step(model: Any, layers: list[int], shape: StepShape, adapt: Any) -> StepCost:
    """Return the cost of a step through only the layers with these numbers. ``model`` is changed.

    The adapters are those that ``adapt`` adds.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    cost = StepCost()
    _keep_layers(model, layers)
    _replace_packed(model, shape, cost)
    model.requires_grad_(False)
    model.config.use_cache = False
    model = adapt(model)
    dtype = torch.bfloat16 if shape.is_bf16 else torch.float32
    with FakeTensorMode():
        _make_fake(model, dtype)
        model.train()
        if shape.is_checkpointed:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            with warnings.catch_warnings():
                # A later release of transformers warns that the parameter will be renamed.
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        counter = _Counter(cost)
        for tensor in (*model.parameters(), *model.buffers()):
            counter.ignore(tensor)
        ids = torch.zeros((shape.num_rows, shape.num_tokens), dtype=torch.int64)
        rounding = torch.autocast("cpu", dtype=dtype) if shape.is_bf16 else nullcontext()
        with counter:
            with rounding:
                loss, _kept = _take_loss(model, ids, shape)
            cost.kept_bytes = counter.alive_bytes
            if shape.has_reference:
                with rounding, torch.no_grad(), model.disable_adapter():
                    model(input_ids=ids, logits_to_keep=1)
            loss.backward()
    cost.temporary_bytes = max(counter.peak_bytes - cost.kept_bytes, 0)
    return cost


def _keep_layers(model: Any, layers: list[int]) -> None:
    """Remove all decoder layers from the model except those with these numbers."""
    kept = [model.model.layers[i] for i in layers]
    types = getattr(model.config, "layer_types", None)
    if types is not None:
        model.config.layer_types = [types[i] for i in layers]
    model.config.num_hidden_layers = len(layers)
    model.model.layers = nn.ModuleList(kept)
