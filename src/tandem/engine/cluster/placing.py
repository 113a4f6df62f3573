"""The dispatcher's connection to the conductor: it reports instances and builds questions from
requests.

Owns the conductor and the facts already reported about each instance. All code runs on one event
loop.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.conductor.conductor import Candidate, Conductor, Decision
from tandem.conductor.directory import Chain
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.load_count import LoadCount
from tandem.conductor.policies.policy import Question
from tandem.conductor.routes import InstanceRef, Place
from tandem.core.instance_status import InstanceRole
from tandem.core.spec import make_root_key
from tandem.core.timeline import ConsideredInstance
from tandem.core.wire import AddRequest, BlockChanges, InstanceInfo, StepRecord
from tandem.engine.groups.chain import TOKEN_BYTES, hash_block, pack_tokens
from tandem.engine.process.inventory import cut_key

__all__ = ["Placing", "PlacingPort", "add_expected", "describe_candidate"]


class PlacingPort(Protocol):
    """An instance as seen by placement; see ``tandem.engine.cluster.dispatcher.Port``."""

    @property
    def ref(self) -> InstanceRef:
        """Name and run (one process between two restarts) of the instance."""
        ...

    @property
    def role(self) -> InstanceRole:
        """Role of the instance: prefill, decode or unified."""
        ...

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the instance that runs; None while it does not serve."""
        ...

    @property
    def load(self) -> LoadCount:
        """The load of the instance's present process; read only while it serves."""
        ...

    @property
    def sources(self) -> frozenset[str]:
        """Names of the prefill instances whose KV blocks this instance can read now."""
        ...


class _Listener:
    """The receiver of one instance's reports (load, steps, cached blocks) during one run of its
    process, which passes them on to the conductor (the chooser of instances).
    """

    def __init__(self, conductor: Conductor, port: PlacingPort, info: InstanceInfo) -> None:
        self._conductor, self._name = conductor, port.ref.name
        self._load, self._info = port.load, info

    def note_load(self) -> None:
        """Tell the conductor the instance's load and its speed of loading KV."""
        load = self._load.estimate(self._info)
        self._conductor.set_load_speed(self._name, load.load_tokens_per_s)
        self._conductor.set_load(
            self._name,
            Load(
                queued_tokens=load.queued_tokens,
                queued_context=load.queued_context,
                num_decoding=load.num_decoding,
                decode_tokens=load.decode_tokens,
                num_requests=load.num_requests,
                used_blocks=self._info.num_blocks - load.free_blocks,
                largest_blocks=load.largest_blocks,
            ),
        )

    def note_steps(self, steps: Sequence[StepRecord]) -> None:
        """Report steps that the instance has computed to the conductor."""
        self._conductor.note_steps(self._name, steps)

    def note_blocks(self, blocks: BlockChanges) -> None:
        """Report changes of the instance's cached blocks to the conductor."""
        if blocks.is_reset:
            self._conductor.note_flushed(self._name)
        self._conductor.note_blocks(self._name, blocks.stored, blocks.removed)
        self._conductor.note_group(self._name, blocks.group_stored, blocks.group_removed)
        self._conductor.note_in_store(blocks.in_store, blocks.lost_in_store)


