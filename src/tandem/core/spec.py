"""A model, its plan and its KV cache, in plain numbers: no torch, no files.

``ModelSpec`` is read from a checkpoint's ``config.json`` by ``tandem.models``; ``KVLayout`` is the
one layout of a KV block in every tier, so that the engine, the store and the simulator compute the
same sizes from the same struct; ``KvIdentity`` decides whether two instances may share blocks.
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
"""The length of a prompt that has no end: all of a sequence's tokens belong to it."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only language model as its configuration describes it."""

    name: str
    """The name that the user gave: a folder's name or a hub id."""
    model_type: str
    architecture: str
    num_layers: PositiveInt
    num_state_layers: Annotated[int, Meta(ge=0)] = 0
    """Layers that keep a state instead of KV."""
    num_plain_layers: Annotated[int, Meta(ge=0)] = 0
    """Layers that keep nothing: an MLP, or experts, alone."""
    num_shared_kv_layers: Annotated[int, Meta(ge=0)] = 0
    """Layers that read the KV of another one and keep none."""
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Items of a key."""
    kv_lora_rank: Annotated[int, Meta(ge=0)] = 0
    """For multi-head latent attention: items of the latent that all heads share; 0 is another."""
    rope_dim: Annotated[int, Meta(ge=0)] = 0
    """For the same: rotated items of a key, which all heads share too."""
    index_dim: Annotated[int, Meta(ge=0)] = 0
    """Items of an index key, by which sparse attention chooses tokens; 0 is no index."""
    index_layers: tuple[int, ...] = ()
    """Numbers, among the layers with KV, of those that have an index of their own."""
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """Size of a dense MLP; models whose layers are all MoE carry it too."""
    vocab_size: PositiveInt
    num_labels: Annotated[int, Meta(ge=0)] = 0
    """Labels of a head that classifies; 0: the model has a head that gives tokens."""
    max_position_embeddings: PositiveInt
    """Tokens of context that the checkpoint promises."""
    num_experts: Annotated[int, Meta(ge=0)] = 0
    """Routed experts of an MoE layer; 0 is a dense model."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Routed experts that one token uses."""
    moe_intermediate_size: Annotated[int, Meta(ge=0)] = 0
    num_moe_layers: Annotated[int, Meta(ge=0)] = 0
    tie_word_embeddings: bool = False
    state_heads: Annotated[int, Meta(ge=0)] = 0
    """Heads that have a matrix in layers with a state; 0 where there is no such layer, or those
    keep the inputs of a convolution alone."""
    state_key_dim: Annotated[int, Meta(ge=0)] = 0
    state_value_dim: Annotated[int, Meta(ge=0)] = 0
    conv_channels: Annotated[int, Meta(ge=0)] = 0
    """Channels of the short convolution of those layers."""
    conv_width: Annotated[int, Meta(ge=0)] = 0
    """Inputs that an output of it sees."""
    has_qk_norm: bool = False
    sliding_window: Annotated[int, Meta(ge=0)] = 0
    """Tokens that a token sees in layers with a window, itself included; 0 is no such layer."""
    window_layers: tuple[int, ...] = ()
    """Numbers of those layers among the layers with KV."""
    window_sizes: tuple[int, int] | None = None
    """KV heads and items of a key of those layers, where they differ from those of the others."""
    has_sinks: bool = False
    """Heads have a logit that takes weight and adds nothing."""
    rope_type: str = "default"
    checkpoint_dtype: str = "bfloat16"
    """The dtype that the configuration declares for the stored weights."""
    expert_format: str = ""
    """The weight format in which the checkpoint stores its routed experts; empty: in the dtype."""
    dtype: str = "bfloat16"
    """The dtype that ``dtype="auto"`` runs in."""
    dtype_reason: str = ""
    """Why ``dtype`` is what it is, as a sentence."""
    num_parameters: Annotated[int, Meta(ge=0)] = 0
    """Parameters held in memory; tied embeddings count once."""
    num_active_parameters: Annotated[int, Meta(ge=0)] = 0
    """Parameters that one token reads: all but the experts it is not routed to."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-text ids of the configuration and of ``generation_config.json``, in that order."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def num_logits(self) -> int:
        """Rows of the head: tokens, or labels."""
        return self.num_labels or self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in ``dtype``."""
        return self.num_parameters * DTYPE_BYTES[self.dtype]

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep KV."""
        without = self.num_state_layers + self.num_plain_layers + self.num_shared_kv_layers
        return self.num_layers - without

    def split_windows(self, layout: KVLayout) -> tuple[KVLayout, WindowLayout | None]:
        """Return the layouts of the layers that see all tokens, and of those with a window.

        Args:
            layout: of blocks of all layers with KV.
        """
        return split_layout(layout, self.window_layers, self.sliding_window, self.window_sizes)

    @property
    def state_layout(self) -> StateLayout | None:
        """The layout of a sequence's state; None where no layer has one."""
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
