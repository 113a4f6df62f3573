"""A forward step in torch: RoPE angles, cache slots and attention plan, shared by all layers.

Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.core.model.layers import IndexSpec
from tandem.kernels.activation import apply_function
from tandem.kernels.gated_delta import GatedDeltaRows
from tandem.kernels.interfaces import Angles, AttentionRule
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.native import Buffer
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import BesideExperts, DecoderLayer, LayerInput
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import ExpertChoice, MoeBlock
from tandem.kernels.operators.rope import apply_rope_, scale_positions
from tandem.kernels.paged import PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.state_space.mixers import StateSpace
from tandem.kernels.state_space.rules import StateRows
from tandem.kernels.states import StateCache
from tandem.kernels.torch.attention import (
    DecodeGroup,
    Prefill,
    attend_decodes,
    attend_prefill,
    plan_attention,
)
from tandem.kernels.torch.gated_delta import run_gated_delta
from tandem.kernels.torch.index import attend_chosen, choose_tokens, project_index
from tandem.kernels.torch.latents import project_latents

__all__ = ["Group", "TorchStep", "compute_angles"]


def compute_angles(rope: Angles, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a RoPE's cosines, and its sines with their first half negated, each [T, 1, r], for
    ``apply_rope_``.
    """
    cos, sin = rope.compute(positions, dtype)
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    return cos[:, None], signed[:, None]


def _norm_heads(attention: Attention, qk_THd: Tensor) -> Tensor:
    """Return normed queries and keys, new; the inputs themselves if the layer has no such norm."""
    spec, norm = attention.spec, attention.spec.qk_norm
    if norm is None:
        return qk_THd
    heads, offset = spec.num_heads, norm.offset
    parts: list[Tensor] = []
    for part, held in (
        (qk_THd[:, :heads], attention.held_q),
        (qk_THd[:, heads:], attention.held_k),
    ):
        if held is None:
            continue
        weight = held.tensor.float() + offset if offset else held.tensor
        rows = part.flatten(1) if spec.is_full_norm else part
        normed = torch.rms_norm(rows, (rows.shape[-1],), None, norm.eps)
        parts.append((normed * weight).to(part.dtype).view(part.shape))
    return torch.cat(parts, 1)


def _place_values(attention: Attention, product_TN: Tensor) -> Tensor:
    """Return queries, keys and values with equal head sizes: values are keys again, or
    zero-padded.
    """
    spec = attention.spec
    heads, kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    end = (heads + kv_heads) * d
    first = heads * d if spec.keys_are_values else end
    values = product_TN[:, first:].unflatten(1, (kv_heads, -1)) * spec.value_scale
    padded = torch.nn.functional.pad(values, (0, d - spec.value_dim))
    return torch.cat((product_TN[:, :end], padded.flatten(1)), 1)


def _norm_values(attention: Attention, v_TKd: Tensor) -> None:
    """Norm the values in place if the layer has a norm of values."""
    spec = attention.spec
    if spec.has_value_norm and spec.qk_norm is not None:
        v_TKd.copy_(torch.rms_norm(v_TKd, (spec.head_dim,), None, spec.qk_norm.eps))


