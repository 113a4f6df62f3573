"""`tandem bench hybrid`: routed experts computed on the host and the rest on a device, against
experts placed elsewhere.

Layers of Qwen3-30B-A3B's and Qwen3.6-35B-A3B's shapes with random weights: products as large as
their attention, a router, shared experts where there are such, all in bfloat16 on the device, and
routed experts in int8 or int4 on the host. A decode step is the one that serves
(``kernels.hybrid``): captured or not, with none, two or four deferred experts, with and without
uploads. A prompt's experts stay on the host or are streamed (``kernels.lanes.streams``).

The rivals are the same layers with all experts on the device, in bfloat16, and torch offload: the
chosen experts are copied there before each product. Results are compared with the same layers
computed one after the other first. Without a GPU the cases are tiny and run over the fake device,
and their names say so: they check the code, and their times mean nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.bench.harness import BenchCase, time_call
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.cpu.experts import NativeExperts, PackedExperts
from tandem.kernels.device import Device, Graph
from tandem.kernels.devices import open_device
from tandem.kernels.fake.device import FakeDevice
from tandem.kernels.hybrid import HybridDecoder
from tandem.kernels.lanes.loads import UnpackedLoads, make_loads
from tandem.kernels.lanes.slots import ExpertSlots
from tandem.kernels.lanes.streams import ExpertStream
from tandem.kernels.lanes.uploads import UploadLane
from tandem.kernels.native import Buffer
from tandem.kernels.routing import split_deferred
from tandem.kernels.weights.formats import find_format
from tandem.placement.experts.cache import LruPolicy
from tandem.placement.experts.lanes import LaneSplit

__all__ = ["Decode", "Layers", "Shape", "describe_step", "make_cases"]

DTYPE = torch.bfloat16
PACKED_EXPERTS = 8
"""Experts with weights of their own; all others are scaled copies of these, so that packing takes
seconds.
"""
MAX_UPLOADS = 4
DEVICE_CALLS = ("run", "copy", "call_host", "launch")
MAX_LOGIT = 1e4
MAX_ERROR = 0.03
"""Largest allowed norm of an error relative to the result's: ours has quantised activations, the
other side bfloat16.
"""


class Shape(NamedTuple):
    """Sizes of a layer, and the number of layers."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    attention: int
    """Outputs of the matrix product that stands for attention in the measured layer; its matrix has
    twice ``hidden * attention`` weights.
    """
    shared: int = 0
    """Inner size of the shared experts; 0 if there are none."""
    num_layers: int = 8
    batches: tuple[int, ...] = (1, 4, 16)
    prompts: tuple[int, ...] = (2048, 8192)


SHAPES = (
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8, 4608),
    Shape("qwen3.6-35b-a3b", 2048, 512, 256, 8, 4608, shared=512),
)
TINY = Shape("tiny", 128, 64, 8, 4, 64, shared=64, num_layers=3, batches=(1, 3), prompts=(40,))
FORMATS = ("int8g128", "int4g32")
TINY_FORMATS = ("int8g32", "int4g32")


