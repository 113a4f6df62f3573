"""A step of dense decoder layers that are so small that only its calls take time.

``Calibrator`` times it: operators, Python and threads are those of a served model's decode step.
Matrices are packed weights of zeros, 128 x 128; nothing that is computed is read.
"""

import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.model.layers import GqaSpec, MlpSpec, RopeSpec
from tandem.core.spec import GqaLayout
from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.interfaces import Execution, Shard
from tandem.kernels.operators.attention import Attention
from tandem.kernels.operators.decoder_layer import DecoderLayer, LayerParts
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.operators.norm import RmsNorm
from tandem.kernels.operators.rope import Rope
from tandem.kernels.paged import PagedBatch, PagedKvCache, SequenceChunk
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.kernels.weights.matrix import MatrixSettings

__all__ = ["TinyStep"]

SIZE, NUM_HEADS, BLOCK_SIZE = 128, 2, 64
EPS = 1e-6


class _Zeros:
    """Reader of a checkpoint in which all weights are zero."""

    dtype = torch.bfloat16
    device = torch.device("cpu")

    def __init__(self, execution: Execution) -> None:
        self.execution = execution

    def has(self, name: str) -> bool:
        """Return True: there are weights of any name."""
        del name
        return True

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Fill ``out`` with zeros."""
        del name, shard
        out.zero_()

    def find_storage(self, name: str) -> str:
        """Return that values are plain."""
        del name
        return ""

    def find_format(self, name: str) -> WeightFormat | None:
        """Return that there are no codes."""
        del name

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Never called, as there are no codes."""
        raise AssertionError((name, expert_id, shard))

    def skip(self, prefix: str) -> None:
        """Do nothing: nothing is counted."""
        del prefix


class TinyStep:
    """One token's step through some dense layers.

    Args:
        pool: threads that share the step's work; borrowed.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self._execution = CpuExecution(pool)
        reader = _Zeros(self._execution)
        settings = MatrixSettings(find_format("int8"), pool)
        spec = GqaSpec(
            hidden_size=SIZE,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_HEADS,
            head_dim=SIZE // NUM_HEADS,
            scale=1.0,
        )
        first, second = RmsNorm(SIZE, EPS), RmsNorm(SIZE, EPS)
        attention = Attention(spec, layer_idx=0, settings=settings)
        mlp = Mlp(MlpSpec(hidden_size=SIZE, intermediate_size=SIZE), settings=settings)
        rope = Rope(RopeSpec(head_dim=spec.head_dim))
        for part in (first, second, attention, mlp, rope):
            part.load(reader, "part")
        self._layer = DecoderLayer(LayerParts(first, attention, None, second, mlp, None), {})
        self._ropes = rope.ropes
        layout = GqaLayout(
            num_layers=1,
            num_kv_heads=NUM_HEADS,
            head_dim=spec.head_dim,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
        )
        self._cache = PagedKvCache(layout, 1)
        self._hidden = torch.zeros(1, SIZE, dtype=reader.dtype)

    @torch.inference_mode()
    def run(self, num_layers: int) -> None:
        """Make the step's batch and run its layers, as a model does."""
        chunk = SequenceChunk([0], 0, [0])
        batch = PagedBatch.build([chunk], BLOCK_SIZE)
        step = self._execution.begin_step(batch, self._cache, self._ropes, self._hidden.dtype)
        for _ in range(num_layers):
            step.run_layer_(self._layer, self._hidden)
        step.complete_(self._hidden)
