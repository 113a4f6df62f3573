"""Goal: a decode of torch's operators on a device is one graph, which equals the same queued.

Method: a device whose capture keeps what a GPU's does: each operator with its tensors, at their
places, and nothing of Python. A launch repeats the operators on those places. So a step that looks
at a value, or whose memory moves, gives other tokens. No GPU; all memory is the host's.
"""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")


from hybrid import (  # noqa: E402 - after the skip
    save_hybrid,
    save_kimi_delta,
    save_short_convolutions,
)
from random_adapter import write_adapter  # noqa: E402

from tandem.core.adapter import AdapterSource  # noqa: E402
from tandem.core.clock import MonotonicClock  # noqa: E402
from tandem.core.wire import AddRequest, SamplingParams  # noqa: E402
from tandem.engine import planning  # noqa: E402
from tandem.engine.adapters import AdapterTable  # noqa: E402
from tandem.engine.build import build_engine  # noqa: E402
from tandem.engine.config import EngineConfig  # noqa: E402
from tandem.kernels.cpu.device import CpuDevice  # noqa: E402
from tandem.kernels.fake.tape import TapeDevice  # noqa: E402
from tandem.models.adapter_files import read_adapter_ranks  # noqa: E402
from tandem.models.adapter_plan import count_adapter_bytes  # noqa: E402
from tandem.models.config import ModelConfig  # noqa: E402
from tandem.models.loading import loader  # noqa: E402
from tandem.placement.experts.cache import LruPolicy  # noqa: E402

PROMPTS = [[(7 * i * i + 3) % 120 + 3 for i in range(n)] for n in (20, 9, 33)]
LENGTHS = (12, 4, 8)


@pytest.fixture
def device(monkeypatch):
    made = TapeDevice()
    for module in (planning, loader):
        monkeypatch.setattr(module, "open_device", lambda _name: made)
    return made


class Turns:
    """A split that goes through all numbers of uploads, whatever the times."""

    def __init__(self):
        self.num_chosen = 0

    def choose(self, num_missed):
        self.num_chosen += 1
        return num_missed * (self.num_chosen % 3) // 2

    def note(self, *times):
        pass


def build(path="demo", *, is_captured, deferred=0, is_uploading=False, num_slots=0):
    config = EngineConfig(kv_cache_gib=0.004, block_size=16, max_batch_tokens=64)
    model = ModelConfig(
        path=str(path),
        device="cuda",
        dtype="float32",
        packed_cache="off",
        proof="off",
        deferred_experts=deferred,
    )
    built = build_engine(model, config, MonotonicClock())
    built.model._hybrid.close()
    built.model.enable_hybrid(
        built.model.context.device,
        is_captured=is_captured,
        split=Turns() if is_uploading else None,
        num_slots=num_slots,
        make_policy=partial(LruPolicy, num_slots),
    )
    # Queued anew, the same step in the same memory.
    built.model._fixed = {}
    return built


def generate(built, lengths=LENGTHS, adapters=("", "", "")):
    """Tokens of each prompt; batches shrink as requests end."""
    engine = built.engine
    for i, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)
        request = AddRequest(
            request_id=str(i), prompt_ids=prompt, sampling=sampling, adapter=adapters[i]
        )
        engine.add(request)
    found = [[] for _ in PROMPTS]
    for _ in range(500):
        if not engine.has_requests:
            break
        for output in engine.step():
            assert output.error_text is None, output.error_text
            found[int(output.request_id)] += zip(
                output.token_ids, output.logprobs or (), strict=False
            )
    return found


def tell_tokens(found):
    return [[token for token, _ in sequence] for sequence in found]


@pytest.mark.parametrize(
    ("deferred", "is_uploading", "num_slots"),
    [
        # Graphs without uploads are those of states and adapters, below.
        pytest.param(0, False, 0, marks=pytest.mark.slow),
        pytest.param(1, False, 0, marks=pytest.mark.slow),
        pytest.param(1, True, 0, marks=pytest.mark.slow),
        # One token's experts are gathered from the places, those of two multiplied in them.
        (0, True, 3),
    ],
)
def test_captured_equals_queued(device, deferred, is_uploading, num_slots):
    launched = []
    launch = CpuDevice.launch

    def note(self, graph, stream):
        launched.append(graph)
        launch(self, graph, stream)

    device.launch = partial(note, device)
    # Steps that bring memory of their own: other sums, the same tokens.
    built = build(is_captured=False, deferred=deferred)
    built.model._fixed = None
    plain = generate(built)
    kind = {"deferred": deferred, "is_uploading": is_uploading, "num_slots": num_slots}
    queued, captured = (build(is_captured=flag, **kind) for flag in (False, True))
    for _ in range(2):
        # The second time with the prefixes that the first has left.
        wanted = generate(queued)
        assert generate(captured) == wanted
        assert tell_tokens(wanted) == tell_tokens(plain)
    # A graph for each number of tokens, of blocks and of uploads, launched at most of the steps.
    fixed = captured.model._fixed
    assert {size for size, _ in fixed} == {1, 2, 4}
    num_graphs = len(set(map(id, launched)))
    assert num_graphs > len(fixed) if is_uploading else num_graphs == len(fixed) > 3
    assert len(launched) > 2 * (max(LENGTHS) - 2)