class _Layer(nn.Module):
    """A module that only carries the number of its layer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Choice(NamedTuple):
    """The router's choice for the tokens of a step: the experts' input, ids and weights; an
    ``ExpertChoice``.
    """

    x: Buffer
    ids: Buffer
    weights: Buffer


class Layers:
    """Random layers: experts in the host's memory, everything else on the device.

    Args:
       device: holds all but the routed experts.
       shape: sizes of the layers.
       format_name: weight format of the routed experts on the host.
    """

    def __init__(self, device: Device, shape: Shape, format_name: str) -> None:
        self.device, self.shape = device, shape
        self.place = torch.device("cpu") if isinstance(device, FakeDevice) else device.torch_device
        self.pool = ThreadPool(recommend_threads(read_topology()).threads)
        chance = torch.Generator().manual_seed(1)
        hidden, wide, shared = shape.hidden, shape.attention, shape.shared

        def make(rows: int, columns: int) -> Tensor:
            matrix = torch.randn(rows, columns, generator=chance) * rows**-0.5
            return matrix.to(DTYPE).to(self.place)

        numbers = range(shape.num_layers)
        self.mixers = [(make(hidden, wide), make(wide, hidden)) for _ in numbers]
        self.routers = [make(hidden, shape.num_experts) for _ in numbers]
        self.wishes = [self._draw_experts(chance) for _ in numbers]
        self.shared = [(make(hidden, shared), make(shared, hidden)) for _ in numbers if shared]
        self.experts = [self._pack(format_name, number) for number in numbers]
        self.modules = [_Layer(number) for number in numbers]

    def _draw_experts(self, chance: torch.Generator) -> Tensor:
        """Return random numbers to add to the router's logits, float32 [tokens, E], so large that
        they decide the choice.

        The logits of a random router nearly tie, so a rounding would choose another expert and
        change the result.
        """
        shape = self.shape
        num_rows = max(*shape.batches, *shape.prompts)
        drawn = torch.rand(num_rows, shape.num_experts, generator=chance).topk(shape.top_k).indices
        wishes = torch.zeros(num_rows, shape.num_experts).scatter_(1, drawn, MAX_LOGIT)
        return wishes.to(self.place)

    def _pack(self, format_name: str, seed: int) -> NativeExperts:
        shape, chance = self.shape, torch.Generator().manual_seed(100 + seed)
        sizes = (shape.num_experts, shape.hidden, shape.inner)
        few = min(PACKED_EXPERTS, shape.num_experts)
        gate_up = torch.randn(few, 2 * shape.inner, shape.hidden, generator=chance)
        down = torch.randn(few, shape.hidden, shape.inner, generator=chance)
        gate_up *= shape.hidden**-0.5
        down *= shape.inner**-0.5
        weight_format = find_format(format_name)
        packed = PackedExperts(weight_format, *sizes, pool=self.pool)
        for expert_id in range(shape.num_experts):
            both = gate_up[expert_id % few] * (1 + 0.01 * (expert_id // few))
            packed.pack_expert(
                expert_id, both[: shape.inner], both[shape.inner :], down[expert_id % few]
            )
        spec = ExpertsSpec(num_experts=sizes[0], hidden_size=sizes[1], intermediate_size=sizes[2])
        native = NativeExperts(spec, weight_format=weight_format, pool=self.pool)
        native.take(packed)
        return native

    @cached_property
    def unpacked(self) -> list[UnpackedLoads]:
        """The routed experts of each layer, dequantized to bfloat16 for the rivals."""
        return [UnpackedLoads(experts, self.pool, self.device) for experts in self.experts]

    @cached_property
    def staged(self) -> list[Tensor]:
        """The dequantized experts of each layer, for the rivals, in host memory that the device
        copies from fast, uint8 [E, bytes].
        """
        made: list[Tensor] = []
        for loads in self.unpacked:
            size = loads.expert_bytes
            memory = self.device.allocate_staging(loads.num_experts * size).view(-1, size)
            for expert_id in range(loads.num_experts):
                loads.stage(expert_id, memory[expert_id])
            made.append(memory)
        return made

    @cached_property
    def there(self) -> list[Tensor]:
        """The dequantized experts of each layer on the device, for the rival, uint8 [E, bytes]."""
        return [memory.to(self.place) for memory in self.staged]

    def choose(self, number: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer up to its experts; return the experts' input, ids and weights."""
        first, second = self.mixers[number]
        x.add_((x @ first) @ second, alpha=0.3)
        h = torch.rms_norm(x, x.shape[-1:])
        logits = (h @ self.routers[number]).float()
        _, ids = torch.topk(logits + self.wishes[number][: len(x)], self.shape.top_k, dim=-1)
        return h, ids, torch.softmax(logits.gather(1, ids), -1)

    def add_shared(self, number: int, x: Tensor, h: Tensor) -> None:
        """Add the output of layer ``number``'s shared experts for the input ``h`` to the hidden
        states ``x``.
        """
        first, second = self.shared[number]
        x.add_(torch.relu(h @ first) @ second)


