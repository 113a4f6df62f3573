"""The plan of a model: how it will be stored and run, as plain data.

``tandem.models.planning.planner`` makes a ``ModelPlan`` from the configuration, the rules and the
modules of the model skeleton, without reading a weight. `tandem plan` and `tandem serve --dry-run`
print it, the engine sizes memory by it, and ``load_model`` carries it out. No torch here.

Shapes: E experts, F intermediate, D hidden, N outputs, K inputs.
"""

from math import prod
from typing import Literal

import msgspec

from tandem.core.model.layers import (
    ExpertsSpec,
    GqaSpec,
    MixerSpec,
    MlaSpec,
    MlpSpec,
    NonNegativeInt,
    OperatorSpec,
    PositiveInt,
    RopeSpec,
    RotarySpec,
    RouterSpec,
)
from tandem.core.spec import DTYPE_BYTES, ModelSpec

__all__ = [
    "NO_FORMAT",
    "OWN_CONTEXT",
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
"""Name of the format of tensors that are stored in the model's dtype."""

WHOLE_PROMPT = 1 << 60
"""Value of a piece length that means that a prompt is computed at once, not in pieces; longer than
any prompt.
"""

OWN_CONTEXT = "the model's own"
"""Reason for a context as long as the configuration says."""

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
    """A mixture of experts: routed experts, their router, and shared experts, which every token
    uses.
    """

    num_experts: PositiveInt
    top_k: PositiveInt
    intermediate_size: PositiveInt
    """Intermediate size (F) of one routed expert."""
    shared_intermediate_size: NonNegativeInt = 0
    """Intermediate size of all shared experts together; 0: there are none."""
    has_bias: bool = False
    router: RouterSpec | None = None
    """Router; None if no operator of ours chooses experts as the model does."""
    experts: ExpertsSpec | None = None
    """Routed experts; None if no operator of ours computes what the model's do."""


class MatrixPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix, or the matrices of all experts of a layer, as stored in memory."""

    module: str
    """Name of the module that holds it, after the rules have replaced modules."""
    role: MatrixRole
    shape: tuple[int, ...]
    """Shape of the weight: [N, K] for N outputs and K inputs, with matrices that one product
    computes together stacked along N; [E, 3 F, D] for E experts; [H, N, K] if each attention head
    has a matrix.
    """
    weight_format: str
    device: str
    """Device that stores it and computes with it."""
    size_bytes: NonNegativeInt
    """Bytes as stored, with scales and padding; 0 if it shares another matrix's memory."""
    plain_bytes: NonNegativeInt
    """Bytes that the matrix would take in the model's dtype."""
    reason: str
    stored_bytes: NonNegativeInt = 0
    """Bytes of the matrix in the checkpoint, if it is quantized there; otherwise 0, as without a
    checkpoint.
    """
    rows: tuple[tuple[str, int], ...] = ()
    """Modules of the checkpoint whose weights are stacked here, in their order: dotted path and
    number of rows.
    """


class AdapterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A linear module of the checkpoint to which LoRA adapters can be applied."""

    module: str
    """Dotted path of the module."""
    in_features: PositiveInt
    out_features: PositiveInt


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder layer: its parts, the storage of its matrices, and the modules that take
    adapters.
    """

    index: NonNegativeInt
    mixer: MixerSpec | None
    """Token mixer; None if the layer is only an MLP or experts."""
    rope: RopeSpec | None
    """RoPE; None if no operator of ours computes the model's angles."""
    mlp: MlpSpec | MoeSpec | None
    """MLP or experts; None if the layer is only a token mixer."""
    matrices: tuple[MatrixPlan, ...] = ()
    """All matrices of the layer; empty where the spec stands for a kind of layer, not for one
    layer.
    """
    adapters: tuple[AdapterPlace, ...] = ()

    @property
    def kind(self) -> "LayerSpec":
        """This layer without what differs from layer to layer (index, matrices, adapters), so that
        layers that compute the same are equal.
        """
        return msgspec.structs.replace(self, index=0, matrices=(), adapters=())


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on one module of the skeleton (the model as transformers builds it): the
    operator that replaces it, or the reason why it stays.
    """

    module: str
    """Dotted path of the module."""
    class_name: str
    operator: str
    """Name of the operator that replaces it, or ``default`` if the skeleton's module stays."""
    spec: OperatorSpec | None = None
    """Spec of the operator; None if the skeleton's module stays."""
    rule: str = ""
    """``file:line`` of the rule that applied; empty: none."""
    weight_format: str = NO_FORMAT
    """Weight format of the operator's matrices."""
    score_format: str = NO_FORMAT
    """Weight format of its matrices that score or gate; one without loss."""
    keeps_codes: bool = False
    """True if matrices that are quantized in the checkpoint keep their codes, each in its own
    format."""
    owner: str = ""
    """Path of the parent module whose operator has taken over this module's weights; empty: none
    has.
    """
    note: str = ""
    """Remark for users, such as a missing device or the reason why a layer is not fused."""
    problem: str = ""
    """Reason why the model cannot be loaded by this plan; empty: none."""


class FormatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The weight format of a kind of matrices, unless a rule says otherwise, with the reason."""

    weight_format: str
    reason: str


class ExpertTierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that caches routed experts of a model whose experts lie on disk."""

    num_slots: PositiveInt
    """Number of experts of each layer that fit in memory."""
    num_layers: PositiveInt
    """Number of layers with routed experts."""
    num_staged: PositiveInt
    """Number of places in memory, shared by all layers, for experts that are read from disk for one
    use and not kept.
    """
    slot_bytes: PositiveInt
    """Bytes of memory for one expert of one layer."""
    policy: str
    """Name of the cache policy that assigns slots to experts."""
    depth: PositiveInt
    """Number of concurrent reads from the disk."""
    part_bytes: PositiveInt
    """Bytes of one read from the disk."""
    read_rate: float
    """Measured rate of the disk at this depth, bytes a second; 0 if it could not be measured."""
    missed_bytes: float
    """Bytes that a token reads from disk on average, if all experts are chosen equally often."""
    reason: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the slots that keep experts of all layers, and of the places for experts used
        once.
        """
        return (self.num_slots * self.num_layers + self.num_staged) * self.slot_bytes


class OwnModules(msgspec.Struct, frozen=True, kw_only=True):
    """A model that runs by transformers' own modules, with a cache object for each sequence."""

    reason: str
    """Reason why our operators do not run it."""
    piece: PositiveInt
    """Number of tokens that one forward pass of a prefill computes, so that passes begin at
    multiples of it; ``WHOLE_PROMPT``: the whole prompt at once.
    """
    token_bytes: NonNegativeInt
    """Bytes that each token adds to transformers' cache object of a sequence."""
    fixed_bytes: NonNegativeInt
    """Bytes of transformers' cache object of a sequence that do not depend on the number of tokens.
    """
    has_our_experts: bool = False
    """True if routed experts run by our operators, in layers whose experts these can compute."""

    @property
    def is_cut(self) -> bool:
        """True if a prefill is computed in pieces, so that copies of its cache object are worth
        keeping.
        """
        return self.piece < WHOLE_PROMPT

    def describe(self) -> str:
        """Return in words the pieces in which a prompt is computed."""
        if not self.is_cut:
            return "a prompt at once"
        return "token by token" if self.piece == 1 else f"in pieces of {self.piece} tokens"


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it will be stored and run: every value concrete, with its reason."""

    folder: str
    spec: ModelSpec
    """Spec of the model, with the dtype that it runs in and the parameters counted in the
    skeleton."""
    device: str
    config: dict[str, str]
    """Fields of the configuration that affect computed values; see ``KvIdentity``."""
    layers: tuple[LayerSpec, ...]
    modules: tuple[ModulePlan, ...]
    other_matrices: tuple[MatrixPlan, ...]
    """Matrices outside the layers: embedding and head."""
    vector_bytes: NonNegativeInt
    """Bytes of all weights that are not matrices: norms, biases, sinks."""
    experts: FormatChoice
    linear: FormatChoice
    """Format of attention's projections, dense MLPs and the head."""
    router: FormatChoice
    """Weight format of the routers' matrices (scores of experts); always one without loss."""
    expert_parts: PositiveInt
    """Number of parts into which packed experts are split, one for the memory of each NUMA node; 1:
    they are not split.
    """
    expert_device: str = "cpu"
    """Device of the routed experts, which may be the host even if the model's device is a GPU."""
    packed_cache: str
    """Location of the cache file of packed experts: a folder, ``off``, or ``auto`` (the user's
    cache folder, if the weights are large).
    """
    tier: ExpertTierPlan | None = None
    """Cache of the routed experts, if they lie on disk; None: all are in memory."""
    context_reason: str = OWN_CONTEXT
    """Reason for the spec's number of positions, which may be less than the configuration's."""
    own: OwnModules | None = None
    """Set if the model runs by transformers' own modules; ``layers`` is empty then. None: it runs
    by our operators."""
    num_deferred_experts: NonNegativeInt = 0
    """Number of experts of an output token, those of least weight, whose output is added one layer
    later."""
    notes: tuple[str, ...] = ()
    """Unused parts of the checkpoint, with reasons."""
    unused_rules: tuple[str, ...] = ()
    """``file:line`` of rules that matched no module."""
    shadowed_rules: dict[str, tuple[str, ...]] = {}
    """Rules without effect because earlier rules took all their modules, each with those earlier
    rules.
    """

    def serve(self, context: int) -> "ModelPlan":
        """Return the plan for sequences of up to ``context`` tokens, on which the factors of a
        LongRoPE depend. Before this is called they are those of the model's own context.
        """
        replace = msgspec.structs.replace
        layers = [
            layer if layer.rope is None else replace(layer, rope=layer.rope.serve(context))
            for layer in self.layers
        ]
        modules = list(self.modules)
        for i, module in enumerate(modules):
            if isinstance(module.spec, RotarySpec):
                ropes = {name: rope.serve(context) for name, rope in module.spec.ropes.items()}
                modules[i] = replace(module, spec=replace(module.spec, ropes=ropes))
        return replace(self, layers=tuple(layers), modules=tuple(modules))

    @property
    def rope_factors(self) -> dict[str, str]:
        """The factors that divide a LongRoPE's frequencies, ``long_factor`` or ``short_factor``, by
        the number of the RoPE among the model's; empty without such a RoPE.
        """
        return {
            str(layer.mixer.rope_idx): "long_factor" if layer.rope.is_long else "short_factor"
            for layer in self.layers
            if layer.rope is not None and layer.rope.rope_type == "longrope"
            if isinstance(layer.mixer, GqaSpec | MlaSpec)
        }

    @property
    def matrices(self) -> tuple[MatrixPlan, ...]:
        """All matrices, those of the layers first."""
        own = [matrix for layer in self.layers for matrix in layer.matrices]
        return (*own, *self.other_matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(matrix.size_bytes for matrix in self.matrices) + self.vector_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the routed experts as stored."""
        return sum(matrix.size_bytes for matrix in self.matrices if matrix.role == "experts")

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights in the host's memory."""
        if self.device == "cpu":
            return self.weight_bytes
        return self.expert_bytes if self.expert_device == "cpu" else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights in memory; of experts on disk, only the memory that caches them
        counts.
        """
        if self.tier is None:
            return self.weight_bytes
        return self.weight_bytes - self.expert_bytes + self.tier.size_bytes

    @property
    def stored_bytes(self) -> tuple[int, int]:
        """Bytes in memory, and bytes in the checkpoint, of those matrices that are quantized in the
        checkpoint.

        Embedding and routers are left out.
        """
        other = ("embedding", "router")
        coded = [m for m in self.matrices if m.stored_bytes and m.role not in other]
        return sum(m.size_bytes for m in coded), sum(m.stored_bytes for m in coded)

    @property
    def token_bytes(self) -> int:
        """Bytes of matrices that computing one token reads; of routed experts, only the chosen
        ones.
        """
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
        """True if native kernels compute every matrix product."""
        return all(m.weight_format != NO_FORMAT or m.role == "embedding" for m in self.matrices)

    @property
    def formats(self) -> dict[str, str]:
        """Weight format by module path, for modules whose operator stores matrices in such a
        format.
        """
        return {m.module: m.weight_format for m in self.modules if m.weight_format != NO_FORMAT}