class TorchStep:
    """A step that runs a model's layers with torch operators.

    Args:
        batch: the tokens; borrowed.
        cache: the block pool.
        ropes: give the RoPE angles.
        dtype: the model's dtype.
        on_layer: called once a layer's KV of this step is stored, with the layer's index in the
            cache; not called for layers with a sliding window whose blocks are separate.
        states: the sequences' state slots; None if no layer has a state.
        routing: records the routers' choices and defers experts; None: neither.
    """

    def __init__(
        self,
        batch: PagedBatch,
        cache: PagedKvCache,
        ropes: tuple[Angles, ...],
        dtype: torch.dtype,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        routing: StepRouting | None = None,
    ) -> None:
        groups = [_plan_group(cache, batch)]
        if cache.windows is not None:
            own = cache.place_windows(batch)
            assert own is not None, "no blocks for the layers with a window"
            groups.append(_plan_group(cache.windows, own))
        self._init_parts(
            cache, groups, batch.positions, on_layer=on_layer, states=states, routing=routing
        )
        self._batch = batch
        self._state_rows = (batch.query_start, list(batch.state_slots), None)
        self._angles = [compute_angles(rope, batch.positions, dtype) for rope in ropes]

    def _init_parts(
        self,
        cache: PagedKvCache,
        groups: "list[Group]",
        positions: Tensor,
        *,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        routing: StepRouting | None = None,
    ) -> None:
        self._places = cache.places
        self._groups = groups
        self._on_layer = on_layer
        self._states = states
        self._state_rows: tuple[Sequence[int], list[int], Tensor | None] = ((), [], None)
        self._routing = routing
        self._batch: PagedBatch | None = None
        """The step's batch, in which sparse attention looks up the sequences."""
        self._chosen: Tensor | None = None
        """Positions that the last index chose, [T, n]."""
        self._written: dict[int, Tensor] = {}
        """Keys and values of the step by layer, for layers that share them."""
        self._residual: Tensor | None = None
        """Residual stream of the layer whose routed experts' output is still to be added."""
        self._beside: _Beside | None = None
        """State of the running layer if its experts run in parallel with its MLP on the same
        residual stream; otherwise None.
        """
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._positions = positions
        self.loads: KvArrivals | None = None
        """Arrivals of KV on the device, which each layer waits for before it attends; None: no KV
        is being copied.
        """
        self.layer_inputs: Tensor | None = None
        """Inputs [T, layers, items] of models whose layers have an additional input; set before the
        layers run.
        """

    def begin_(self) -> None:
        """Do nothing: the step was planned when it was constructed."""

    def run_layer_(self, layer: nn.Module, x_TD: Tensor) -> None:
        """Run one decoder layer on the residual stream ``x_TD``, in place."""
        choice = self.choose_experts_(layer, x_TD)
        if choice is None:
            return
        self.run_shared_(choice)
        routing, experts, x = self._routing, choice.experts, choice.x.tensor
        ids, weights = choice.ids.tensor, choice.weights.tensor
        if choice.block is None:
            self.leave_sum_(Buffer(experts(x, ids, weights)))
        elif experts.spec.scales_input:
            x_TD += experts(x, ids, weights)
        elif routing is not None and routing.defers:
            immediate, late = routing.split(ids, weights)
            routing.add_into_(x_TD, experts, x, immediate, late, weights)
        else:
            experts.add_into_(x_TD, x, ids, weights)

    def choose_experts_(self, layer: nn.Module, x_TD: Tensor) -> ExpertChoice | None:
        """Run a layer up to its router's choice; None: the layer has no experts and is complete."""
        assert isinstance(layer, DecoderLayer), "a layer that is not fused"
        first_norm, attention, attention_out_norm, second_norm, mlp, mlp_out_norm = layer.parts
        mixed = self.mix(attention, x_TD if first_norm is None else first_norm(x_TD))
        if attention_out_norm is None:
            attention.output_matrix.add_into_(x_TD, mixed)
        else:
            x_TD += attention_out_norm(attention.output_matrix.forward(mixed, dtype=x_TD.dtype))
        h = x_TD if second_norm is None else second_norm(x_TD)
        routing = self._routing
        if routing is not None:
            routing.enter_layer()
        if isinstance(mlp, MoeBlock):
            return self._choose(mlp, x_TD, h)
        late = None if routing is None else routing.take_carried()
        if late is not None:
            x_TD += late
        if layer.beside is not None:
            return self._choose_beside(layer, layer.beside, x_TD, h)
        if mlp_out_norm is None:
            mlp.add_into_(x_TD, h)
        else:
            x_TD += mlp_out_norm(mlp(h))
        self._end_layer_(layer, x_TD)
        return None

    def _end_layer_(self, layer: DecoderLayer, x_TD: Tensor) -> None:
        if layer.own_input is not None:
            self._add_input_(layer, layer.own_input, x_TD)
        if layer.scale_1 is not None:
            x_TD *= layer.scale_1

    def _choose_beside(
        self, layer: DecoderLayer, beside: BesideExperts, x_TD: Tensor, h_TD: Tensor
    ) -> ExpertChoice:
        """Run the router of a layer whose experts run beside (in parallel with) its MLP, whose
        input is ``h_TD``; return its choice.
        """
        _, weights, ids = beside.router.route(x_TD)
        if self._routing is not None:
            self._routing.find_choices().tensor.copy_(ids)
        self._beside = _Beside(layer, beside, x_TD, h_TD)
        given = (Buffer(x_TD), Buffer(beside.norm(x_TD)), Buffer(ids), Buffer(weights))
        return ExpertChoice(None, beside.experts, *given)

    def _add_input_(self, layer: DecoderLayer, parts: LayerInput, x_TD: Tensor) -> None:
        """Gate and norm a layer's additional input and add it to the residual stream."""
        assert self.layer_inputs is not None, "a layer with an input of its own without inputs"
        gate = apply_function(parts.activation, parts.gate(x_TD))
        gated = gate * self.layer_inputs[:, layer.layer_idx]
        x_TD += parts.norm(parts.projection(gated))

    def _choose(self, block: MoeBlock, x_TD: Tensor, h_TD: Tensor) -> ExpertChoice:
        router, experts = block.operators
        _, weights, ids = router.route(h_TD)
        if self._routing is not None:
            self._routing.find_choices().tensor.copy_(ids)
        self._residual = x_TD
        given = (Buffer(x_TD), Buffer(h_TD), Buffer(ids), Buffer(weights))
        return ExpertChoice(block, experts, *given)

    def run_shared_(self, choice: ExpertChoice) -> None:
        """Add the output of the shared experts, if the layer has any, to the residual stream.

        If the experts are beside an MLP, the MLP is computed, which ``leave_sum_`` adds.
        """
        if choice.block is None:
            assert self._beside is not None, "no layer has chosen experts"
            layer, beside, _, h_TD = self._beside[:4]
            assert isinstance(layer.parts.mlp, Mlp), "experts beside a block of experts"
            self._beside = self._beside._replace(branch_TD=beside.mlp_norm(layer.parts.mlp(h_TD)))
            return
        shared, gate, x_TD = choice.block.shared, choice.block.shared_gate, choice.x.tensor
        if shared is not None:
            scale = None if gate is None else gate(x_TD)
            shared.add_into_(choice.residual.tensor, x_TD, scale)

    def leave_sum_(self, out_TD: Buffer) -> None:
        """Add the experts' sum to the residual stream at once, where a native step would leave it
        to the next norm.
        """
        if self._beside is not None:
            (layer, beside, x_TD, _, branch_TD), self._beside = self._beside, None
            out_norm = layer.parts.mlp_out_norm
            assert branch_TD is not None and out_norm is not None, "the MLP was not computed"
            x_TD += out_norm(branch_TD + beside.experts_norm(out_TD.tensor.to(x_TD.dtype)))
            self._end_layer_(layer, x_TD)
            return
        assert self._residual is not None, "no layer has chosen experts"
        self._residual += out_TD.tensor

    def complete_(self, x_TD: Tensor) -> None:
        """Do nothing: a torch step adds every sum to the residual stream at once, so none is
        left.
        """

    def mix(self, attention: nn.Module, h_TD: Tensor) -> Tensor:
        """Return the output of attention, or of a recurrence, for the normed hidden states."""
        if isinstance(attention, MlaAttention):
            return self._mix_latents(attention, h_TD)
        if isinstance(attention, GatedDelta):
            return self._mix_states(attention, h_TD)
        if isinstance(attention, StateSpace):
            assert self._states is not None, "a layer with a state without slots"
            slots = self._states.layers[attention.state_idx]
            return attention.mix_torch(h_TD, StateRows(*self._state_rows), slots)
        assert isinstance(attention, Attention), "attention that is not ours"
        spec = attention.spec
        heads, kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        product = attention.qkv_matrix.forward(h_TD, dtype=h_TD.dtype)
        qkv = _place_values(attention, product) if spec.is_rearranged else product
        qkv = qkv.view(len(h_TD), -1, d)
        gate = qkv[:, :heads] if spec.has_out_gate else None
        qkv = qkv if gate is None else qkv[:, heads:]
        qk = qkv[:, : heads + kv_heads]
        normed = _norm_heads(attention, qk)
        cos, signed_sin = self._angles[spec.rope_idx]
        size = cos.shape[-1]
        if normed is not qk:
            qk[..., size:] = normed[..., size:]
        apply_rope_(qk[..., :size], normed[..., :size], cos, signed_sin)
        if spec.shares_kv_of >= 0:
            kv = self._written[attention.layer_idx]
        else:
            _norm_values(attention, qkv[:, heads + kv_heads :])
            kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
            self.write_kv(attention.layer_idx, kv)
        q = qkv[:, :heads]
        if spec.position_scale is not None:
            q = q * scale_positions(spec.position_scale, self._positions, q.dtype)[:, None, None]
        mixed = self.attend(attention.layer_idx, q, kv, spec.scale, attention.rule)
        if spec.value_dim < d:
            mixed = mixed.view(-1, heads, d)[..., : spec.value_dim].flatten(1)
        return mixed if gate is None else mixed * torch.sigmoid(gate.flatten(1))

    def _mix_states(self, layer: GatedDelta, h_TD: Tensor) -> Tensor:
        assert self._states is not None, "a layer with a state without slots"
        spec = layer.spec
        qkvz = layer.qkvz_matrix.forward(h_TD, dtype=h_TD.dtype)
        b, a = layer.ba_matrix.forward(h_TD, dtype=torch.float32).chunk(2, -1)
        channels = spec.num_channels
        rows = GatedDeltaRows(qkvz[:, :channels], qkvz[:, channels:], a, b, *self._state_rows)
        return run_gated_delta(layer.rule, rows, self._states.layers[layer.state_idx])

    def _mix_latents(self, attention: MlaAttention, h_TD: Tensor) -> Tensor:
        spec = attention.spec
        angles = self._angles[spec.rope_idx]
        q, key, rest = project_latents(attention, h_TD, *angles)
        if spec.position_scale is not None:
            q *= scale_positions(spec.position_scale, self._positions, q.dtype)[:, None, None]
        if spec.index is not None:
            self._choose_tokens(
                attention, spec.index, project_index(attention, h_TD, rest, *angles)
            )
        self.write_kv(attention.layer_idx, key[:, 0])
        if spec.top:
            mixed = self._attend_chosen(attention.layer_idx, q, spec.scale)
        else:
            mixed = self.attend(attention.layer_idx, q, key, spec.scale, attention.rule)
        heads = mixed.view(len(q), spec.num_heads, spec.rank)
        return attention.value_heads.forward(heads).reshape(len(q), -1)

    def _choose_tokens(
        self, attention: MlaAttention, spec: IndexSpec, made: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Store index keys and choose by them the tokens that this layer, and those that share,
        attend to.
        """
        assert self._batch is not None, "an index in a step whose memory stays where it is"
        place = self._places[attention.layer_idx]
        if self.loads is not None:
            self.loads.wait(place)
        group, (queries, keys, weights) = self._groups[place.group], made
        group.write_index(place.layer_idx, keys)
        self._chosen = choose_tokens(
            group.cache,
            self._batch,
            place.layer_idx,
            queries,
            weights * spec.scale,
            attention.spec.top,
        )

    def _attend_chosen(self, layer_idx: int, q_THd: Tensor, scale: float) -> Tensor:
        assert self._batch is not None and self._chosen is not None, "no index has chosen"
        place = self._places[layer_idx]
        cache = self._groups[place.group].cache
        return attend_chosen(cache, self._batch, place.layer_idx, q_THd, self._chosen, scale)

    def write_kv(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Store keys and values of the step's tokens in a layer's cache blocks."""
        place = self._places[layer_idx]
        if self.loads is not None:
            self.loads.wait(place)
        self._groups[place.group].write(place.layer_idx, kv_T2Kd)
        self._written[layer_idx] = kv_T2Kd
        if self._on_layer is not None and place.group == 0:
            self._on_layer(place.layer_idx)

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Attend with the given queries to a layer's keys and values; return [T, H * d]."""
        place = self._places[layer_idx]
        return self._groups[place.group].attend(place.layer_idx, q_THd, kv_T2Kd, scale, rule)


class _Beside(NamedTuple):
    """A layer whose experts run beside (in parallel with) its MLP, while they are being
    computed.
    """

    layer: DecoderLayer
    beside: BesideExperts
    x_TD: Tensor  # noqa: N815 - a shape suffix
    """Residual stream."""
    h_TD: Tensor  # noqa: N815
    """Input of the MLP."""
    branch_TD: Tensor | None = None  # noqa: N815
    """Normed output of the MLP, once it is computed."""


class Group:
    """A group of layers whose blocks hold the same tokens, with its attention plan for a step.

    Args:
        cache: pool of the group's blocks.
        slots: block and offset of each token.
        runs: the same slots as runs of rows within a block, where copying runs is cheaper.
        decodes: groups of sequences with one query each.
        prefills: the other sequences.
    """

    def __init__(
        self,
        cache: PagedKvCache,
        slots: tuple[Tensor, Tensor],
        runs: tuple[tuple[int, int, int, int], ...] | None,
        decodes: list[DecodeGroup],
        prefills: list[Prefill],
    ) -> None:
        self.cache = cache
        self._slots, self._runs = slots, runs
        self.decodes, self._prefills = decodes, prefills

    def write(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Write the KV of the step's tokens in one of the group's layers, whose blocks hold the
        same tokens.
        """
        cache = self.cache
        if kv_T2Kd.dtype != cache.dtype:
            kv_T2Kd = kv_T2Kd.to(cache.dtype)
        self._put(cache.slots[layer_idx], kv_T2Kd)

    def write_index(self, layer_idx: int, keys_TI: Tensor) -> None:
        """Write the step's index keys, by which sparse attention chooses tokens, in one of the
        group's layers.
        """
        self._put(self.cache.index_slots[layer_idx], keys_TI.to(self.cache.dtype))

    def _put(self, slots: Tensor, rows: Tensor) -> None:
        if self._runs is None:
            slots.index_put_(self._slots, rows)
        else:
            for block_id, offset, first, end in self._runs:
                slots[block_id, offset : offset + end - first] = rows[first:end]

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Run attention in one of the group's layers over its blocks; return [T, H * d]."""
        cache = self.cache
        num_tokens, num_heads, _ = q_THd.shape
        value_dim = cache.layout.value_size
        if len(self.decodes) == 1 and self.decodes[0].rows is None:
            return attend_decodes(cache, self.decodes[0], layer_idx, q_THd, scale, rule)
        out = q_THd.new_empty(num_tokens, num_heads, value_dim)
        for group in self.decodes:
            mixed = attend_decodes(cache, group, layer_idx, q_THd[group.rows], scale, rule)
            out[group.rows] = mixed.view(-1, num_heads, value_dim)
        for prefill in self._prefills:
            rows = slice(prefill.first_row, prefill.first_row + prefill.num_rows)
            q, kv = q_THd[rows], kv_T2Kd[rows]
            attend_prefill(cache, prefill, layer_idx, q, kv, scale, rule, out[rows])
        return out.view(num_tokens, -1)


def _plan_group(cache: PagedKvCache, batch: PagedBatch) -> Group:
    # With an index (sparse attention) rows are gathered after the index has chosen them, so nothing
    # is planned for them here.
    is_planned = cache.layout.num_layers and not cache.index_slots
    decodes, prefills = plan_attention(batch, cache) if is_planned else ([], [])
    slots = (batch.slot_blocks, batch.slot_offsets)
    return Group(cache, slots, batch.slot_runs, decodes, prefills)
