"""The way of a request: the product's conductor, told of the simulated instances.

The one module that knows the shape of the conductor. Blocks and steps are told as they happen, and
loads at the moment of a decision: as if every instance had just told its own.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from tandem.conductor.admission import Admission, AdmissionMode
from tandem.conductor.conductor import Conductor, Decision
from tandem.conductor.directory import Chain
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.prediction import predict_tpot
from tandem.conductor.role_balance import RoleChange
from tandem.conductor.routes import InstanceRef, Place
from tandem.core.wire import NO_SLO, AddRequest, Slo, StepRecord
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.process.inventory import cut_key
from tandem.engine.scheduling.prefix_index import PrefixNode
from tandem.sim.cluster.instance import SimInstance

__all__ = ["Placing"]

IDENTITY = "simulated"


class _Teller:
    """Tells the conductor of one instance at once; an ``IndexObserver``."""

    def __init__(self, conductor: Conductor, name: str) -> None:
        self._conductor, self._name = conductor, name

    def note_stored(self, node: PrefixNode) -> None:
        """See ``IndexObserver``."""
        assert node.key is not None, "a partial block has no key"
        self._conductor.note_blocks(self._name, [cut_key(node.key)])

    def note_removed(self, key: bytes) -> None:
        """See ``IndexObserver``."""
        self._conductor.note_blocks(self._name, removed=[cut_key(key)])

    def note_cleared(self) -> None:
        """See ``IndexObserver``."""
        self._conductor.note_flushed(self._name)

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Tell the block that a state follows."""
        self._conductor.note_group(self._name, [cut_key(snapshot.parent_key)])

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Tell the block that no state follows any more."""
        self._conductor.note_group(self._name, removed=[cut_key(snapshot.parent_key)])

    def note_window_kept(self, node: PrefixNode) -> None:
        """Tell a block whose window is there."""
        assert node.key is not None, "a partial block has no key"
        self._conductor.note_group(self._name, [cut_key(node.key)])

    def note_window_removed(self, key: bytes) -> None:
        """Tell a block whose window is gone."""
        self._conductor.note_group(self._name, removed=[cut_key(key)])

    def note_step(self, step: StepRecord) -> None:
        """Take in a step."""
        self._conductor.note_steps(self._name, [step])


class Placing:
    """Asks a conductor.

    Args:
        name: of its policy, as ``cluster.policy``.
        instances: of the run.
        admission: how requests are accepted.
        slo: by which they are.
        conductor: that knows of nothing yet; None: a new one of that policy.
    """

    def __init__(
        self,
        name: str,
        instances: Iterable[SimInstance],
        admission: AdmissionMode | Literal["late"] = "none",
        slo: Slo = NO_SLO,
        conductor: Conductor | None = None,
    ) -> None:
        self._slo, self._late_tpot_s = slo, None
        if admission == "late":
            self._slo, self._late_tpot_s = Slo(ttft_s=slo.ttft_s), slo.tpot_s
            admission = "early"
        if conductor is None:
            conductor = Conductor(make_policy(name), Admission(admission))
        self.conductor = conductor
        self._instances = list(instances)
        self._by_name = {each.name: each for each in self._instances}
        for each in self._instances:
            config = each.setup.engine
            facts = InstanceFacts(
                config.num_kv_blocks,
                config.block_size,
                config.max_model_len,
                config.step_tokens,
            )
            self.conductor.join(each.name, each.role)
            self.conductor.serve(InstanceRef(each.name, 0, IDENTITY), facts)
            teller = _Teller(self.conductor, each.name)
            each.index.observers.append(teller)
            each.on_step = teller.note_step
        stores = {id(each.store): each.store for each in self._instances}
        for store in stores.values():
            if store is not None:
                store.on_change = self._note_in_store
        self._link()

    def _link(self) -> None:
        """Let every decode instance read every prefill instance."""
        prefills = [each.name for each in self._instances if each.role == "prefill"]
        for each in self._instances:
            if each.role == "decode":
                self.conductor.set_sources(each.name, prefills)

    def balance(self, now_s: float) -> RoleChange | None:
        """Let an instance change its role if that is due; return the change.

        Args:
            now_s: of the run.
        """
        for each in self._instances:
            self._tell_load(each)
        change = self.conductor.find_role_change(now_s)
        if change is not None:
            self._by_name[change.instance].role = change.role
            self.conductor.set_role(change.instance, change.role)
            self._link()
        return change

    def decide(
        self,
        place: Place,
        request: AddRequest,
        keys: Sequence[bytes],
        now_s: float,
        *,
        is_new: bool,
    ) -> Decision:
        """Return where a request goes, or why it is not accepted.

        Args:
            place: of the request's machine.
            request: as it arrived.
            keys: of its prompt's full blocks.
            now_s: of the run.
            is_new: it has not been accepted yet.
        """
        size = self._instances[0].setup.engine.block_size
        for each in self._instances:
            self._tell_load(each)
        question = Question(
            request.request_id,
            len(request.prompt_ids),
            request.sampling.max_tokens,
            [Chain([cut_key(key) for key in keys], size)],
            slo=self._slo,
        )
        return self.conductor.place(place, question, now_s, is_new=is_new)

    def is_refused_late(self, name: str, request: AddRequest) -> bool:
        """Return whether a request is refused after its prefill, where it would decode."""
        if self._late_tpot_s is None:
            return False
        self._tell_load(self._by_name[name])
        fleet = self.conductor.fleet
        row = fleet.find(name)
        assert row is not None, name
        rows = slice(row, row + 1)
        # The request is already part of the instance's load, so the prediction adds no further
        # tokens.
        tpot_s = predict_tpot(fleet, rows, 0, request.sampling.max_tokens)
        return float(tpot_s[0]) > self._late_tpot_s

    def _note_in_store(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.conductor.note_in_store(map(cut_key, stored), map(cut_key, removed))

    def _tell_load(self, instance: SimInstance) -> None:
        if not instance.is_load_new:
            return
        instance.is_load_new = False
        load = instance.measure_load()
        if instance.tiers is not None:
            speed = instance.tiers.read_load_speed()
            self.conductor.set_load_speed(instance.name, speed)
        self.conductor.set_load(
            instance.name,
            Load(
                queued_tokens=load.queued_tokens,
                queued_context=load.queued_context,
                num_decoding=load.num_decoding,
                decode_tokens=load.decode_tokens,
                num_requests=load.num_requests,
                used_blocks=instance.setup.engine.num_kv_blocks - load.free_blocks,
                largest_blocks=load.largest_blocks,
            ),
        )