class _Step:
    """A decode step of the random layers, as the product's steps are (see ``LayeredStep``), in
    memory whose addresses do not change.
    """

    def __init__(self, layers: Layers, num_deferred: int) -> None:
        self._layers, self._num_deferred = layers, num_deferred
        self._number = 0
        self._x: Tensor | None = None
        self._h: Tensor | None = None

    def begin_(self) -> None:
        """Do nothing: unlike a model's step, these layers derive nothing (such as positions) from
        the batch.
        """

    def choose_experts_(self, layer: nn.Module, x: Tensor) -> _Choice:
        """Run a layer up to its router's choice of experts, and return the choice."""
        assert isinstance(layer, _Layer), layer
        self._number, self._x = layer.number, x
        self._h, ids, weights = self._layers.choose(layer.number, x)
        return _Choice(Buffer(self._h), Buffer(ids), Buffer(weights))

    def run_shared_(self, choice: object) -> None:
        """Add the output of the current layer's shared experts to the hidden states."""
        del choice
        assert self._x is not None
        assert self._h is not None
        self._layers.add_shared(self._number, self._x, self._h)

    def leave_sum_(self, out: Buffer) -> None:
        """Add the sum of the experts' outputs to the hidden states at once, instead of leaving it
        for later.
        """
        assert self._x is not None
        self._x.add_(out.tensor)

    def complete_(self, x: Tensor) -> None:
        """Do nothing: no sum of experts' outputs is left to be added."""

    def split(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Divide the chosen experts into immediate and deferred ones (whose outputs the next layer
        adds), as ``StepRouting`` does for decoded tokens.
        """
        if self._number == self._layers.shape.num_layers - 1:
            return ids, None
        rows = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        return split_deferred(ids, weights, self._num_deferred, rows)


def compute_plainly(layers: Layers, x: Tensor, num_deferred: int = 0) -> Tensor:
    """Return the layers' output [T, D], computed one part after the other with experts
    on the host.
    """
    x = x.to(layers.place).clone()
    step, late = _Step(layers, num_deferred), None
    for module, experts in zip(layers.modules, layers.experts, strict=True):
        choice = step.choose_experts_(module, x)
        h, ids, weights = (part.tensor.cpu() for part in choice)
        now, later = step.split(ids, weights) if num_deferred else (ids, None)
        total = experts.forward(h, now, weights).float()
        total = total if late is None else total + late
        late = None if later is None else experts.forward(h, later, weights).float()
        if layers.shape.shared:
            step.run_shared_(choice)
        step.leave_sum_(Buffer(total.to(layers.place)))
    return x.cpu()


def measure_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference divided by the norm of ``wanted``."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


class Decode:
    """Decode steps of our implementation (``kernels.hybrid``).

    Args:
       layers: random layers.
       batch: tokens of a step.
       is_captured: True runs steps as captured graphs.
       num_deferred: deferred experts per token.
       is_uploading: True uploads some experts to the device.
       is_caching: True keeps uploaded experts on the device, in slots for half of a layer's
           experts.
    """

    def __init__(
        self,
        layers: Layers,
        batch: int,
        *,
        is_captured: bool = True,
        num_deferred: int = 0,
        is_uploading: bool = False,
        is_caching: bool = False,
    ) -> None:
        self.layers, self.num_deferred = layers, num_deferred
        shape, device = layers.shape, layers.device
        chance = torch.Generator().manual_seed(2)
        self.x = torch.randn(batch, shape.hidden, generator=chance).to(DTYPE)
        self._hidden = self.x.to(layers.place).clone()
        lane = None
        if is_uploading or is_caching:
            loads = [make_loads(experts, layers.pool, device) for experts in layers.experts]
            slots: list[ExpertSlots] = []
            if is_caching:
                count = shape.num_experts // 2
                slots = [
                    ExpertSlots(device, one.expert_bytes, count, MAX_UPLOADS, LruPolicy(count))
                    for one in loads
                ]
            lane = UploadLane(
                device, loads, LaneSplit(1e-3, 1e-3), max_uploads=MAX_UPLOADS, slots=slots
            )
        self._step = _Step(layers, num_deferred)
        self._decoder = HybridDecoder(
            device,
            layers.modules,
            layers.experts,
            (shape.hidden, shape.top_k),
            DTYPE,
            has_shared=[shape.shared > 0] * shape.num_layers,
            num_deferred=num_deferred,
            is_captured=is_captured,
            lane=lane,
        )

    def close(self) -> None:
        """End the thread that computes the experts."""
        self._decoder.close()

    def run(self) -> Tensor:
        """Run one decode step of ours; return its output."""
        self._hidden.copy_(self.x)
        routing = self._step if self.num_deferred else None
        self._decoder.run(self._step, routing, self._hidden)  # type: ignore[arg-type] - its own
        return self._hidden

    def check(self) -> str:
        """Compare two steps with the same layers computed one part after the other."""
        wanted = compute_plainly(self.layers, self.x, self.num_deferred)
        for _ in range(2):
            error = measure_error(self.run().cpu(), wanted)
            if not error < MAX_ERROR:
                return f"off by {error:.3f} of the norm"
        return "ok"


class Everything:
    """The rival with all experts on the device, in bfloat16; its decode step is captured as a
    graph.
    """

    def __init__(self, layers: Layers, x: Tensor) -> None:
        self._layers, self._x = layers, x
        self._hidden = x.to(layers.place).clone()
        device, self._memory = layers.device, layers.there
        self._stream = device.make_stream()
        self._graph: Graph = device.capture(
            self._stream, lambda: device.run(self._stream, self._compute, "step")
        )

    def _compute(self) -> None:
        layers, x = self._layers, self._hidden
        for number, memory in enumerate(self._memory):
            h, ids, weights = layers.choose(number, x)
            if layers.shape.shared:
                layers.add_shared(number, x, h)
            x.add_(_multiply_gathered(layers.shape, memory, h, ids, weights))

    def run(self) -> Tensor:
        """Run one decode step with all experts on the device; return its output."""
        self._hidden.copy_(self._x)
        self._layers.device.follow(self._stream)
        self._layers.device.launch(self._graph, self._stream)
        self._stream.synchronize()
        return self._hidden


def _multiply_gathered(
    shape: Shape, memory: Tensor, h: Tensor, ids: Tensor, shares: Tensor
) -> Tensor:
    """Return the experts' sum; the chosen weights are gathered in one copy, without reading ids on
    the host.
    """
    half = 2 * shape.inner * shape.hidden
    numbers = memory.view(DTYPE).view(-1, 3 * shape.inner * shape.hidden)
    chosen = numbers.index_select(0, ids.flatten())
    gate_up = chosen[:, :half].view(-1, 2 * shape.inner, shape.hidden)
    down = chosen[:, half:].view(-1, shape.hidden, shape.inner)
    x = h.repeat_interleave(shape.top_k, 0)[:, :, None]
    gate, up = torch.bmm(gate_up, x).chunk(2, 1)
    out = torch.bmm(down, torch.nn.functional.silu(gate) * up)[..., 0]
    return (out.view(*ids.shape, -1) * shares[..., None]).sum(1).to(h.dtype)


class Offload:
    """The rival with all experts in bfloat16 in host memory; the chosen ones of a layer are copied
    to the device before it.
    """

    def __init__(self, layers: Layers, x: Tensor) -> None:
        self._layers, self._x = layers, x
        self._hidden = x.to(layers.place).clone()
        shape, size = layers.shape, layers.unpacked[0].expert_bytes
        self._memory = layers.staged
        most = min(shape.num_experts, len(x) * shape.top_k)
        self._there = torch.empty(most, size, dtype=torch.uint8, device=layers.place)

    def run(self) -> Tensor:
        """Run one decode step, copying the chosen experts to the device; return its output."""
        layers, x, shape = self._layers, self._hidden, self._layers.shape
        x.copy_(self._x)
        for number, memory in enumerate(self._memory):
            h, ids, weights = layers.choose(number, x)
            chosen, places = torch.unique(ids.cpu(), return_inverse=True)
            for place, expert_id in enumerate(chosen.tolist()):
                self._there[place].copy_(memory[expert_id], non_blocking=True)
            if shape.shared:
                layers.add_shared(number, x, h)
            places = places.to(layers.place)
            x.add_(_multiply_gathered(shape, self._there.view(-1), h, places, weights))
        return x.cpu()


class Prompt:
    """A prefill step: experts are streamed to the device or computed on the host.

    Args:
       layers: random layers.
       num_tokens: tokens of the step.
    """

    def __init__(self, layers: Layers, num_tokens: int) -> None:
        self._layers = layers
        chance = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_tokens, layers.shape.hidden, generator=chance).to(DTYPE)
        loads = [make_loads(experts, layers.pool, layers.device) for experts in layers.experts]
        self._stream = ExpertStream(layers.device, loads)

    def close(self) -> None:
        """End the thread that streams experts."""
        self._stream.close()

    def run(self, *, is_streamed: bool = True) -> Tensor:
        """Run one prefill step, with experts streamed to the device or else computed on the host;
        return its output.
        """
        layers = self._layers
        x = self.x.to(layers.place).clone()
        for number, experts in enumerate(layers.experts):
            h, ids, weights = layers.choose(number, x)
            if layers.shape.shared:
                layers.add_shared(number, x, h)
            if is_streamed:
                total = self._stream.run(number, h, ids, weights)
            else:
                total = experts.forward(h.cpu(), ids.cpu(), weights.cpu()).to(layers.place)
            x.add_(total)
        return x.cpu()

    def check(self) -> str:
        """Compare the outputs of a prefill with streamed experts and with experts on the host;
        return ``ok`` or the error.
        """
        error = measure_error(self.run(), self.run(is_streamed=False))
        return "ok" if error < MAX_ERROR else f"off by {error:.3f} of the norm"


def count_calls(device: Device, work: Callable[[], object]) -> int:
    """Return the number of launches on the device while ``work`` runs; a graph counts as one."""
    counted = 0

    def count(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **kwargs: object) -> object:
            nonlocal counted
            counted += 1
            return call(*args, **kwargs)

        return counting

    for name in DEVICE_CALLS:
        setattr(device, name, count(getattr(device, name)))
    try:
        work()
    finally:
        for name in DEVICE_CALLS:
            delattr(device, name)
    return counted


def describe_step(decode: Decode) -> str:
    """Return text about a decode step that has run before: its launches on the device, and the
    host's share of its time.
    """
    layers, host_s = decode.layers, 0.0
    run = NativeExperts.run

    def time_host(self: NativeExperts, *given: Buffer) -> None:
        nonlocal host_s
        host_s += time_call(partial(run, self, *given))

    decode.run()
    calls = count_calls(layers.device, decode.run)
    for experts in layers.experts:
        # Assigning to the instance shadows the method `run`, so that the host's time can be
        # measured.
        experts.run = partial(time_host, experts)  # type: ignore[method-assign] - removed below
    try:
        step_s = time_call(decode.run)
    finally:
        for experts in layers.experts:
            del experts.run
    return f"{calls} launches, host busy {host_s / step_s:.2f}"


def make_cases(*, quick: bool = False, device: Device | None = None) -> Iterator[BenchCase]:
    """Yield the cases.

    Args:
       quick: only one shape, one format and one batch.
       device: device to run on; None takes the GPU, or the fake device if there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if device is None:
        device = open_device("cuda:0") if has_gpu else FakeDevice()
    is_fake = isinstance(device, FakeDevice)
    shapes = (TINY,) if is_fake else SHAPES
    formats = TINY_FORMATS if is_fake else FORMATS
    if quick:
        shapes, formats = shapes[:1], formats[-1:]
    for shape, format_name in itertools.product(shapes, formats):
        layers = Layers(device, shape, format_name)
        words = f"shape={shape.name} format={format_name} device={'fake' if is_fake else 'gpu'}"
        for batch in shape.batches[:1] if quick else shape.batches:
            yield from _list_decodes(layers, batch, f"{words} batch={batch}")
        for num_tokens in shape.prompts[:1] if quick else shape.prompts:
            prompt = Prompt(layers, num_tokens)
            yield BenchCase(
                f"{words} prompt={num_tokens} experts=streamed",
                "s",
                partial(time_call, prompt.run),
                prompt.check,
                baseline=partial(time_call, partial(prompt.run, is_streamed=False)),
                baseline_name="on the host",
            )
            prompt.close()
    if is_fake:
        device.close()


def _list_decodes(layers: Layers, batch: int, words: str) -> Iterator[BenchCase]:
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(batch, layers.shape.hidden, generator=chance).to(DTYPE)
    rivals: dict[str, Callable[[], Tensor]] = {
        "all on the device": Everything(layers, x).run,
        "torch offload": Offload(layers, x).run,
    }
    kinds: list[tuple[str, dict[str, bool | int]]] = [
        ("graph=on", {}),
        ("graph=off", {"is_captured": False}),
        ("graph=on experts=uploaded", {"is_uploading": True}),
        ("graph=on experts=cached", {"is_caching": True}),
    ]
    kinds += [
        (f"graph=on deferred={count}", {"num_deferred": count})
        for count in (2, 4)
        if count <= layers.shape.top_k
    ]
    for kind, settings in kinds:
        decode = Decode(layers, batch, **settings)  # type: ignore[arg-type] - flags and a count
        yield BenchCase(
            f"{words} {kind}",
            "s",
            partial(time_call, decode.run),
            partial(_check, decode, rivals),
            rivals={name: partial(time_call, run) for name, run in rivals.items()},
        )
        decode.close()


def _check(decode: Decode, rivals: dict[str, Callable[[], Tensor]]) -> str:
    """Compare ours and the rivals, which defer nothing, with the layers computed one part after the
    other.
    """
    wanted = compute_plainly(decode.layers, decode.x)
    for name, run in rivals.items():
        error = measure_error(run().cpu(), wanted)
        if not error < MAX_ERROR:
            return f"{name}: off by {error:.3f} of the norm"
    return decode.check()
