"""A model as it will be stored and run, as data: made once, read by planning, sizing and loading.

``tandem.models.planning.planner`` makes a ``ModelPlan`` from the configuration, the rules and the
modules of the skeleton, without reading a weight. `tandem plan` and `tandem serve --dry-run` print
it, the engine sizes memory by it, ``load_model`` obeys it. No torch here.

Shapes: E experts, F intermediate, D hidden, N outputs, K inputs.
"""

from math import prod
from typing import Literal

import msgspec

from tandem.core.model.layers import (
    ExpertsSpec,
    MixerSpec,
    MlpSpec,
    NonNegativeInt,
    OperatorSpec,
    PositiveInt,
    RopeSpec,
    RouterSpec,
)
from tandem.core.spec import DTYPE_BYTES, ModelSpec

__all__ = [
    "NO_FORMAT",
    "WHOLE_PROMPT",
    "AdapterPlace",
    "ExpertTierPlan",
    "FormatChoice",
    "LayerSpec",
    "MatrixPlan",
    "ModelPlan",
    "ModulePlan",
    "MoeSpec",
    "OwnModules",
]

NO_FORMAT = "none"
"""The format of tensors in the model's dtype."""

WHOLE_PROMPT = 1 << 60
"""A piece that no prompt fills."""

MatrixRole = Literal[
    "embedding",
    "head",
    "qkv",
    "q_up",
    "head_matrices",
    "attention_out",
    "gate_up",
    "down",
    "router",
    "gates",
    "experts",
    "other",
]


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="moe"):
    """Routed experts, their router, and the experts that every token uses."""

    num_experts: PositiveInt
    top_k: PositiveInt
    intermediate_size: PositiveInt
    """F of one routed expert."""
    shared_intermediate_size: NonNegativeInt = 0
    """F of the experts that every token uses, together; 0 is none."""
    has_bias: bool = False
    router: RouterSpec | None = None
    """None where no operator of ours chooses as the model does."""
    experts: ExpertsSpec | None = None
    """None where no operator of ours computes what the model's experts do."""


class MatrixPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix, or all those of a layer's experts, as it is stored in memory."""

    module: str
    """The module that holds it, after the rules."""
    role: MatrixRole
    shape: tuple[int, ...]
    """[N, K], stacked where one product computes several; of experts [E, 3 F, D]; of matrices that
    each head has one of [H, N, K]."""
    weight_format: str
    device: str
    """The device that holds it and computes with it."""
    size_bytes: NonNegativeInt
    """Bytes as stored, scales and padding included; 0 where it is another matrix's memory."""
    plain_bytes: NonNegativeInt
    """The same in the model's dtype."""
    reason: str
    stored_bytes: NonNegativeInt = 0
    """The same in a checkpoint that has codes; 0 where it has not, or is not there."""


class AdapterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A linear module of the checkpoint that takes LoRA adapters."""

    module: str
    """Dotted path."""
    in_features: PositiveInt
    out_features: PositiveInt


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer: its parts, how their matrices are stored, and where adapters go."""

    index: NonNegativeInt
    mixer: MixerSpec | None
    """None where a layer is an MLP, or experts, alone."""
    rope: RopeSpec | None
    """None where no operator of ours has the model's angles."""
    mlp: MlpSpec | MoeSpec | None
    """None where a layer mixes tokens alone."""
    matrices: tuple[MatrixPlan, ...] = ()
    """Every matrix of the layer; empty where only the layer's kind was asked for."""
    adapters: tuple[AdapterPlace, ...] = ()

    @property
    def kind(self) -> "LayerSpec":
        """The layer without its number and names: equal for layers that do the same work."""
        return msgspec.structs.replace(self, index=0, matrices=(), adapters=())


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of one module of the skeleton."""

    module: str
    """Dotted path."""
    class_name: str
    operator: str
    """The operator in its place, or ``default`` where the skeleton's module stays."""
    spec: OperatorSpec | None = None
    """The operator's sizes and names; None where the skeleton's module stays."""
    rule: str = ""
    """``file:line`` of the rule that took it; empty for none."""
    weight_format: str = NO_FORMAT
    """The format of the matrices that the operator holds."""
    score_format: str = NO_FORMAT
    """The same of those of its matrices that score or gate, one that loses nothing."""
    keeps_codes: bool = False
    """True if matrices that the checkpoint has in codes keep them, each in a format of its own."""
    owner: str = ""
    """The module above, whose operator took its weights; empty for none."""
    note: str = ""
    """For people: a device that is not here, why a layer is not fused."""
    problem: str = ""
    """Why the model cannot be loaded like this; empty for none."""


class FormatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a kind of matrices where no rule says otherwise."""

    weight_format: str
    reason: str


class ExpertTierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for routed experts that lie on disk."""

    num_slots: PositiveInt
    """Experts of each layer that memory holds."""
    num_layers: PositiveInt
    """Layers with routed experts."""
    num_staged: PositiveInt
    """Places for experts that pass by, of all layers together."""
    slot_bytes: PositiveInt
    """Bytes of a place for one expert."""
    policy: str
    """Name of the policy that gives slots to experts."""
    depth: PositiveInt
    """Reads that the disk has at a time."""
    part_bytes: PositiveInt
    """Bytes of one of these."""
    read_rate: float
    """Bytes a second that the disk gave at this depth; 0 where nothing could be measured."""
    missed_bytes: float
    """Bytes that a token reads from disk, if all experts are chosen as often."""
    reason: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all places."""
        return (self.num_slots * self.num_layers + self.num_staged) * self.slot_bytes


class OwnModules(msgspec.Struct, frozen=True, kw_only=True):
    """A model that runs by transformers' own modules, each sequence with a cache object."""

    reason: str
    """Why no operators of ours run it."""
    piece: PositiveInt
    """Tokens that a prefill feeds at a time, counted from token 0; ``WHOLE_PROMPT``: all of it."""
    token_bytes: NonNegativeInt
    """Bytes that a token adds to a cache object."""
    fixed_bytes: NonNegativeInt
    """Bytes of a cache object that do not grow with the tokens."""
    has_our_experts: bool = False
    """True if routed experts are our operators, where a layer has such that these compute."""

    @property
    def is_cut(self) -> bool:
        """True if a prefill is fed in pieces, so that copies of its cache are worth keeping."""
        return self.piece < WHOLE_PROMPT

    def describe(self) -> str:
        """Return how a sequence is fed, in words."""
        if not self.is_cut:
            return "a prompt at once"
        return "token by token" if self.piece == 1 else f"in pieces of {self.piece} tokens"


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it will be stored and run: every value concrete, with its reason."""

    folder: str
    spec: ModelSpec
    """With the dtype that the model runs in, and counts of the skeleton's parameters."""
    device: str
    config: dict[str, str]
    """Fields of the configuration that change values; see ``KvIdentity``."""
    layers: tuple[LayerSpec, ...]
    modules: tuple[ModulePlan, ...]
    other_matrices: tuple[MatrixPlan, ...]
    """The matrices that belong to no layer: embedding and head."""
    vector_bytes: NonNegativeInt
    """Bytes of all other weights: norms, biases, sinks."""
    experts: FormatChoice
    linear: FormatChoice
    """Attention's projections, dense MLPs and the head."""
    router: FormatChoice
    """The routers' scores, in a format that loses nothing."""
    expert_parts: PositiveInt
    """Shares of packed experts, each copied to memory of a NUMA node; 1 leaves them mapped."""
    expert_device: str = "cpu"
    """The device of the routed experts, which may be the host while the model's is a GPU."""
    packed_cache: str
    """The place of packed experts: a folder, ``off`` or ``auto``."""
    tier: ExpertTierPlan | None = None
    """The routed experts lie on disk, and this is what memory holds of them; None: all of them."""
    own: OwnModules | None = None
    """Transformers' own modules run it; None: operators do. There are no ``layers`` then."""
    num_deferred_experts: NonNegativeInt = 0
    """Experts of an output token that are added one layer later, the least weighted."""
    notes: tuple[str, ...] = ()
    """Parts of the checkpoint that are not used, and why."""
    unused_rules: tuple[str, ...] = ()
    """``file:line`` of rules that matched no module."""
    shadowed_rules: dict[str, tuple[str, ...]] = {}
    """Rules that earlier ones took all modules from, each with those rules."""

    @property
    def matrices(self) -> tuple[MatrixPlan, ...]:
        """Every matrix, those of the layers first."""
        own = [matrix for layer in self.layers for matrix in layer.matrices]
        return (*own, *self.other_matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are stored."""
        return sum(matrix.size_bytes for matrix in self.matrices) + self.vector_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts as they are stored."""
        return sum(matrix.size_bytes for matrix in self.matrices if matrix.role == "experts")

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights that lie in the host's memory."""
        if self.device == "cpu":
            return self.weight_bytes
        return self.expert_bytes if self.expert_device == "cpu" else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that memory holds."""
        if self.tier is None:
            return self.weight_bytes
        return self.weight_bytes - self.expert_bytes + self.tier.size_bytes

    @property
    def stored_bytes(self) -> tuple[int, int]:
        """Bytes here, and in the checkpoint, of the matrices that products read there and here."""
        other = ("embedding", "router")
        coded = [m for m in self.matrices if m.stored_bytes and m.role not in other]
        return sum(m.size_bytes for m in coded), sum(m.stored_bytes for m in coded)

    @property
    def token_bytes(self) -> int:
        """Bytes of matrices that one token reads: of routed experts those that are chosen."""
        top_k = {
            layer.mlp.num_experts: layer.mlp.top_k
            for layer in self.layers
            if isinstance(layer.mlp, MoeSpec)
        }
        total = 0
        for matrix in self.matrices:
            if matrix.role == "experts":
                count = matrix.shape[0]
                total += matrix.size_bytes * top_k.get(count, count) // count
            elif matrix.role != "embedding":
                # A head that shares the embedding's tensor takes no bytes of its own, but each step
                # reads it.
                total += matrix.size_bytes or prod(matrix.shape) * DTYPE_BYTES[self.spec.dtype]
        return total

    @property
    def is_native(self) -> bool:
        """True if native kernels run every product; embeddings are looked up."""
        return all(m.weight_format != NO_FORMAT or m.role == "embedding" for m in self.matrices)

    @property
    def formats(self) -> dict[str, str]:
        """Weight format by module, of modules that hold matrices."""
        return {m.module: m.weight_format for m in self.modules if m.weight_format != NO_FORMAT}
