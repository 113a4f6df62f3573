"""Packing of a checkpoint's experts before the first start, into the cache that loading maps."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import CapacityError, ConfigError
from tandem.core.model.plan import NO_FORMAT
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.devices import DeviceContext, open_device
from tandem.models.families import open_checkpoint
from tandem.models.families.names import rename_reader
from tandem.models.loading.builders import Resources
from tandem.models.loading.injection import apply_plan
from tandem.models.loading.loader import open_weights
from tandem.models.loading.packed_cache import PackedCaches, choose_root
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.planner import plan_model
from tandem.models.sources.source import Progress

__all__ = ["ConvertReport", "convert_model"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of ``convert_model``, which packs a checkpoint's routed experts into a cache."""

    folder: str
    """Folder that holds a folder for each weight format."""
    weight_format: str
    num_files: int
    num_packed: int
    """Number of files that this conversion wrote; further files existed before."""
    size_bytes: int
    """Bytes of all packed files."""
    source_bytes: int
    """Bytes of the same weights in the model's dtype."""


def convert_model(
    path_or_id: str | Path,
    weight_format: str,
    *,
    packed_cache: str = "auto",
    rules: str | Path | None = None,
    is_verified: bool = False,
    pool: ThreadPool | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Pack the routed experts of a checkpoint, as ``load_model`` would, and store them.

    Existing files are kept; an interrupted conversion continues where it stopped.

    Args:
        path_or_id: a folder, or a hub id that was pulled before.
        weight_format: format of experts without a rule.
        packed_cache: folder for the packed experts; ``auto``: in the user's cache folder.
        rules: a rule file with precedence over the built-in rules.
        is_verified: True to read everything again at the end and compare checksums.
        pool: threads that pack; None: a new pool with as many threads as the machine allows.
        progress: as for ``load_model``.

    Raises: the errors of ``load_model``; ConfigError if the model has no experts to pack;
        CapacityError if not all files could be written; CorruptionError if a file differs from what
        was written.
    """
    # The packed cache holds experts in one part, so the plan has no parts for NUMA nodes.
    plan = plan_model(
        path_or_id,
        rules=rules,
        expert_format=weight_format,
        linear_format=NO_FORMAT,
        packed_cache=packed_cache,
        expert_parts=1,
    )
    checkpoint = open_checkpoint(plan.folder)
    # An explicit conversion also keeps models that are too small for `auto` to cache, so a huge
    # size is given.
    root = choose_root(packed_cache, checkpoint.folder, size_bytes=1 << 62)
    if root is None:
        raise ConfigError("models.convert", "packed_cache is off: name a folder or auto")
    plan = msgspec.structs.replace(plan, packed_cache=str(root.parent))
    if pool is None:
        pool = ThreadPool(recommend_threads(read_topology()).threads)
    model = build_skeleton(checkpoint.config)
    with ExitStack() as stack:
        source, _, caches = open_weights(
            checkpoint, plan, DeviceContext(open_device(plan.device), pool), progress, stack
        )
        reader = rename_reader(source, source.entries, checkpoint.config.model_type)
        apply_plan(model, plan, Resources(pool=pool, caches=caches, expert_parts=plan.expert_parts))
        modules = model.named_modules()
        operators = {name: m for name, m in modules if isinstance(m, NativeExperts)}
        if not operators or caches is None:
            raise ConfigError(
                "models.convert",
                f"{plan.spec.name} has no routed experts in a weight format: nothing to pack",
            )
        had = {name for name, op in operators.items() if _is_packed(caches, name, op)}
        for name, operator in operators.items():
            operator.load(reader, name)
            if not _is_packed(caches, name, operator):
                raise CapacityError(
                    "models.convert",
                    f"{root} does not take {name}, {operator.size_bytes} bytes: free space "
                    "there, end the process that writes to it, or name another folder",
                )
        if is_verified:
            caches.verify()
    return ConvertReport(
        folder=str(root),
        weight_format=plan.experts.weight_format,
        num_files=len(operators),
        num_packed=len(operators.keys() - had),
        size_bytes=sum(operator.size_bytes for operator in operators.values()),
        source_bytes=sum(m.plain_bytes for m in plan.matrices if m.role == "experts"),
    )


def _is_packed(caches: PackedCaches, name: str, operator: NativeExperts) -> bool:
    cache = caches.open(operator.weight_format.name)
    return cache.find(name, operator.size_bytes) is not None
