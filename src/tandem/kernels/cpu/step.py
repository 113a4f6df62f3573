"""A forward step on native operators: attention plan, RoPE angles, and buffers that layers share.

A layer is a short list of native calls on existing views. Matrix products add to the residual as
they are written; the experts' sum is added by the next layer's norm, which reads the residual
anyway.

Shapes: T tokens, D hidden, H query heads, K KV heads, d head_dim, E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tandem import _native
from tandem._native import ThreadPool
from tandem.core.model.layers import GqaSpec
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.cpu.latents import LatentBuffers
from tandem.kernels.interfaces import Angles, AttentionRule
from tandem.kernels.lanes.mirrors import KvArrivals
from tandem.kernels.latents.attention import LatentStep
from tandem.kernels.native import Buffer, view_tensor
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import BesideExperts, DecoderLayer, LayerInput
from tandem.kernels.operators.experts import RoutedExperts
from tandem.kernels.operators.gated_delta import GatedDelta
from tandem.kernels.operators.mla import MlaAttention
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.moe import ExpertChoice, MoeBlock, Router
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.operators.rope import Unrotated, scale_positions
from tandem.kernels.paged import LayerPlace, PagedBatch, PagedKvCache
from tandem.kernels.routing import StepRouting
from tandem.kernels.state_space.mixers import NativeRows, StateSpace
from tandem.kernels.state_space.rules import StateRows
from tandem.kernels.states import StateCache

__all__ = ["CpuStep"]


class CpuStep:
    """A step that runs a model's layers with native CPU operators.

    Args:
        batch: the tokens; its block table is kept.
        cache: pool of KV blocks with a native view.
        ropes: give the RoPE angles.
        dtype: the model's dtype.
        pool: threads that share the work; None: the caller's thread.
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
        pool: ThreadPool | None = None,
        on_layer: Callable[[int], None] | None = None,
        states: StateCache | None = None,
        routing: StepRouting | None = None,
    ) -> None:
        self._num_tokens = batch.num_tokens
        self._pool = pool
        self._places = cache.places
        self._latents: LatentStep | None = None
        self._groups: list[_native.PlannedAttention | None] = [None]
        if cache.latents is None:
            self._groups = [_plan_attention(cache, batch, pool)]
        else:
            assert on_layer is None, "layers are announced whose KV is not in memory"
            self._latents = LatentStep(
                cache.latents,
                batch.block_table.numpy(),
                batch.query_start,
                batch.context_lens,
                block_size=batch.block_size,
                pool=pool,
            )
        if cache.windows is not None:
            own = cache.place_windows(batch)
            assert own is not None, "no blocks for the layers with a window"
            self._groups.append(_plan_attention(cache.windows, own, pool))
        self._index: _native.PlannedAttention | None = None
        self._index_layers = tuple(cache.index_slots)
        if cache.native_index is not None:
            self._index = _native.PlannedAttention(
                cache.native_index,
                batch.block_table,
                batch.query_start,
                batch.context_lens,
                pool,
            )
        angles = [rope.compute(batch.positions, dtype) for rope in ropes]
        self._angles = [(view_tensor(cos), view_tensor(sin)) for cos, sin in angles]
        self._positions = batch.positions
        self.layer_inputs: Tensor | None = None
        """Inputs [T, layers, items] of models whose layers have an additional input; set before the
        layers run.
        """
        self.loads: KvArrivals | None = None
        """Arrivals of KV on the device, which each layer waits for before it attends; None: no KV
        is being copied.
        """
        self._no_angles: tuple[_native.TensorView, _native.TensorView] | None = None
        self._dtype = dtype
        self._on_layer = on_layer
        self._states = states
        self._state_rows = (batch.query_start, list(batch.state_slots))
        self._routing = routing
        self._residual: Buffer | None = None
        self._pending: Buffer | None = None
        """Output of the last module, which the next norm adds to the residual stream; its contents
        must not change until then.
        """
        self._beside: tuple[DecoderLayer, Buffer] | None = None
        """The running layer and the input of its MLP, if the layer's experts run in parallel with
        the MLP on the same residual stream; otherwise None.
        """
        self._buffers = cache.step_buffers(self._num_tokens, dtype)

    def begin_(self) -> None:
        """Do nothing: the step was planned when it was constructed."""

    def run_layer_(self, layer: nn.Module, x_TD: Tensor) -> None:
        """Run one decoder layer on the residual stream ``x_TD``, in place."""
        choice = self.choose_experts_(layer, x_TD)
        if choice is None:
            return
        if choice.block is None or choice.block.shared is not None:
            self.run_shared_(choice)
        routing, experts, x = self._routing, choice.experts, choice.x
        ids, weights = choice.ids, choice.weights
        is_native = isinstance(experts, NativeExperts) and weights.tensor.dtype == torch.float32
        if choice.block is None and not is_native:
            self.leave_sum_(Buffer(experts(x.tensor, ids.tensor, weights.tensor)))
        elif experts.spec.scales_input:
            # If router weights scale the experts' inputs, each (token, expert) choice needs an
            # input row of its own: the operator allocates these rows at each call and does not use
            # the step's buffers.
            choice.residual.tensor.add_(experts(x.tensor, ids.tensor, weights.tensor))
        elif routing is not None and routing.defers:
            self._add_deferring(routing, experts, choice.residual, x, ids, weights)
        elif isinstance(experts, NativeExperts) and is_native:
            out = self._buffer("experts_out", experts.hidden_size, torch.float32)
            experts.run(x, ids, weights, out)
            self.leave_sum_(out)
        else:
            residual = choice.residual.tensor
            experts.add_into_(residual, x.tensor, ids.tensor, weights.tensor)

    def choose_experts_(self, layer: nn.Module, x_TD: Tensor) -> ExpertChoice | None:
        """Run a fused layer up to its router's choice; None: the layer has no experts and is
        complete.

        ``run_shared_`` and ``leave_sum_`` complete the layer, in any order.
        """
        assert isinstance(layer, DecoderLayer), "a layer that is not fused"
        first_norm, attention, attention_out_norm, second_norm, mlp, mlp_out_norm = layer.parts
        x = self._view_residual(x_TD)
        mixed = self._mix(attention, self._norm(first_norm, x))
        if attention_out_norm is None:
            attention.output_matrix.run(mixed, x, is_added=True)
        else:
            branch = self._buffer("attention_out", attention.output_matrix.out_features)
            attention.output_matrix.run(mixed, branch)
            self._norm_branch(attention_out_norm, branch)
        h = self._norm(second_norm, x)
        if self._routing is not None:
            self._routing.enter_layer()
        if isinstance(mlp, Mlp):
            late = None if self._routing is None else self._routing.take_carried()
            if late is not None:
                x.tensor.add_(late)
            if layer.beside is not None:
                self._beside = (layer, h)
                return self._choose_beside(layer.beside, x)
            self._run_mlp(mlp, x, h, mlp_out_norm)
            self._end_layer(layer, x)
            return None
        return self._choose(mlp, x, h)

    def _end_layer(self, layer: DecoderLayer, x_TD: Buffer) -> None:
        if layer.own_input is not None:
            self._add_input(layer, layer.own_input, x_TD)
        if layer.scale_1 is not None:
            self.complete_(x_TD.tensor)
            x_TD.tensor.mul_(layer.scale_1)

    def run_shared_(self, choice: ExpertChoice) -> None:
        """Add the output of the shared experts, if the layer has any, to the residual stream.

        If the experts are beside an MLP, the MLP is computed, which ``leave_sum_`` adds.
        """
        block = choice.block
        if block is None:
            self._run_beside()
        elif block.shared is not None:
            self._add_shared(block, block.shared, choice.residual, choice.x)

    def leave_sum_(self, out_TD: Buffer) -> None:
        """Leave the experts' sum, float32, to be added to the residual stream by the next norm; the
        buffer must keep its contents until then.
        """
        if self._beside is not None:
            (layer, _), self._beside = self._beside, None
            self._leave_beside(layer, out_TD)
            return
        assert self._pending is None, "two addends without a norm between them"
        self._pending = out_TD

    def complete_(self, x_TD: Tensor) -> None:
        """Add to the residual stream what the last layer left for the next norm (see
        ``leave_sum_``), if anything; call it after the last layer.
        """
        if self._pending is not None:
            x_TD += self._pending.tensor
            self._pending = None

    def mix(self, attention: nn.Module, h_TD: Tensor) -> Tensor:
        """Return the output of attention, or of a recurrence, for the normed hidden states."""
        assert isinstance(attention, Attention | MlaAttention | GatedDelta | StateSpace), (
            "a mixer not ours"
        )
        return self._mix(attention, Buffer(h_TD)).tensor

    def write_kv(self, layer_idx: int, kv_T2Kd: Tensor) -> None:
        """Store keys and values of the step's tokens in a layer's cache blocks."""
        self._wait_loads(layer_idx)
        self._store(layer_idx, view_tensor(kv_T2Kd.contiguous().flatten(1, 2)))

    def _wait_loads(self, layer_idx: int) -> None:
        if self.loads is not None:
            self.loads.wait(self._places[layer_idx])

    def _store(self, layer_idx: int, rows: _native.TensorView, first_head: int = 0) -> None:
        attention, place = self._find_layer(layer_idx)
        attention.store(place.layer_idx, rows, first_head)
        if self._on_layer is not None and place.group == 0:
            self._on_layer(place.layer_idx)

    def attend(
        self, layer_idx: int, q_THd: Tensor, kv_T2Kd: Tensor, scale: float, rule: AttentionRule
    ) -> Tensor:
        """Attend with the given queries to the layer's stored keys and values; return [T, H
        * d].
        """
        del kv_T2Kd
        q = q_THd.contiguous()
        out = torch.empty_like(q)
        self._attend(layer_idx, view_tensor(q), view_tensor(out), scale, rule)
        return out.view(len(q), -1)

    def _norm(self, norm: RmsNorm | None, x_TD: Buffer) -> Buffer:
        """Return the norm of the residual stream, after adding what an earlier part of the layer
        left to be added (the pending sum).
        """
        pending = self._pending
        if norm is None:
            self.complete_(x_TD.tensor)
            return x_TD
        out, weight = self._buffer("normed", norm.size), norm.held.view
        offset, pool = norm.offset, self._pool
        if pending is None:
            _native.rms_norm(
                x_TD.view, weight, out.view, norm.eps, None, pool, weight_offset=offset
            )
        else:
            self._pending = None
            _native.rms_norm(
                pending.view, weight, out.view, norm.eps, x_TD.view, pool, weight_offset=offset
            )
        return out

    def _norm_branch(self, norm: RmsNorm, branch_TD: Buffer) -> None:
        """Norm the output of a layer's branch (attention or MLP) in place; the next norm will add
        it to the residual stream.
        """
        assert self._pending is None, "two addends without a norm between them"
        view = branch_TD.view
        _native.rms_norm(
            view, norm.held.view, view, norm.eps, None, self._pool, weight_offset=norm.offset
        )
        self._pending = branch_TD

    def _mix(
        self, attention: Attention | MlaAttention | GatedDelta | StateSpace, h_TD: Buffer
    ) -> Buffer:
        """Run attention or a recurrence as ``mix`` does, but with inputs and results in the step's
        buffers.
        """
        if not isinstance(attention, Attention):
            return self._mix_otherwise(attention, h_TD)
        spec, layer_idx = attention.spec, attention.layer_idx
        self._wait_loads(layer_idx)
        heads, kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        gates = heads if spec.has_out_gate else 0
        if attention.is_rearranged:
            product = self._buffer("projected", attention.num_projected)
        else:
            product = self._head_buffer("qkv", attention.num_projected // d, d)
        qkv, mixed = product, self._head_buffer("mixed", heads, d)
        attention.qkv_matrix.run(h_TD, product)
        if gates:
            qkv = self._part(product, gates * d, product.tensor.shape[1], d)
        if attention.is_rearranged:
            qkv = self._place_values(spec, product)
        shares = spec.shares_kv_of >= 0
        by_head = qkv.view
        q, k = attention.held_q, attention.held_k
        if attention.is_full_norm:
            self._norm_all_heads(attention, qkv)
            q = k = None
        _native.rotate_heads(
            by_head,
            *self._angles[spec.rope_idx],
            heads,
            0 if shares else kv_heads,
            None if q is None else q.view,
            None if k is None else k.view,
            0.0 if spec.qk_norm is None else spec.qk_norm.eps,
            self._pool,
            weight_offset=0.0 if spec.qk_norm is None else spec.qk_norm.offset,
        )
        if spec.position_scale is not None:
            queries = self._part(qkv, 0, heads * d).tensor
            queries *= scale_positions(spec.position_scale, self._positions, self._dtype)[:, None]
        if attention.held_v is not None and not shares:
            self._norm_values(attention, qkv)
        if not shares:
            self._store(layer_idx, by_head, heads)
        self._attend(layer_idx, by_head, mixed.view, spec.scale, attention.rule)
        if gates:
            gate, rows = self._part(product, 0, gates * d), self._part(mixed, 0, gates * d)
            _native.gate(gate.view, rows.view, "sigmoid", None, self._pool, up=rows.view)
        if attention.has_narrow_values:
            values = self._buffer("mixed_values", heads * spec.value_dim)
            part = mixed.tensor.unflatten(1, (heads, d))[..., : spec.value_dim]
            values.tensor.unflatten(1, (heads, -1)).copy_(part)
            return values
        return mixed

    def _mix_otherwise(self, mixer: MlaAttention | GatedDelta | StateSpace, h_TD: Buffer) -> Buffer:
        """Run latent attention, or a layer with a recurrent state, in the step's buffers."""
        if isinstance(mixer, MlaAttention):
            return self._mix_latents(mixer, h_TD)
        if isinstance(mixer, GatedDelta):
            return self._mix_states(mixer, h_TD)
        assert self._states is not None, "a layer with a state without slots"
        slots = self._states.layers[mixer.state_idx]
        rows = StateRows(*self._state_rows)
        native = NativeRows(rows, self._pool, self._buffer, self._part)
        return mixer.mix_native(h_TD, native, slots)

    def _place_values(self, spec: GqaSpec, product: Buffer) -> Buffer:
        """Return queries, keys and values with equal head sizes: values are keys again, or
        zero-padded.
        """
        heads, kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv, end = self._head_buffer("placed", heads + 2 * kv_heads, d), (heads + kv_heads) * d
        qkv.tensor[:, :end].copy_(product.tensor[:, :end])
        first = heads * d if spec.keys_are_values else end
        source = product.tensor[:, first:].unflatten(1, (kv_heads, -1))
        values = qkv.tensor[:, end:].unflatten(1, (kv_heads, d))
        torch.mul(source, spec.value_scale, out=values[..., : spec.value_dim])
        values[..., spec.value_dim :] = 0
        return qkv

    def _norm_values(self, attention: Attention, qkv: Buffer) -> None:
        """Norm each head's values in place, by the key kernel with a rotation of angle 0."""
        spec, held = attention.spec, attention.held_v
        assert held is not None and spec.qk_norm is not None, "a norm without weights"
        d, first = spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        values = self._part(qkv, first, qkv.tensor.shape[1], d)
        if self._no_angles is None:
            cos, sin = Unrotated().compute(self._positions, self._dtype)
            self._no_angles = (view_tensor(cos), view_tensor(sin))
        _native.rotate_heads(
            values.view,
            *self._no_angles,
            0,
            spec.num_kv_heads,
            None,
            held.view,
            spec.qk_norm.eps,
            self._pool,
        )

    def _mix_states(self, layer: GatedDelta, h_TD: Buffer) -> Buffer:
        assert self._states is not None, "a layer with a state without slots"
        spec, slots = layer.spec, self._states.layers[layer.state_idx]
        channels, values, heads = spec.num_channels, spec.all_values, spec.num_v_heads
        qkvz = self._buffer("qkvz", channels + values)
        ba = self._buffer("ba", 2 * heads, layer.ba_matrix.out_dtype)
        mixed = self._buffer("state_mixed", values)
        layer.qkvz_matrix.run(h_TD, qkvz)
        layer.ba_matrix.run(h_TD, ba)
        layer.rule.native.run(
            self._part(qkvz, 0, channels).view,
            self._part(qkvz, channels, channels + values).view,
            self._part(ba, heads, 2 * heads).view,
            self._part(ba, 0, heads).view,
            mixed.view,
            slots.states.view,
            slots.carried.view,
            *self._state_rows,
            self._pool,
        )
        return mixed

    def _part(self, rows: Buffer, first: int, end: int, size: int = 0) -> Buffer:
        """Return a view of some columns of a step's buffer, by heads if a head size is given."""
        key = ("part", id(rows), first, end, size)
        found: Buffer | None = self._buffers.get(key)
        if found is None:
            part = rows.tensor[:, first:end]
            view = view_tensor(part.unflatten(1, (-1, size))) if size else None
            found = self._buffers[key] = Buffer(part, view)
        return found

    def _mix_latents(self, attention: MlaAttention, h_TD: Buffer) -> Buffer:
        spec, layer_idx, eps = attention.spec, attention.layer_idx, attention.spec.norm_eps
        self._wait_loads(layer_idx)
        buffers: LatentBuffers | None = self._buffers.get(("latents", spec))
        if buffers is None:
            buffers = LatentBuffers.allocate(spec, self._num_tokens, self._dtype)
            self._buffers["latents", spec] = buffers
        attention.first_matrix.run(h_TD, buffers.first)
        q_matrix, q_norm = attention.q_matrix, attention.held_q_norm
        if q_matrix is not None and q_norm is not None:
            compressed, normed = buffers.compressed, buffers.normed
            _native.rms_norm(compressed.view, q_norm.view, normed.view, eps, None, self._pool)
            q_matrix.run(normed, buffers.queries)
        rows = buffers.rows.view
        _native.place_latents(
            buffers.by_head.view,
            buffers.latent.view,
            attention.held_kv_norm.view,
            eps,
            *self._angles[spec.rope_idx],
            rows,
            self._pool,
        )
        if spec.index is not None:
            self._choose_tokens(attention, h_TD, buffers)
        # Keys and values are stored before the queries are computed, so that the on_layer callback
        # can start to send the layer's KV at once.
        if self._latents is None:
            self._store(layer_idx, rows, spec.num_heads)
        attention.key_heads.run(buffers.plain, buffers.absorbed)
        if spec.position_scale is not None:
            queries = buffers.rows.tensor[:, : spec.num_heads]
            scale = scale_positions(spec.position_scale, self._positions, self._dtype)
            queries *= scale[:, None, None]
        mixed = buffers.mixed
        chosen = self._find_choice(spec.top) if spec.top else None
        if self._latents is not None:
            assert chosen is not None, "latents in a file without an index"
            parts = (buffers.rows.tensor, mixed.tensor, chosen.tensor)
            self._latents.run(self._places[layer_idx].layer_idx, *parts, spec.scale)
        else:
            chosen_view = None if chosen is None else chosen.view
            self._attend(layer_idx, rows, mixed.view, spec.scale, attention.rule, chosen_view)
        attention.value_heads.run(mixed, buffers.value_heads)
        return buffers.values

    def _choose_tokens(self, attention: MlaAttention, h_TD: Buffer, buffers: LatentBuffers) -> None:
        """Store index keys and choose by them the tokens that this layer, and those that share,
        attend to.
        """
        index, plan = attention.index, self._index
        queries, projected = buffers.index_queries, buffers.index_keys
        assert index is not None and queries is not None and projected is not None, "no index"
        assert plan is not None, "a cache without index keys"
        spec, angles = index.spec, self._angles[attention.spec.rope_idx]
        keys = self._head_buffer("index_key", 1, spec.dim)
        keys.tensor.copy_(index.norm_keys(projected.tensor))
        _native.rotate_heads(keys.view, *angles, 1, 0, pool=self._pool)
        place = self._index_layers.index(self._places[attention.layer_idx].layer_idx)
        plan.store(place, keys.view)
        _native.rotate_heads(queries.view, *angles, spec.num_heads, 0, pool=self._pool)
        matrix = index.weight_matrix
        weights = self._buffer("index_weights", spec.num_heads, matrix.out_dtype)
        matrix.run(h_TD, weights)
        if weights.tensor.dtype != torch.float32:
            weights = Buffer(weights.tensor.float())
        chosen = self._find_choice(attention.spec.top)
        plan.choose(place, queries.view, weights.view, spec.scale, chosen.view)

    def _find_choice(self, top: int) -> Buffer:
        """Return the tokens that sparse attention's last index chose for each token, int32 [T,
        top].
        """
        found: Buffer | None = self._buffers.get(("chosen", top))
        if found is None:
            made = torch.zeros(self._num_tokens, top, dtype=torch.int32)
            found = self._buffers["chosen", top] = Buffer(made)
        return found

    def _attend(
        self,
        layer_idx: int,
        q: _native.TensorView,
        out: _native.TensorView,
        scale: float,
        rule: AttentionRule,
        chosen: _native.TensorView | None = None,
    ) -> None:
        sinks = None if rule.sinks is None else rule.sinks.view
        attention, place = self._find_layer(layer_idx)
        options = (rule.window, rule.soft_cap, sinks, rule.chunk, chosen)
        attention.attend(place.layer_idx, q, out, scale, *options)

    def _find_layer(self, layer_idx: int) -> tuple[_native.PlannedAttention, LayerPlace]:
        place = self._places[layer_idx]
        attention = self._groups[place.group]
        assert attention is not None, f"layer {layer_idx} is in a group without layers"
        return attention, place

    def _norm_all_heads(self, attention: Attention, qkv: Buffer) -> None:
        """Norm the queries as one vector over all heads, and likewise the keys, in place."""
        spec, norm, first = attention.spec, attention.spec.qk_norm, 0
        d, parts = (
            spec.head_dim,
            (
                (spec.num_heads, attention.held_q),
                (spec.num_kv_heads, attention.held_k),
            ),
        )
        for num_heads, weight in parts:
            assert norm is not None and weight is not None, "a norm without weights"
            end = first + num_heads * d
            rows = self._part(qkv, first, end)
            _native.rms_norm(
                rows.view,
                weight.view,
                rows.view,
                norm.eps,
                None,
                self._pool,
                weight_offset=norm.offset,
            )
            first = end

    def _run_mlp(
        self,
        mlp: Mlp,
        residual_TD: Buffer,
        x_TD: Buffer,
        out_norm: RmsNorm | None = None,
        gate_T1: Buffer | None = None,
    ) -> None:
        """Add the MLP's output to the residual; with an output norm, leave it for the next norm to
        add.
        """
        if out_norm is None:
            self._multiply_mlp(mlp, x_TD, residual_TD, gate_T1, is_added=True)
        else:
            branch = self._buffer("mlp_out", mlp.spec.hidden_size)
            self._multiply_mlp(mlp, x_TD, branch, gate_T1)
            self._norm_branch(out_norm, branch)

    def _multiply_mlp(
        self,
        mlp: Mlp,
        x_TD: Buffer,
        out_TD: Buffer,
        gate_T1: Buffer | None = None,
        *,
        is_added: bool = False,
    ) -> None:
        """Write the MLP's output to a buffer, or add it."""
        gate_up_matrix, down_matrix = mlp.matrices
        gate_up = self._buffer("gate_up", 2 * mlp.spec.intermediate_size)
        hidden = self._buffer("hidden", mlp.spec.intermediate_size)
        gate_up_matrix.run(x_TD, gate_up)
        row_gate = None if gate_T1 is None else gate_T1.view
        _native.gate(gate_up.view, hidden.view, mlp.activation.name, row_gate, self._pool)
        down_matrix.run(hidden, out_TD, is_added=is_added)

    def _choose_beside(self, beside: BesideExperts, x_TD: Buffer) -> ExpertChoice:
        """Run the router of a layer whose experts run beside (in parallel with) its MLP; return its
        choice and the experts' input.
        """
        router, size = beside.router, beside.norm.size
        scored = x_TD
        if router.spec.norm_eps is not None:
            scored, eps = self._buffer("router_in", size), router.spec.norm_eps
            _native.rms_norm(x_TD.view, router.held_scale.view, scored.view, eps, None, self._pool)
        ids, weights = self._route(router, scored)
        given = self._buffer("experts_in", size)
        self._norm_rows(beside.norm, x_TD, given)
        return ExpertChoice(None, beside.experts, x_TD, given, ids, weights)

    def _run_beside(self) -> None:
        """Run the dense MLP of a layer whose experts run beside (in parallel with) it, and keep its
        output.
        """
        assert self._beside is not None, "no layer has chosen experts"
        layer, h = self._beside
        assert layer.beside is not None, "no experts beside an MLP"
        assert isinstance(layer.parts.mlp, Mlp), "experts beside a block of experts"
        branch = self._buffer("mlp_out", layer.beside.norm.size)
        self._multiply_mlp(layer.parts.mlp, h, branch)
        self._norm_rows(layer.beside.mlp_norm, branch, branch)

    def _leave_beside(self, layer: DecoderLayer, sum_TD: Buffer) -> None:
        """Norm the sum of experts that run beside an MLP, add the MLP's output, and complete the
        layer.
        """
        beside, out_norm = layer.beside, layer.parts.mlp_out_norm
        assert beside is not None and out_norm is not None, "no layer has chosen experts"
        assert self._residual is not None, "no layer has chosen experts"
        size = beside.norm.size
        branch, chosen = self._buffer("mlp_out", size), self._buffer("experts_sum", size)
        chosen.tensor.copy_(sum_TD.tensor)
        self._norm_rows(beside.experts_norm, chosen, chosen)
        branch.tensor += chosen.tensor
        self._norm_branch(out_norm, branch)
        self._end_layer(layer, self._residual)

    def _add_input(self, layer: DecoderLayer, parts: LayerInput, x_TD: Buffer) -> None:
        """Gate and norm a layer's additional input and leave it for the next norm to add."""
        assert self.layer_inputs is not None, "a layer with an input of its own without inputs"
        self.complete_(x_TD.tensor)
        own = self.layer_inputs[:, layer.layer_idx]
        gate, gated = self._buffer("input_gate", own.shape[1]), self._buffer("gated", own.shape[1])
        branch = self._buffer("input_out", parts.norm.size)
        parts.gate.matrix.run(x_TD, gate)
        up = view_tensor(own)
        _native.gate(gate.view, gated.view, parts.activation, None, self._pool, up=up)
        parts.projection.matrix.run(gated, branch)
        self._norm_branch(parts.norm, branch)

    def _norm_rows(self, norm: RmsNorm, x_TD: Buffer, out_TD: Buffer) -> None:
        _native.rms_norm(
            x_TD.view,
            norm.held.view,
            out_TD.view,
            norm.eps,
            None,
            self._pool,
            weight_offset=norm.offset,
        )

    def _choose(self, block: MoeBlock, residual_TD: Buffer, x_TD: Buffer) -> "ExpertChoice":
        router, experts = block.operators
        ids, weights = self._route(router, x_TD)
        return ExpertChoice(block, experts, residual_TD, x_TD, ids, weights)

    def _route(self, router: Router, x_TD: Buffer) -> tuple[Buffer, Buffer]:
        """Return the ids of each row's experts and their router weights."""
        dtype = router.matrix.out_dtype
        logits = self._buffer("router_logits", router.num_experts, dtype)
        weights = self._buffer("router_weights", router.top_k, dtype)
        routing = self._routing
        if routing is None:
            ids = self._buffer("router_ids", router.top_k, torch.int64)
        else:
            ids = routing.find_choices()
        router.matrix.run(x_TD, logits)
        router.scale_logits_(logits.tensor)
        rule, bias = router.rule, router.choice_bias
        _native.route(
            logits.view,
            weights.view,
            ids.view,
            rule.native_scoring,
            None if bias is None else bias.view,
            rule.num_groups,
            rule.num_top_groups,
            rule.weight_scale,
            self._pool,
            num_group_choices=rule.num_group_choices,
        )
        router.scale_weights_(weights.tensor, ids.tensor)
        return ids, weights

    def _add_deferring(
        self,
        routing: StepRouting,
        experts: RoutedExperts,
        residual_TD: Buffer,
        x_TD: Buffer,
        ids_TK: Buffer,
        w_TK: Buffer,
    ) -> None:
        """Add this layer's immediate experts and those that the previous layer deferred; keep this
        layer's deferred ones for the next.
        """
        weights = w_TK.tensor.float()
        immediate, late = routing.split(ids_TK.tensor, weights)
        if not isinstance(experts, NativeExperts):
            residual, x = residual_TD.tensor, x_TD.tensor
            routing.add_into_(residual, experts, x, immediate, late, w_TK.tensor)
            return
        assert self._pending is None, "two addends without a norm between them"
        out = self._pending = self._buffer("experts_out", experts.hidden_size, torch.float32)
        held = Buffer(weights)
        experts.run(x_TD, Buffer(immediate), held, out)
        carried = routing.take_carried()
        if carried is not None:
            out.tensor.add_(carried)
        if late is not None:
            # Two buffers alternate by layer, so that this layer's deferred sum is not written over
            # the previous layer's.
            name = f"experts_late_{routing.layer_idx % 2}"
            kept = self._buffer(name, experts.hidden_size, torch.float32)
            experts.run(x_TD, Buffer(late), held, kept)
            routing.carry(kept.tensor)

    def _add_shared(self, block: MoeBlock, shared: Mlp, residual_TD: Buffer, x_TD: Buffer) -> None:
        gate = None
        if block.shared_gate is not None:
            gate = self._buffer("shared_gate", 1)
            block.shared_gate.matrix.run(x_TD, gate)
        self._run_mlp(shared, residual_TD, x_TD, gate_T1=gate)

    def _buffer(self, name: str, size: int, dtype: torch.dtype | None = None) -> Buffer:
        """Return the step's buffer [T, size] of this name; its previous contents remain.

        All layers share it, so each layer must write it before reading it.
        """
        key = (name, size, self._dtype if dtype is None else dtype)
        found: Buffer | None = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = Buffer.allocate(self._num_tokens, size, dtype=key[2])
        return found

    def _head_buffer(self, name: str, num_heads: int, head_dim: int) -> Buffer:
        """Return the step's buffer [T, num_heads * head_dim], viewed as [T, num_heads,
        head_dim].
        """
        found: Buffer | None = self._buffers.get((name, num_heads, head_dim))
        if found is None:
            made = Buffer.allocate(self._num_tokens, num_heads, head_dim, dtype=self._dtype)
            found = Buffer(made.tensor.flatten(1), made.view)
            self._buffers[name, num_heads, head_dim] = found
        return found

    def _view_residual(self, x_TD: Tensor) -> Buffer:
        """View the residual stream natively; the view is cached, as layers pass the same
        tensor on.
        """
        if self._residual is None or self._residual.tensor is not x_TD:
            self._residual = Buffer(x_TD)
        return self._residual


def _plan_attention(
    cache: PagedKvCache, batch: PagedBatch, pool: ThreadPool | None
) -> _native.PlannedAttention | None:
    if not cache.layout.num_layers:
        return None
    assert cache.native is not None, "the cache is not native"
    return _native.PlannedAttention(
        cache.native, batch.block_table, batch.query_start, batch.context_lens, pool
    )