@pytest.mark.slow  # Those of Kimi's delta rule are in the graphs with adapters, below.
@pytest.mark.parametrize("save", [save_hybrid, save_kimi_delta, save_short_convolutions])
def test_states_are_updated_in_a_graph(device, tmp_path, save):
    """Slots are numbers in fixed memory; padding rows write the first token's state again."""
    plain, queued, captured = (
        build(save(tmp_path), is_captured=flag) for flag in (False, False, True)
    )
    plain.model._fixed = None
    wanted = generate(queued)
    assert generate(captured) == wanted
    # One sequence after the other, in other operators: other sums, the same tokens.
    assert tell_tokens(wanted) == tell_tokens(generate(plain))
    fixed = captured.model._fixed
    assert {size for size, _ in fixed} == {1, 2, 4}
    assert all(one.states is not None for one in fixed.values())


def is_apart(some, others):
    """True if two answers to one prompt differ by more than rounding, in tokens or in the
    log-probability of one, as a few tokens may be equal by chance.
    """
    return any(
        token != other or abs(kept.logprob - found.logprob) > 0.01
        for (token, kept), (other, found) in zip(some, others, strict=True)
    )


def list_layouts(built):
    """Layouts of the adapters' memory that graphs were captured with; 0: steps without adapters."""
    return {layout for _, (_, layout) in built.model._hybrid._batches}


def count_held(built):
    """Bytes of the LoRA factors that torch's operators have, shared memory counted once."""
    tensors = []
    for matrix in built.model.adapters._step.matrices:
        for parts in matrix._parts.values():
            tensors += [tensor for part in parts for tensor in (part.a_RK, part.b_NR)]
        if matrix._factors is not None:
            factors = matrix._factors
            tensors += [factors._a_PHRK, factors._b_PHRN, factors._scale_PHR]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_adapters(device, folder, path):
    """One graph for all adapters of a batch; a larger rank moves memory, and graphs are made anew.

    Slots are given again to other adapters, whose factors take the places of the former ones. No
    factor is held twice, and what is held is what a plan counts.
    """
    plain, queued, captured = (build(path, is_captured=flag) for flag in (False, False, True))
    plain.model._fixed = None
    tables = [
        AdapterTable(built.model.enable_adapters(2), built.engine, built.identity, None)
        for built in (plain, queued, captured)
    ]
    digests = {}
    for seed, (name, rank) in enumerate((("one", 2), ("two", 4), ("three", 3), ("wide", 9))):
        write_adapter(tables[0], folder / name, seed, rank=rank)

    def find(name):
        return AdapterSource(name=name, folder=str(folder / name))

    def load(name):
        (digests[name],) = {table.load(find(name)).digest for table in tables}

    def check_bytes():
        ranks = [read_adapter_ranks(folder / name) for name in ("one", "two")]
        for built in (plain, queued, captured):
            is_captured = built is not plain
            planned = count_adapter_bytes(built.model.plan, ranks, is_captured=is_captured)
            assert count_held(built) == planned

    def unload(name):
        for table in tables:
            table.unload(digests[name])

    def check(*names, and_plain=False):
        adapters = [digests.get(name, "") for name in names]
        wanted, got = (generate(built, (3, 4, 4), adapters) for built in (queued, captured))
        assert got == wanted
        if and_plain:
            assert tell_tokens(got) == tell_tokens(generate(plain, (3, 4, 4), adapters))
        return got

    for table in tables:
        infos, failures = table.load_first([find("one"), find("two")])
        assert not failures
        digests |= {info.name: info.digest for info in infos}
    check_bytes()
    first = check("one", "two", "one", and_plain=True)
    check_bytes()
    known = list_layouts(captured)
    # Which adapters a batch has, and in what order, is no matter of a graph.
    other = check("", "one", "two", and_plain=True)
    assert list_layouts(captured) == known
    assert all(is_apart(a, b) for a, b in zip(first, other, strict=True)), "adapters change nothing"
    unload("one")
    load("three")
    third = check("three", "two", "")[0]
    assert is_apart(third, first[0]), "the factors of the slot's former adapter"
    assert is_apart(third, other[0]), "the new adapter changes nothing"
    unload("two")
    load("wide")
    check("three", "wide", "", and_plain=True)
    (layout,) = list_layouts(captured) - {0}
    assert layout not in known, "graphs of memory that has moved are kept"


@pytest.mark.slow
def test_adapters_are_captured(device, tmp_path):
    check_adapters(device, tmp_path, "demo")


def test_adapters_of_latents_and_states_are_captured(device, tmp_path):
    (tmp_path / "adapters").mkdir()
    check_adapters(device, tmp_path / "adapters", save_kimi_delta(tmp_path))


def test_a_value_that_is_looked_at_ends_the_capture(device):
    stream, there = device.make_stream(), device.allocate(64)
    with pytest.raises(Exception, match="looks at a value"):
        device.capture(stream, lambda: device.run(stream, lambda: there[0].item()))


def test_what_python_does_is_not_repeated(device):
    """Not vacuous: a step that counts in Python gives what it counted when it was captured."""
    stream, there, counted = device.make_stream(), device.allocate(8), []

    def work():
        counted.append(1)
        there.copy_(torch.full_like(there, len(counted)) + there)

    graph = device.capture(stream, lambda: device.run(stream, work))
    for _ in range(2):
        device.launch(graph, stream)
    assert (len(counted), there.tolist()) == (1, [2] * 8)