class Placing:
    """A server's reports on its instances to its conductor (which chooses among them), kept
    current, and the requests that it asks the conductor to place.

    Args:
        conductor: chooses instances; it must not know of any instance yet.
    """

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self._runs: dict[str, InstanceRef] = {}
        """Runs of instances that the conductor counts as serving, by instance name."""
        self._listeners: dict[str, LoadCount] = {}
        self._block_sizes: dict[str, int] = {}
        """Block sizes in tokens, by KV identity, of all instances that serve or have served."""

    @property
    def num_serving(self) -> int:
        """Number of instances that serve."""
        return len(self._runs)

    def sync(self, port: PlacingPort) -> None:
        """Report to the conductor (the chooser of instances) what has changed at an instance: its
        role, the start or end of its process, and whose KV it can read. O(1) without changes.
        """
        conductor, ref, info = self.conductor, port.ref, port.info
        name = ref.name
        row = conductor.fleet.find(name)
        if row is None:
            conductor.join(name, port.role)
        elif conductor.fleet.role_of(row) != port.role:
            conductor.set_role(name, port.role)
        known = self._runs.get(name)
        if known is not None and (info is None or known != ref):
            self._stop(name)
            known = None
        if info is None:
            return
        if known is None:
            self._serve(port, ref, info)
        conductor.set_sources(name, port.sources)

    def serves(self, identity: str) -> bool:
        """Return True if an instance that serves computes KV with this identity."""
        return any(ref.identity == identity for ref in self._runs.values())

    def forget(self, name: str) -> None:
        """Make the conductor forget an instance that has left the cluster."""
        if name in self._runs:
            self._stop(name)
        if self.conductor.fleet.find(name) is not None:
            self.conductor.leave(name)

    def _serve(self, port: PlacingPort, ref: InstanceRef, info: InstanceInfo) -> None:
        facts = InstanceFacts(
            info.num_blocks,
            info.block_size,
            info.max_model_len,
            info.max_batch_tokens,
            info.group_depth,
        )
        self.conductor.serve(ref, facts)
        self._runs[ref.name] = ref
        self._block_sizes[ref.identity] = info.block_size
        listener = _Listener(self.conductor, port, info)
        self._listeners[ref.name] = port.load
        port.load.listener = listener
        listener.note_load()

    def _stop(self, name: str) -> None:
        del self._runs[name]
        self._listeners.pop(name).listener = None
        self.conductor.stop(name)

    def describe(self, request: AddRequest) -> Question:
        """Return the question that asks the conductor where to run a request.

        Cost: a SHA-256 of each block of the prompt for each KV identity that serves; nothing if
        there is only one instance to choose, and no time is predicted for admission.
        """
        identities: set[str] = set()
        if len(self._runs) > 1 or self.conductor.admission.judges(request.slo):
            identities = {ref.identity for ref in self._runs.values()}
        return Question(
            request_id=request.request_id,
            prompt_len=len(request.prompt_ids),
            max_tokens=request.sampling.max_tokens,
            chains=[
                _make_chain(request, identity, self._block_sizes[identity])
                for identity in sorted(identities)
            ],
            client=request.client,
            weight=request.weight,
            priority=request.priority,
            slo=request.slo,
        )

    def place(self, place: Place, question: Question, now_s: float, *, is_new: bool) -> Decision:
        """Ask the conductor which instances are to serve a request; see ``Conductor.place``."""
        return self.conductor.place(place, question, now_s, is_new=is_new)


def describe_candidate(candidate: Candidate) -> ConsideredInstance:
    """Return the entry of a request's timeline for an instance that the conductor compared."""
    return ConsideredInstance(
        instance=candidate.instance,
        prefix_tokens=candidate.prefix_len,
        transfer_s=candidate.transfer_s,
        queue_s=candidate.queue_s,
        prefill_s=candidate.prefill_s,
        ttft_s=candidate.ttft_s,
    )


def add_expected(request: AddRequest, instance: str, decision: Decision | None) -> AddRequest:
    """Return a copy of a request with the prefix length that the conductor believes the instance
    has cached.

    Args:
        request: about to be sent; not modified.
        instance: name of the instance to which the request is sent.
        decision: the last placement decision for the request; None if there was none.
    """
    chosen = None if decision is None else decision.chosen
    if chosen is None or chosen.instance != instance or not chosen.prefix_len:
        return request
    return msgspec.structs.replace(request, expected_len=chosen.prefix_len)


def _make_chain(request: AddRequest, identity: str, block_size: int) -> Chain:
    """Return the truncated keys of a prompt's blocks, as instances with a KV identity compute them.

    Only instances know the KV identity of a LoRA adapter. For a request with an adapter the keys
    are therefore made here from the adapter's digest: they match earlier requests that this process
    sent, but not the blocks that instances report.
    """
    digest = bytes.fromhex(identity)
    if request.adapter:
        digest = hashlib.sha256(digest + request.adapter.encode()).digest()
    parent = make_root_key(digest, request.cache_salt)
    keys: list[int] = []
    # A block that ends with the last token is left out: that token is always computed.
    num_blocks = (len(request.prompt_ids) - 1) // block_size
    tokens, size = pack_tokens(request.prompt_ids), block_size * TOKEN_BYTES
    for start in range(0, num_blocks * size, size):
        parent = hash_block(parent, tokens[start : start + size])
        keys.append(cut_key(parent))
    return Chain(keys, block_size)
