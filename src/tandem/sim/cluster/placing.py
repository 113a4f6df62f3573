"""Placement of requests: the product's conductor, fed by the simulated instances.

Only this module uses the conductor's interface. Blocks and steps are reported as they happen, and
loads when a decision is made, so that the conductor's view is never stale.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from tandem.conductor.admission import Admission, AdmissionMode
from tandem.conductor.conductor import Conductor, Decision
from tandem.conductor.directory import Chain
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.prediction import predict_row_tpot
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
    """Reports one instance's prefix cache to the conductor (which chooses instances for requests)
    without delay; an ``IndexObserver``.
    """

    def __init__(self, conductor: Conductor, name: str) -> None:
        self._conductor, self._name = conductor, name

    def note_stored(self, node: PrefixNode) -> None:
        """Report to the conductor a block that was added to the instance's prefix index."""
        assert node.key is not None, "a partial block has no key"
        self._conductor.note_blocks(self._name, [cut_key(node.key)])

    def note_removed(self, key: bytes) -> None:
        """Report to the conductor a block that was removed from the instance's prefix index."""
        self._conductor.note_blocks(self._name, removed=[cut_key(key)])

    def note_cleared(self) -> None:
        """Report to the conductor that the instance's prefix index was cleared."""
        self._conductor.note_flushed(self._name)

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Report to the conductor the block of a prefix after which the instance keeps a copy of
        the model's recurrent state.
        """
        self._conductor.note_group(self._name, [cut_key(snapshot.parent_key)])

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Report to the conductor the block of a prefix after which the instance no longer keeps a
        copy of the model's recurrent state.
        """
        self._conductor.note_group(self._name, removed=[cut_key(snapshot.parent_key)])

    def note_window_kept(self, node: PrefixNode) -> None:
        """Report to the conductor a block up to which the KV of the sliding window is cached."""
        assert node.key is not None, "a partial block has no key"
        self._conductor.note_group(self._name, [cut_key(node.key)])

    def note_window_removed(self, key: bytes) -> None:
        """Report to the conductor a block up to which the KV of the sliding window is no longer
        cached.
        """
        self._conductor.note_group(self._name, removed=[cut_key(key)])

    def note_step(self, step: StepRecord) -> None:
        """Report a completed step of the instance to the conductor, which learns the costs of
        steps.
        """
        self._conductor.note_steps(self._name, [step])


class Placing:
    """Asks a conductor (the product's router) to which instances requests go.

    Args:
       name: name of the policy, as in ``cluster.policy``.
       instances: instances of the run.
       admission: mode of admission.
       slo: objectives by which requests are admitted.
       conductor: a conductor that knows no instances yet; None makes one with the policy.
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
                each.group_depth,
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
        """Tell the conductor that every decode instance can read KV blocks of every prefill
        instance.
        """
        prefills = [each.name for each in self._instances if each.role == "prefill"]
        for each in self._instances:
            if each.role == "decode":
                self.conductor.set_sources(each.name, prefills)

    def balance(self, now_s: float) -> RoleChange | None:
        """Change the role of an instance if that is due; return the change.

        Args:
           now_s: time of the run.
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
        """Return the instances for a request, or the reason why it is rejected.

        Args:
           place: the action of the request's state machine.
           request: the request as it arrived.
           keys: keys of its prompt's full blocks.
           now_s: time of the run.
           is_new: True if the request has not been admitted before.
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
        """Return True if a request is rejected after its prefill, by the decode instance's
        predicted TPOT.
        """
        if self._late_tpot_s is None:
            return False
        self._tell_load(self._by_name[name])
        fleet = self.conductor.fleet
        row = fleet.find(name)
        assert row is not None, name
        # The request is already part of the instance's load, so the prediction adds no further
        # tokens.
        tpot_s = predict_row_tpot(fleet, row, 0, request.sampling.max_tokens)
        return tpot_s > self._late_tpot_s

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
