"""A layer's gated delta rule with its projections: two products before it, one after it.

The operator holds weights and shapes; a ``Step`` runs the rule over the state slots of its
sequences.

Shapes: T tokens, D hidden, W convolution width, C channels, V value heads.
"""

import torch
from torch import Tensor

from tandem.core.model.layers import GatedDeltaSpec
from tandem.kernels.gated_delta import GatedDeltaRule
from tandem.kernels.interfaces import AdaptedPart, Matrix, MatrixWrapper, WeightReader
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator, current_step
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["GatedDelta", "list_rows", "make_rule"]


class GatedDelta(Operator):
    """A gated delta rule over the recurrent states of sequences.

    Args:
        spec: sizes, options and checkpoint names. Rows that a checkpoint groups by key head are
            loaded in the order of ``GatedDeltaRule``.
        state_idx: index of the layer among those with a state.
        settings: how the projections to queries, keys, values and z, and the output projection, are
            stored and run.
        gate_settings: how the projections to b and a are stored and run.
    """

    def __init__(
        self,
        spec: GatedDeltaSpec,
        *,
        state_idx: int,
        settings: MatrixSettings = TENSORS,
        gate_settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.state_idx = state_idx
        self.settings = settings
        self.gate_settings = gate_settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections, and in float32 the convolution's, the gates' and the norm's
        weights.
        """
        spec = self.spec
        orders = list_rows(spec)
        rows = _list_sizes(spec)
        self.qkvz_matrix, self.ba_matrix = (
            read_matrix(
                self,
                prefix,
                reader,
                settings,
                [(f"{name}.{part}", size) for part, size in zip(names, own, strict=True)],
                spec.hidden_size,
                order=order,
            )
            for prefix, settings, names, own, order in (
                ("qkvz_", self.settings, spec.qkvz_names, rows[0], orders[0]),
                ("ba_", self.gate_settings, spec.ba_names, rows[1], orders[1]),
            )
        )
        output = [(f"{name}.{spec.out_name}", spec.hidden_size)]
        self.output_matrix: Matrix = read_matrix(
            self, "out_", reader, self.settings, output, spec.all_values
        )
        parts = {
            "conv1d.weight": (spec.num_channels, 1, spec.conv_width),
            "A_log": (spec.num_v_heads,),
            "dt_bias": (spec.num_v_heads,),
            f"{spec.norm_name}.weight": (spec.value_dim,),
        }
        read: list[Tensor] = []
        for part, shape in parts.items():
            tensor = torch.empty(shape, dtype=torch.float32, device=reader.device)
            reader.read_into(f"{name}.{part}", tensor)
            read.append(tensor)
        self.rule = make_rule(spec, *read)

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        spec, orders, sizes = self.spec, list_rows(self.spec), _list_sizes(self.spec)
        self.qkvz_matrix = qkvz = wrapper.wrap_matrix(self.qkvz_matrix)
        self.ba_matrix = ba = wrapper.wrap_matrix(self.ba_matrix)
        self.output_matrix = output = wrapper.wrap_matrix(self.output_matrix)
        parts: dict[str, AdaptedPart] = {}
        for matrix, names, own, order in (
            (qkvz, spec.qkvz_names, sizes[0], orders[0]),
            (ba, spec.ba_names, sizes[1], orders[1]),
        ):
            first = 0
            for part, size in zip(names, own, strict=True):
                # An order is only given if the projection is the whole matrix; parts of a matrix
                # keep the checkpoint's order.
                parts[f"{name}.{part}"] = AdaptedRows(matrix, spec.hidden_size, size, first, order)
                first += size
        out = AdaptedRows(output, spec.all_values, spec.hidden_size)
        return {**parts, f"{name}.{spec.out_name}": out}

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Run with the interface of transformers' recurrent mixers: [1, T, D] in, [1, T, D] out."""
        mixed = current_step().mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None]


def make_rule(
    spec: GatedDeltaSpec, conv_C1W: Tensor, a_log_V: Tensor, dt_bias_V: Tensor, norm_v: Tensor
) -> GatedDeltaRule:
    """Return a layer's gated delta rule (the recurrence's weights and sizes), made of the
    checkpoint's tensors.
    """
    return GatedDeltaRule(
        conv_C1W[:, 0].T,
        a_log_V.float().exp(),
        dt_bias_V,
        norm_v.float() + spec.norm_offset,
        num_k_heads=spec.num_k_heads,
        key_dim=spec.key_dim,
        norm_eps=spec.norm_eps,
        beta_scale=spec.beta_scale,
        gate=spec.gate,
    )


def list_rows(spec: GatedDeltaSpec) -> tuple[Tensor | None, Tensor | None]:
    """Return the checkpoint's row for each row of the two input products; None: unchanged.

    The first product has all heads' queries, then all keys, values and z; the second all b, then
    all a.
    """
    if not spec.is_by_key_head:
        return None, None
    group = spec.num_v_heads // spec.num_k_heads
    values = group * spec.value_dim
    return (
        _regroup(spec.num_k_heads, (spec.key_dim, spec.key_dim, values, values)),
        _regroup(spec.num_k_heads, (group, group)),
    )


def _regroup(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Return row numbers that regroup [heads, sum of sizes] so that rows of each kind are
    together.
    """
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def _list_sizes(spec: GatedDeltaSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of outputs of each of ``qkvz_names``, and of each of ``ba_names``."""
    keys, values, heads = spec.all_keys, spec.all_values, spec.num_v_heads
    qkvz = {
        1: (2 * keys + 2 * values,),
        2: (2 * keys + values, values),
        4: (keys, keys, values, values),
    }
    return qkvz[len(spec.qkvz_names)], (heads, heads) if len(spec.ba_names) == 2 else (2 * heads,)
