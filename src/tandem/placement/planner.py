"""The planner: from a machine, a model and the user's wishes to a plan, with the reason of each
choice.

Pure arithmetic over the cost model. Offload goes by arithmetic intensity: routed experts leave the
GPU first, then shared experts and dense layers, attention last. Models that serving does not
support yet can be planned too; the plan says so.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tandem.core.errors import CapacityError
from tandem.placement.choosers import (
    CHUNKS,
    MIN_IMMEDIATE,
    Choice,
    choose_chunk,
    choose_deferral,
)
from tandem.placement.costs import Efficiencies, Placement, decode_time, prefill_time
from tandem.placement.hardware import HardwareSpec
from tandem.placement.shape import FORMAT_BYTES, ModelShape

__all__ = ["ClassPlan", "DeviceMemory", "Plan", "Wishes", "make_plan"]

GIB = 1 << 30
BLOCK_TOKENS = 64
WORKSPACE_ITEMS = 12
"""Memory of activations per token of a chunk, in bf16 items, as a multiple of the hidden size."""
STREAM_GAIN = 1.2
"""Speed-up that streaming experts must bring for prompts, since it takes a layer's memory on the
GPU.
"""
MAX_USERS = 4096
DRAM = "DRAM"
"""Name of the processor's memory in plans and messages."""
DRAM_SHARE = 0.95
"""Share of the machine's DRAM that a model may use; the rest is for the system."""
PARALLEL: tuple[Literal["tensor", "expert", "pipeline"], ...] = ("tensor", "expert", "pipeline")


class Wishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's demands on a plan: context, users, speed, and how coarsely weights may be
    rounded.
    """

    context: Annotated[int, Meta(ge=1)] = 8192
    """Tokens of a sequence, prompt and answer together."""
    prompt: Annotated[int, Meta(ge=0)] = 0
    """Tokens of a prompt; 0: half of the context."""
    users: Annotated[int, Meta(ge=1)] = 1
    rate: Annotated[float, Meta(ge=0)] = 0
    """Tokens per second that each user should get; 0: no demand."""
    quality: Literal["stored", "int8", "int4"] = "int8"
    """Coarsest format that weights may be rounded to; `stored` rounds nothing."""
    gpu_experts: Annotated[int, Meta(ge=0)] | None = None
    """Experts of each layer on the GPU; None: as many as fit."""
    gpu_expert_format: str = ""
    """Weight format of experts on the GPU; empty: that of experts on the CPU."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.92
    """Share of the GPU's memory for weights and cache; the rest is for kernels and graphs."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, at most the context."""
        return min(self.prompt or max(1, self.context // 2), self.context)


class ClassPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one class of operators (such as attention or routed experts), its weight format
    and its size.
    """

    name: str
    device: str
    weight_format: str
    size_bytes: int
    ops_per_byte: float
    """Operations of a decode step per byte of memory that the class of operators takes, for the
    wished number of users. If the GPU is too small, the class with the fewest leaves it first.
    """


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one kind of device (GPUs, or the machine's DRAM), and which part of a model
    uses how much of it.
    """

    device: str
    capacity_bytes: int
    parts: dict[str, int]

    @property
    def used_bytes(self) -> int:
        """Bytes of the memory that are in use, the sum over the parts."""
        return sum(self.parts.values())


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of planning: a model's placement on a machine, its predicted speed, and the
    reasons.
    """

    model: str
    machine: str
    wishes: Wishes
    placement: Placement
    classes: tuple[ClassPlan, ...]
    threads: dict[str, int]
    """Threads of each operator class that runs on the CPU."""
    kv_blocks: int
    """Number of KV blocks, of 64 tokens each."""
    state_slots: int
    """Sequences whose recurrent states fit; 0 if the model has none."""
    window_bytes: int
    """Bytes of a user's KV in layers with a sliding window; 0 if no layer has one."""
    window_saved_bytes: int
    """Bytes that a user's KV in sliding-window layers would take in addition without windows."""
    prefill_rate: float
    """Tokens per second of one prompt."""
    decode_rate: float
    """Tokens per second, all users together."""
    users_at_rate: int
    """Users that get the wished rate at once; 0 if none do, or no rate is wished."""
    memory: tuple[DeviceMemory, ...]
    choices: tuple[Choice, ...]
    rejected: tuple[Choice, ...]
    unserved: str
    """Reason why serving does not support this model yet; empty: serving supports it."""


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A placement of a model's operators on devices that fits in memory, with the bytes that each
    part takes.
    """

    place: Placement
    kv_tokens: int
    gpu: dict[str, int]
    dram: dict[str, int]


class _Shortage(NamedTuple):
    """The memory that a placement lacks."""

    device: str
    need: dict[str, int]
    """Bytes that each part of the model takes of it."""
    have_bytes: int
    """Bytes of it that the model may use."""

    @property
    def lack_bytes(self) -> int:
        """Bytes that are missing."""
        return sum(self.need.values()) - self.have_bytes

    def describe(self) -> str:
        """Return in words what is needed and what there is."""
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.need.items())
        total = sum(self.need.values()) / GIB
        have = self.have_bytes / GIB
        return f"{total:.1f} GiB of {self.device} ({parts}), of which {have:.1f} GiB may be used"


class _Planner:
    """The state of planning one model on one machine: choices made, alternatives rejected,
    reasons.
    """

    def __init__(
        self,
        spec: HardwareSpec,
        shape: ModelShape,
        stored_format: str,
        wishes: Wishes,
        eff: Efficiencies,
    ) -> None:
        self.spec, self.shape, self.wishes, self.eff = spec, shape, wishes, eff
        self.stored = stored_format
        self.choices: list[Choice] = []
        self.rejected: list[Choice] = []

    def choose(self, what: str, value: object, reason: str) -> None:
        self.choices.append(Choice(what=what, value=str(value), reason=reason))

    def reject(self, what: str, value: object, reason: str) -> None:
        self.rejected.append(Choice(what=what, value=str(value), reason=reason))

    # Methods that choose weight formats.

    def list_formats(self, stored: str) -> list[str]:
        """Return the stored weight format and the coarser ones that the wished quality allows,
        finest first.
        """
        allowed = {"stored": [], "int8": ["int8"], "int4": ["int8", "int4"]}[self.wishes.quality]
        finer = FORMAT_BYTES[stored]
        return [stored, *(name for name in allowed if FORMAT_BYTES[name] < 0.95 * finer)]

    def choose_expert_format(self) -> str:
        formats = self.list_formats(self.stored)
        chosen = formats[-1]
        size = self.shape.expert_weights * FORMAT_BYTES[chosen]
        if chosen == self.stored:
            reason = "as the checkpoint stores it"
        else:
            reason = f"decode is bound by bytes; quality {self.wishes.quality} allows it"
        self.choose("format of routed experts", chosen, f"{reason}: {size / GIB:.1f} GiB")
        for other in formats[:-1]:
            larger = self.shape.expert_weights * FORMAT_BYTES[other]
            self.reject("format of routed experts", other, f"{larger / GIB:.1f} GiB to read from")
        for other in ("int8", "int4"):
            if other not in formats and FORMAT_BYTES[other] < 0.95 * FORMAT_BYTES[chosen]:
                why = f"coarser than quality {self.wishes.quality} allows"
                self.reject("format of routed experts", other, why)
        return chosen

    @property
    def gpu_name(self) -> str:
        """Name of the GPUs' memory, for messages."""
        return "the memory that GPU and CPU share" if self.spec.is_unified else "GPU memory"

    @property
    def dense_stored(self) -> str:
        """Format in which checkpoints store matrices other than routed experts."""
        return self.stored if self.stored in ("f32", "bf16", "fp8") else "bf16"

    # Methods that count memory.

    def count_static_bytes(self, accelerators: int) -> float:
        """Return how many bytes of the GPUs' memory weights and cache may use: the user's
        ``memory_fraction`` of it.
        """
        gpu = self.spec.accelerator
        return accelerators * gpu.memory_gib * GIB * self.wishes.memory_fraction if gpu else 0.0

    def count_workspace_bytes(self, place: Placement) -> float:
        """Return the bytes of a prompt chunk's activations, plus a layer of experts if these are
        streamed.
        """
        size = place.chunk_tokens * self.shape.hidden_size * 2 * WORKSPACE_ITEMS
        if place.prefill == "streamed" and self.shape.moe_layers:
            layer = self.shape.moe_layers[0]
            size += layer.num_experts * layer.expert_weights * FORMAT_BYTES[place.expert_format]
        return size

    def lay_out(self, place: Placement, users: int) -> _Layout | _Shortage:
        """Return the memory use of a placement, or the memory that it lacks.

        The GPU holds attention and dense matrices according to ``place``, the users' cache, then as
        many experts of each layer as fit or are wished, and more cache in the remaining memory.
        """
        shape, wishes = self.shape, self.wishes
        dense_bytes = FORMAT_BYTES[place.dense_format]
        is_cache_on_gpu = place.accelerators > 0 and place.is_attention_on_gpu
        # All heads share MLA's latent cache, so each GPU needs a full copy of it.
        copies = place.accelerators if is_cache_on_gpu and shape.layers[0].kind == "mla" else 1
        cache = copies * users * shape.count_cache_bytes(wishes.context)
        per_token = max(1.0, cache / (users * wishes.context))
        head = shape.head_weights or shape.embedding_weights
        parts = {
            "attention": shape.attention_weights * dense_bytes,
            "shared experts and dense layers": shape.dense_weights * dense_bytes,
            "head": head * dense_bytes,
        }
        gpu: dict[str, int] = {}
        dram: dict[str, int] = {}
        if shape.head_weights:
            dram["embedding"] = round(shape.embedding_weights * dense_bytes)
        on_gpu = {
            "attention": place.is_attention_on_gpu,
            "shared experts and dense layers": place.is_dense_on_gpu,
            "head": place.is_dense_on_gpu,
        }
        for name, size in parts.items():
            holder = gpu if place.accelerators and on_gpu[name] else dram
            holder[name] = round(size)
        (gpu if is_cache_on_gpu else dram)["KV and states"] = round(cache)
        experts = 0
        expert_bytes = FORMAT_BYTES[wishes.gpu_expert_format or place.expert_format]
        slot = sum(layer.expert_weights for layer in shape.moe_layers) * expert_bytes
        if place.accelerators:
            gpu["workspace"] = round(self.count_workspace_bytes(place))
            static = self.count_static_bytes(place.accelerators)
            if self.spec.is_unified:
                static = min(static, DRAM_SHARE * self.spec.memory_bytes - sum(dram.values()))
            free = static - sum(gpu.values())
            if free < 0:
                return _Shortage(self.gpu_name, gpu, max(0, round(static)))
            # If GPU memory is short, routed experts leave before dense layers: no experts stay on a
            # GPU that lacks room for the dense layers.
            if shape.moe_layers and place.is_dense_on_gpu:
                most = max(layer.num_experts for layer in shape.moe_layers)
                wanted = most if wishes.gpu_experts is None else wishes.gpu_experts
                experts = min(wanted, most, int(free // slot))
                if wishes.gpu_experts is not None and experts < min(wanted, most):
                    gpu["routed experts"] = round(min(wanted, most) * slot)
                    return _Shortage(self.gpu_name, gpu, round(static))
                if experts:
                    gpu["routed experts"] = round(experts * slot)
                    free -= experts * slot
            if is_cache_on_gpu:
                gpu["KV and states"] += round(free)
                cache += free
        if shape.expert_weights:
            # Host memory holds all routed experts, also those that the GPU holds, so that the set
            # on the GPU may change; none if the GPU holds all.
            dram["routed experts"] = round(shape.expert_weights * FORMAT_BYTES[place.expert_format])
            most = max(layer.num_experts for layer in shape.moe_layers)
            if experts == most:
                del dram["routed experts"]
            elif self.spec.is_unified:
                dram["routed experts"] = round(dram["routed experts"] * (1 - experts / most))
        if not is_cache_on_gpu:
            dram["workspace"] = round(self.count_workspace_bytes(place))
        if self.spec.processor is None and place.accelerators and "routed experts" not in dram:
            dram = {}  # Only the GPU is compared here; the host has no description.
        left = DRAM_SHARE * self.spec.memory_bytes
        if self.spec.is_unified:
            left -= sum(gpu.values())
        if sum(dram.values()) > left:
            return _Shortage(DRAM, dram, max(0, round(left)))
        return _Layout(
            place=msgspec.structs.replace(place, gpu_experts=experts),
            kv_tokens=int(cache / per_token),
            gpu=gpu,
            dram=dram,
        )

    # Methods that choose where weights and KV are placed.

    def list_places(self, expert_format: str) -> Iterator[tuple[Placement, str]]:
        """Yield placements of the operators in order of preference, each with a note of what it
        moved off the GPU.
        """
        num = self.spec.num_accelerators
        base = Placement(
            expert_format=expert_format,
            dense_format=self.dense_stored,
            sockets=self.spec.sockets,
            accelerators=num,
            chunk_tokens=CHUNKS[0],
        )
        formats = self.list_formats(self.dense_stored)
        if num:
            for name in formats:
                gave = f"matrices in {name}" if name != self.dense_stored else ""
                yield msgspec.structs.replace(base, dense_format=name), gave
            last = msgspec.structs.replace(base, dense_format=formats[-1], is_dense_on_gpu=False)
            yield last, "shared experts and dense layers"
        if self.spec.processor is not None:
            yield (
                msgspec.structs.replace(
                    base,
                    dense_format=formats[-1],
                    accelerators=0,
                    is_dense_on_gpu=False,
                    is_attention_on_gpu=False,
                ),
                "attention too",
            )

    def find_layout(
        self, users: int, expert_format: str
    ) -> tuple[_Layout | list[_Shortage], list[str]]:
        """Return the first placement that fits the users and the experts' format, or what each
        lacks if none does; and notes on those that did not fit.
        """
        failed: list[str] = []
        shortages: list[_Shortage] = []
        for place, gave in self.list_places(expert_format):
            layout = self.lay_out(place, users)
            if isinstance(layout, _Layout):
                return layout, failed
            shortages.append(layout)
            failed.append(gave or f"all matrices in {place.dense_format}")
        return shortages, failed

    def refine(self, layout: _Layout, users: int, *, is_told: bool) -> _Layout:
        """Choose how GPUs share the work, streaming of experts, chunk size and deferral (experts
        added a layer later) of a layout, by predicted times.
        """
        layout = self._choose_parallel(layout, users, is_told=is_told)
        layout = self._choose_prefill(layout, users, is_told=is_told)
        return self._choose_deferral(layout, users, is_told=is_told)

    def _decode(self, place: Placement, users: int) -> float:
        step = decode_time(
            self.spec, self.shape, place, self.eff, users=users, context=self.wishes.context
        )
        return users / step.seconds

    def _prefill(self, place: Placement) -> float:
        tokens = self.wishes.prompt_tokens
        step = prefill_time(self.spec, self.shape, place, self.eff, tokens=tokens)
        return tokens / step.seconds

    def _choose_parallel(self, layout: _Layout, users: int, *, is_told: bool) -> _Layout:
        if layout.place.accelerators < 2:
            return layout
        kinds = PARALLEL if self.shape.moe_layers else ("tensor", "pipeline")
        places = [msgspec.structs.replace(layout.place, parallel=kind) for kind in kinds]
        rates = [self._decode(place, users) for place in places]
        best = max(range(len(places)), key=lambda i: rates[i])
        if is_told:
            why = f"{rates[best]:.1f} tokens/s in decode; no operator runs on several GPUs yet"
            self.choose("parallelism", places[best].parallel, why)
            for i, place in enumerate(places):
                if i != best:
                    self.reject("parallelism", place.parallel, f"{rates[i]:.1f} tokens/s in decode")
        return msgspec.structs.replace(layout, place=places[best])

    def _choose_prefill(self, layout: _Layout, users: int, *, is_told: bool) -> _Layout:
        """Choose the chunk size, and whether a prompt's experts are streamed to the GPU."""
        options: list[tuple[_Layout, float]] = []
        for chunk in CHUNKS:
            if chunk > CHUNKS[0] and chunk >= 2 * self.wishes.prompt_tokens:
                continue
            place = msgspec.structs.replace(layout.place, chunk_tokens=chunk)
            kinds: list[Placement] = [place]
            most = max((layer.num_experts for layer in self.shape.moe_layers), default=0)
            has_others = layout.place.gpu_experts < most and not self.spec.is_unified
            if place.accelerators and has_others and place.is_attention_on_gpu:
                kinds.append(msgspec.structs.replace(place, prefill="streamed"))
            for kind in kinds:
                found = self.lay_out(kind, users)
                is_kept = isinstance(found, _Layout)
                if is_kept and found.place.gpu_experts * 2 >= layout.place.gpu_experts:
                    options.append((found, self._prefill(found.place)))
        rates = {
            kind: max((r for o, r in options if o.place.prefill == kind), default=0.0)
            for kind in ("cpu", "streamed")
        }
        is_streamed = rates["streamed"] > STREAM_GAIN * rates["cpu"]
        kind = "streamed" if is_streamed else "cpu"
        by_chunk = {o.place.chunk_tokens: (o, r) for o, r in options if o.place.prefill == kind}
        chosen = layout
        if by_chunk:
            chunk = choose_chunk({chunk: rate for chunk, (_, rate) in by_chunk.items()})
            chosen = by_chunk[chunk][0]
        if is_told:
            self._tell_prefill(chosen.place, rates, options)
        return chosen

    def _tell_prefill(
        self, place: Placement, rates: dict[str, float], options: list[tuple[_Layout, float]]
    ) -> None:
        most = max((layer.num_experts for layer in self.shape.moe_layers), default=0)
        if most and place.accelerators and place.gpu_experts == most:
            self.choose("experts of a prompt", "on the GPU", "all of them are there")
        elif most and place.accelerators:
            other = "cpu" if place.prefill == "streamed" else "streamed"
            names = {"cpu": "on the CPU", "streamed": "streamed to the GPU, layer by layer"}
            why = f"{rates[place.prefill]:.0f} tokens/s of a prompt of {self.wishes.prompt_tokens}"
            self.choose("experts of a prompt", names[place.prefill], why)
            less = f"{rates[other]:.0f} tokens/s" if rates[other] else "no memory for a layer"
            self.reject("experts of a prompt", names[other], less)
        why = "the smallest within 2 % of the fastest"
        self.choose("tokens of a chunk", place.chunk_tokens, why)
        for option, rate in options:
            if option.place.prefill == place.prefill and option.place != place:
                chunk = option.place.chunk_tokens
                self.reject("tokens of a chunk", chunk, f"{rate:.0f} tokens/s")

    def _choose_deferral(self, layout: _Layout, users: int, *, is_told: bool) -> _Layout:
        place = layout.place
        layers = self.shape.moe_layers
        on_cpu = bool(layers) and place.gpu_experts < max(layer.num_experts for layer in layers)
        if not place.accelerators or not on_cpu or self.wishes.quality == "stored":
            if is_told and layers:
                why = (
                    "it changes values" if self.wishes.quality == "stored" else "no GPU to overlap"
                )
                why = "no experts on the CPU" if place.accelerators and not on_cpu else why
                self.choose("deferred experts", 0, why)
            return layout
        most = max(0, max(layer.top_k for layer in layers) - MIN_IMMEDIATE)
        rates = [
            self._decode(msgspec.structs.replace(place, deferred=d), users) for d in range(most + 1)
        ]
        chosen = choose_deferral(rates)
        if is_told:
            why = f"the fewest that saturate the CPU: {rates[chosen]:.1f} tokens/s; "
            why += f"0 gives {rates[0]:.1f}"
            self.choose("deferred experts", chosen, why)
            for d, rate in enumerate(rates):
                if d != chosen:
                    self.reject("deferred experts", d, f"{rate:.1f} tokens/s in decode")
        return msgspec.structs.replace(
            layout, place=msgspec.structs.replace(place, deferred=chosen)
        )

    # Methods that count concurrent users.

    def count_users(self, expert_format: str) -> int:
        """Return the largest number of users whose cache fits and who get the wished rate of
        tokens.
        """
        if not self.wishes.rate:
            return 0

        def serves(users: int) -> bool:
            layout, _ = self.find_layout(users, expert_format)
            if not isinstance(layout, _Layout):
                return False
            place = self.refine(layout, users, is_told=False).place
            return self._decode(place, users) / users >= self.wishes.rate

        low, high = 0, 1
        while high <= MAX_USERS and serves(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if serves(middle) else (low, middle)
        return low


def make_plan(
    spec: HardwareSpec,
    shape: ModelShape,
    wishes: Wishes,
    *,
    stored_format: str,
    efficiencies: Efficiencies,
) -> Plan:
    """Plan a model on a machine.

    Args:
        spec: the machine.
        shape: the model, from its configuration alone.
        wishes: context, users, rate and quality floor.
        stored_format: the checkpoint's format of routed experts, or of all matrices.
        efficiencies: shares of the peaks that are reached.

    Raises: CapacityError if no placement fits; the text says which memory is short.
    """
    planner = _Planner(spec, shape, stored_format, wishes, efficiencies)
    expert_format = planner.choose_expert_format() if shape.expert_weights else stored_format
    layout, failed = planner.find_layout(wishes.users, expert_format)
    if not isinstance(layout, _Layout):
        raise CapacityError("placement.make_plan", _tell_shortage(planner, layout, expert_format))
    _tell_offload(planner, layout, failed)
    layout = planner.refine(layout, wishes.users, is_told=True)
    place = layout.place
    if spec.accelerator is not None and shape.moe_layers and place.accelerators:
        _tell_experts(planner, place)
    threads = _choose_threads(planner, place)
    decode = decode_time(
        spec, shape, place, efficiencies, users=wishes.users, context=wishes.context
    )
    prefill = prefill_time(spec, shape, place, efficiencies, tokens=wishes.prompt_tokens)
    states = layout.kv_tokens // wishes.context if shape.state_bytes else 0
    kept, whole = shape.count_window_bytes(wishes.context)
    return Plan(
        model=shape.name,
        machine=spec.name,
        wishes=wishes,
        placement=place,
        classes=tuple(_list_classes(shape, place, wishes)),
        threads=threads,
        kv_blocks=layout.kv_tokens // BLOCK_TOKENS,
        state_slots=max(wishes.users, states) if shape.state_bytes else 0,
        window_bytes=kept,
        window_saved_bytes=whole - kept,
        prefill_rate=wishes.prompt_tokens / prefill.seconds,
        decode_rate=wishes.users / decode.seconds,
        users_at_rate=planner.count_users(expert_format),
        memory=_list_memory(spec, layout),
        choices=tuple(planner.choices),
        rejected=tuple(planner.rejected),
        unserved=shape.unserved,
    )


def _tell_shortage(planner: _Planner, shortages: list[_Shortage], expert_format: str) -> str:
    """Return why no placement fits: what the one that lacks the least DRAM needs, and what would
    help. Memory of GPUs alone stops no model where a processor can compute all of it.
    """
    spec, shape = planner.spec, planner.shape
    of_dram = [short for short in shortages if short.device == DRAM]
    short = min(of_dram or shortages, key=lambda each: each.lack_bytes)
    text = f"{shape.name} does not fit {spec.title}: the placement that lacks the least takes "
    text += f"{short.describe()}: allow a coarser quality, fewer users or a shorter context"
    experts = short.need.get("routed experts", 0)
    rest = sum(short.need.values()) - experts
    if short.device != DRAM or not experts or rest >= short.have_bytes:
        return text
    kept = (short.have_bytes - rest) / (shape.expert_weights * FORMAT_BYTES[expert_format])
    text += "; or keep routed experts on an SSD, as `tandem serve` does where memory is short: "
    return text + f"beside the rest there is room for {kept:.0%} of them in memory"


def _tell_offload(planner: _Planner, layout: _Layout, failed: list[str]) -> None:
    place = layout.place
    for what in failed:
        planner.reject("on the GPU", what, "does not fit beside the users' cache")
    if not place.accelerators:
        why = "no GPU" if planner.spec.accelerator is None else "not even attention fits the GPU"
        planner.choose("device", "CPU", why)
        return
    kept = ["attention"] if place.is_attention_on_gpu else []
    kept += ["shared experts and dense layers"] if place.is_dense_on_gpu else []
    why = "by operations a byte that is held: routed experts leave first, attention last"
    planner.choose("on the GPU", ", ".join(kept), why)
    planner.choose(
        "format of other matrices",
        place.dense_format,
        "as stored" if place.dense_format == planner.dense_stored else "the finest that fits",
    )


def _tell_experts(planner: _Planner, place: Placement) -> None:
    most = max(layer.num_experts for layer in planner.shape.moe_layers)
    if planner.wishes.gpu_experts is not None:
        why = "as wished"
    elif place.gpu_experts == most:
        why = "all fit"
    else:
        why = "as many as fit beside attention, cache and workspace"
    planner.choose("routed experts of a layer on the GPU", f"{place.gpu_experts} of {most}", why)


def _choose_threads(planner: _Planner, place: Placement) -> dict[str, int]:
    cores = planner.spec.cores
    if not cores:
        return {}
    classes = ["routed experts"] if planner.shape.moe_layers else []
    if not place.accelerators or not place.is_dense_on_gpu:
        classes.append("shared experts and dense layers")
    if not place.accelerators or not place.is_attention_on_gpu:
        classes.append("attention")
    if classes:
        planner.choose("threads", cores, "one a core that may be used; siblings share its units")
    return dict.fromkeys(classes, cores)


def _list_classes(shape: ModelShape, place: Placement, wishes: Wishes) -> Iterator[ClassPlan]:
    dense = FORMAT_BYTES[place.dense_format]
    gpu = "GPU" if place.accelerators else "CPU"
    users = wishes.users
    cache = users * shape.count_cache_bytes(wishes.context)
    ops = sum(
        users * (2 * layer.attention_weights + layer.decode_ops * wishes.context)
        for layer in shape.layers
    )
    size = shape.attention_weights * dense
    yield ClassPlan(
        name="attention",
        device=gpu if place.is_attention_on_gpu else "CPU",
        weight_format=place.dense_format,
        size_bytes=round(size),
        ops_per_byte=ops / (size + cache),
    )
    head = shape.head_weights or shape.embedding_weights
    yield ClassPlan(
        name="shared experts, dense layers, head",
        device=gpu if place.is_dense_on_gpu else "CPU",
        weight_format=place.dense_format,
        size_bytes=round((shape.dense_weights + head) * dense),
        ops_per_byte=2 * users / dense,
    )
    if shape.moe_layers:
        layer = shape.moe_layers[0]
        share = layer.top_k / layer.num_experts
        most = max(layer.num_experts for layer in shape.moe_layers)
        on = place.gpu_experts if place.accelerators else 0
        where = "CPU" if not on else "GPU" if on == most else "GPU and CPU"
        yield ClassPlan(
            name="routed experts",
            device=where,
            weight_format=place.expert_format,
            size_bytes=round(shape.expert_weights * FORMAT_BYTES[place.expert_format]),
            ops_per_byte=2 * users * share / FORMAT_BYTES[place.expert_format],
        )


def _list_memory(spec: HardwareSpec, layout: _Layout) -> tuple[DeviceMemory, ...]:
    memory: list[DeviceMemory] = []
    if spec.is_unified:
        parts = dict(layout.gpu)
        for name, size in layout.dram.items():
            parts[name] = parts.get(name, 0) + size
        shared = DeviceMemory(device=DRAM, capacity_bytes=spec.memory_bytes, parts=parts)
        return (shared,)
    if spec.accelerator is not None and layout.place.accelerators:
        capacity = math.floor(layout.place.accelerators * spec.accelerator.memory_gib * GIB)
        memory.append(DeviceMemory(device="GPU", capacity_bytes=capacity, parts=layout.gpu))
    if layout.dram:
        memory.append(
            DeviceMemory(device=DRAM, capacity_bytes=spec.memory_bytes, parts=layout.dram)
        )
    return tuple(memory)
