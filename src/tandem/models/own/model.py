"""A model that transformers' own modules compute, one sequence at a time."""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import ConflictError, CorruptionError, NotFoundError, UnsupportedError
from tandem.core.model.plan import ModelPlan
from tandem.core.spec import KvIdentity, KVLayout, KvSharing, RoundingClass, WindowLayout
from tandem.kernels.devices import DeviceContext, name_arithmetic, open_device
from tandem.kernels.operators.operator import Operator
from tandem.kernels.paged import TORCH_DTYPES, PagedBatch
from tandem.models.identity import list_config_values
from tandem.models.loading.weight_digest import DigestCache, WeightHasher
from tandem.models.own.caches import CacheSlots
from tandem.models.own.experts import place_experts
from tandem.models.own.gate import find_class, open_own
from tandem.models.sources.containers import open_source
from tandem.models.sources.source import Progress

__all__ = ["OwnModel", "load_own"]


class OwnModel:
    """A decoder that transformers' own modules run, with the interface of ``CausalModel``.

    Not thread-safe: one step at a time. Made by ``load_own``. Attributes as in ``CausalModel``.
    """

    adapters = None
    choices = None
    moe = None
    packed_writer = None

    def __init__(
        self, modules: Any, plan: ModelPlan, context: DeviceContext, weights_digest: str
    ) -> None:
        assert plan.own is not None, "a plan of operators"
        self.spec = plan.spec
        self.plan = plan
        self.context = context
        self.device = context.device.torch_device
        self.dtype = TORCH_DTYPES[plan.spec.dtype]
        self.weights_digest = weights_digest
        self.ignored_weights: dict[str, str] = {}
        self.packed_folders: list[Path] = []
        self.modules = modules
        self.num_placed = 0
        """Number of layers whose experts our operators compute."""
        if plan.own.has_our_experts:
            self.num_placed = place_experts(modules, plan.spec.dtype, context.pool)
        self._piece = plan.own.piece

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; shared weights count once."""
        seen = {p.untyped_storage().data_ptr(): p for p in self.modules.parameters()}
        packed = sum(m.packed_bytes for m in self.modules.modules() if isinstance(m, Operator))
        return sum(p.untyped_storage().nbytes() for p in seen.values()) + packed

    def kv_identity(
        self,
        layout: KVLayout,
        sharing: KvSharing = "relaxed",
        windows: WindowLayout | None = None,
    ) -> KvIdentity:
        """Return the identity by which instances recognise the same model; cache objects are never
        shared.
        """
        return KvIdentity(
            weights=self.weights_digest,
            config=self.plan.config,
            dtype=self.spec.dtype,
            formats={
                "own_modules": f"pieces of {self._piece}",
                "own_experts": f"ours in {self.num_placed} layers",
            },
            layout=layout,
            windows=windows,
            sharing=sharing,
            rounding=RoundingClass(torch=f"{torch.__version__} {name_arithmetic('cpu')}"),
        )

    def enable_adapters(self, max_adapters: int) -> NoReturn:
        """Refuse LoRA adapters, which transformers' own modules do not take here.

        Raises: UnsupportedError (always).
        """
        del max_adapters
        what = f"{self.spec.model_type} runs by transformers' own modules, which take no adapters"
        raise UnsupportedError("models.enable_adapters", what, field="model.adapter")

    def allocate_states(self, num_slots: int) -> CacheSlots:
        """Return slots for the cache objects of sequences; memory is allocated as sequences
        grow.
        """
        return CacheSlots(num_slots)

    def project(self, hidden_RD: Tensor) -> Tensor:
        """Return rows of ``compute_hidden`` in float32: they are logits already."""
        return hidden_RD.float()

    def forward(self, batch: PagedBatch, states: CacheSlots) -> Tensor:
        """Run one step over the sequences of a batch; return the logits of the wanted rows, float32
        [R, V].
        """
        return self.project(self.compute_hidden(batch, states))

    @torch.inference_mode()
    def compute_hidden(self, batch: PagedBatch, states: CacheSlots) -> Tensor:
        """Run one step, sequence by sequence, and return the wanted logits.

        Args:
            batch: the tokens; its KV blocks are not used.
            states: slots with the cache objects of the batch's sequences.

        Returns: [R, V] in the model's dtype; row r belongs to ``batch.logit_rows[r]``.

        Raises: ShapeError (a slot is empty, as its sequence did not begin at token 0).
        """
        for slot in batch.fresh_slots:
            states.clear(slot)
        ids, wanted = batch.token_ids.tolist(), batch.logit_rows.tolist()
        rows: list[Tensor] = []
        for s, slot in enumerate(batch.state_slots):
            first, end = batch.query_start[s], batch.query_start[s + 1]
            rows += states.get(slot).extend(
                self.modules,
                ids[first:end],
                piece=self._piece,
                prompt_len=batch.prompt_lens[s],
                num_rows=sum(first <= row < end for row in wanted),
            )
        if not rows:
            return torch.empty(0, self.spec.num_logits, dtype=self.dtype, device=self.device)
        return torch.cat(rows)


def load_own(
    plan: ModelPlan, pool: ThreadPool | None = None, progress: Progress | None = None
) -> OwnModel:
    """Load a checkpoint into transformers' own modules, by transformers' own loader.

    Only safetensors are read, and no Python code of the folder is run.

    Args:
        plan: plan made by ``plan_own``.
        pool: threads that hash the weights and sample, kept; None: a new pool with as many threads
            as the machine allows.
        progress: ``progress(done_bytes, total_bytes, what)`` while the weights are hashed.

    Raises:
        NotFoundError: a file or a tensor of the checkpoint is missing.
        ConflictError: the configuration differs from the plan's.
        CorruptionError: a file is damaged, or a tensor has another shape.
    """
    checkpoint = open_own(plan.folder)
    config = checkpoint.config
    if list_config_values(config) != plan.config:
        what = f"the configuration in {plan.folder} changed: make the plan anew"
        raise ConflictError("models.load", what)
    if pool is None:
        pool = ThreadPool(recommend_threads(read_topology()).threads)
    context = DeviceContext(open_device("cpu"), pool)
    folder, dtype = Path(plan.folder), TORCH_DTYPES[plan.spec.dtype]
    with open_source(folder, dtype=dtype, device=context.device) as source:
        cache = DigestCache.of_user(folder)
        hasher = WeightHasher(source.entries, num_threads=pool.num_threads, cache=cache)
        with hasher:
            modules = _read_modules(folder, config, dtype)
            digest = hasher.result(progress)
    return OwnModel(modules, plan, context, digest)


def _read_modules(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers.utils import logging as transformers_logging

    is_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        modules, info = find_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            experts_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        what = f"transformers cannot read {folder}: {type(error).__name__}: {text}"
        raise CorruptionError("models.load", what) from error
    finally:
        if is_shown:
            transformers_logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers fills missing weights with random values, so a checkpoint that lacks tensors
        # is refused.
        what = f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}"
        raise NotFoundError("models.load", what)
    wrong = [str(key) for key in info["mismatched_keys"]]
    if wrong:
        what = f"{len(wrong)} tensors of {folder} have other shapes, the first is {wrong[0]}"
        raise CorruptionError("models.load", what)
    return modules.eval().requires_grad_(requires_grad=False)
