"""Sizes of a model and of its KV cache, as plain data: no torch, no files.

``tandem.models`` reads ``ModelSpec`` from a checkpoint's ``config.json``. ``KVLayout`` is the
layout of a KV block in every tier, so that the engine, the store and the simulator compute equal
sizes. ``KvIdentity`` decides if two instances may share blocks.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.kv_identity import (
    IDENTITY_VERSION,
    NUMERICS_VERSION,
    ROUNDING_VERSION,
    IdentityDifference,
    KvIdentity,
    KvSharing,
    RoundingClass,
    make_root_key,
)
from tandem.core.kv_layout import (
    DTYPE_BYTES,
    KV_CODE_BYTES,
    BlockLayout,
    GqaLayout,
    KVLayout,
    LayerSlice,
    MlaLayout,
    WindowLayout,
    split_layout,
)
from tandem.core.state_layout import StateLayout

__all__ = [
    "DTYPE_BYTES",
    "IDENTITY_VERSION",
    "KV_CODE_BYTES",
    "NO_OUTPUT",
    "NUMERICS_VERSION",
    "ROUNDING_VERSION",
    "BlockLayout",
    "GqaLayout",
    "IdentityDifference",
    "KVLayout",
    "KvIdentity",
    "KvSharing",
    "LayerSlice",
    "MlaLayout",
    "ModelSpec",
    "RoundingClass",
    "StateLayout",
    "WindowLayout",
    "make_root_key",
    "split_layout",
]

PositiveInt = Annotated[int, Meta(ge=1)]

NO_OUTPUT = 1 << 62
"""Value of a prompt length that means that the sequence has no output: all its tokens belong to the
prompt.
"""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only language model as its configuration describes it."""

    name: str
    """Name that the user gave: a folder's name or a hub id."""
    model_type: str
    architecture: str
    num_layers: PositiveInt
    num_state_layers: Annotated[int, Meta(ge=0)] = 0
    """Number of layers that keep a recurrent state instead of KV."""
    num_plain_layers: Annotated[int, Meta(ge=0)] = 0
    """Number of layers that keep nothing, being only an MLP or experts."""
    num_shared_kv_layers: Annotated[int, Meta(ge=0)] = 0
    """Number of layers that use another layer's KV and keep none."""
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Number of elements of a head's key."""
    kv_lora_rank: Annotated[int, Meta(ge=0)] = 0
    """Multi-head latent attention: number of elements of the latent that all heads share; 0:
    another attention."""
    rope_dim: Annotated[int, Meta(ge=0)] = 0
    """Multi-head latent attention: number of rotated elements of a key, which all heads share."""
    index_dim: Annotated[int, Meta(ge=0)] = 0
    """Number of elements of an index key, by which sparse attention chooses tokens; 0: no index."""
    index_layers: tuple[int, ...] = ()
    """Indexes, among the layers with KV, of those with a sparse attention index of their own."""
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """Intermediate size of a dense MLP; also set for models whose layers are all MoE."""
    vocab_size: PositiveInt
    num_labels: Annotated[int, Meta(ge=0)] = 0
    """Number of labels of a classification model; 0: the model generates tokens."""
    max_position_embeddings: PositiveInt
    """Context length in tokens that the checkpoint states."""
    num_experts: Annotated[int, Meta(ge=0)] = 0
    """Number of routed experts of an MoE layer; 0: a dense model."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Number of routed experts per token."""
    moe_intermediate_size: Annotated[int, Meta(ge=0)] = 0
    num_moe_layers: Annotated[int, Meta(ge=0)] = 0
    tie_word_embeddings: bool = False
    state_heads: Annotated[int, Meta(ge=0)] = 0
    """Number of heads with a matrix in layers with a recurrent state; 0 if there are no such
    layers, or their state is a convolution's inputs only."""
    state_key_dim: Annotated[int, Meta(ge=0)] = 0
    state_value_dim: Annotated[int, Meta(ge=0)] = 0
    conv_channels: Annotated[int, Meta(ge=0)] = 0
    """Number of channels of the short convolution in layers with a recurrent state."""
    conv_width: Annotated[int, Meta(ge=0)] = 0
    """Width of the short convolution in layers with a recurrent state: number of inputs per
    output."""
    has_qk_norm: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens that a token attends to in sliding-window layers, itself included; 0: no
    such layer."""
    window_layers: tuple[int, ...] = ()
    """Indexes of the sliding-window layers among the layers with KV."""
    window_sizes: tuple[int, int] | None = None
    """Number of KV heads and of elements of a key in sliding-window layers, if they differ from the
    other layers'; otherwise None."""
    has_sinks: bool = False
    """True if heads have attention sinks: a logit in the softmax's sum that adds no value."""
    rope_type: str = "default"
    checkpoint_dtype: str = "bfloat16"
    """Dtype of the stored weights, as the configuration states it."""
    expert_format: str = ""
    """Weight format of the routed experts in the checkpoint; empty: the dtype."""
    dtype: str = "bfloat16"
    """Dtype in which the model runs with ``dtype="auto"``."""
    dtype_reason: str = ""
    """Reason for ``dtype``, as a sentence."""
    num_parameters: Annotated[int, Meta(ge=0)] = 0
    """Number of parameters in memory; tied embeddings count once."""
    num_active_parameters: Annotated[int, Meta(ge=0)] = 0
    """Number of parameters that computing one token uses: without experts that it is not routed
    to."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-text ids of ``config.json``, then of ``generation_config.json`` and the tokenizer."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def num_logits(self) -> int:
        """Number of rows of the head: tokens, or labels."""
        return self.num_labels or self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that keep KV (and not only a recurrent state)."""
        without = self.num_state_layers + self.num_plain_layers + self.num_shared_kv_layers
        return self.num_layers - without

    def split_windows(self, layout: KVLayout) -> tuple[KVLayout, WindowLayout | None]:
        """Return the layout of the layers that attend to all tokens, and that of the sliding-window
        layers, None if there are none.

        Args:
            layout: layout of blocks of all layers with KV.
        """
        return split_layout(layout, self.window_layers, self.sliding_window, self.window_sizes)

    @property
    def state_layout(self) -> StateLayout | None:
        """Layout of a sequence's recurrent state; None if no layer has one."""
        if not self.num_state_layers:
            return None
        return StateLayout(
            num_layers=self.num_state_layers,
            num_value_heads=self.state_heads,
            key_dim=self.state_key_dim,
            value_dim=self.state_value_dim,
            num_channels=self.conv_channels,
            conv_width=self.conv_width,
            dtype=self.dtype,
        )

    @property
    def is_moe(self) -> bool:
        """True if any layer has routed experts."""
        return self.num_moe_layers > 0
