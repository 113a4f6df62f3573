"""A cluster on Ray: an actor for each process, in a placement group with a resource for each role.

Ray starts, places and restarts the actors; if a machine is lost, its actors restart on another that
has the resource of their role. Actors take and return plain strings, so that no object of Tandem is
pickled. Whoever reaches Ray's ports and has its token can run code: the ports are bound to the
interface that is named, and the token is derived from the cluster's secret.
"""

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from tandem.core.config import set_library_variables
from tandem.core.errors import DeadlineError
from tandem.core.loop_calls import LoopThread
from tandem.engine.launching.trust import derive_ray_token
from tandem.integrations.deploying.processes import (
    PORTS_PER_LAUNCHER,
    Addresses,
    ProcessPlan,
    plan_groups,
    plan_servers,
    plan_store,
)
from tandem.integrations.deploying.runner import ProcessRunner
from tandem.integrations.deploying.spec import ClusterSpec, Resources
from tandem.rpc import read_secret

__all__ = ["ProcessActor", "RayCluster", "list_role_resources", "plan_ray", "set_ray_token"]

logger = logging.getLogger(__name__)

NODE = "$(NODE_IP)"
"""A variable in arguments that the actor replaces by its machine's address."""
PLACE_TIMEOUT_S = 120.0
LOOK_S = 0.5
CALL_TIMEOUT_S = 10.0
END_TIMEOUT_S = 60.0


def plan_ray(spec: ClusterSpec, hosts: Sequence[str]) -> list[ProcessPlan]:
    """Return the processes of a cluster on the machines of a Ray cluster.

    Each launcher has its own ports, so that servers find it on whatever machine it restarts.

    Args:
        spec: describes the cluster.
        hosts: addresses of the machines.
    """
    num_launchers = sum(group.launchers for group in spec.groups)
    ports = [spec.port + PORTS_PER_LAUNCHER * number for number in range(num_launchers)]
    store = spec.store
    addresses = Addresses(
        launchers=[f"tcp://{host}:{port}" for port in ports for host in hosts],
        store="" if store is None else ",".join(f"tcp://{host}:{store.port}" for host in hosts),
        store_listen="" if store is None else f"tcp://{NODE}:{store.port}",
        data_host=NODE,
    )
    plans = plan_store(spec, addresses)
    plans += plan_groups(
        spec,
        addresses,
        lambda _, number: f"tcp://{NODE}:{ports[number]}",
        lambda group, index: f"{group.name}-{index}" if group.launchers > 1 else group.name,
    )
    return [*plans, *plan_servers(spec, addresses, spec.servers.host)]


def list_role_resources(spec: ClusterSpec) -> list[str]:
    """Return the names of the custom Ray resources that mark the machines on which processes of a
    role (prefill, decode, unified, server or store) may run.
    """
    names = {f"tandem_{group.role}" for group in spec.groups} | {"tandem_server"}
    return sorted(names | ({"tandem_store"} if spec.store is not None else set()))


def set_ray_token(secret_file: Path, folder: Path) -> None:
    """Configure token authentication for the Ray processes that this process starts.

    Args:
        secret_file: file of the cluster's secret.
        folder: folder of mode 0700, for the file of the token.
    """
    file = folder / "ray_token"
    file.touch(mode=0o600)
    file.write_text(derive_ray_token(read_secret(secret_file)))
    set_library_variables({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)})


class ProcessActor:
    """One process of a cluster, restarted when it ends; ``RayCluster`` makes it a Ray actor.

    Args:
        plan: a ``ProcessPlan`` as JSON.
        drain_s: seconds for the drain, as text.
        secret_file: path of the cluster's secret on the actor's machine.
    """

    def __init__(self, plan: str, drain_s: str, secret_file: str) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self._node = ray.util.get_node_ip_address()
        told = msgspec.json.decode(plan, type=ProcessPlan)
        arguments = tuple(each.replace(NODE, self._node) for each in told.arguments)
        self._plan = msgspec.structs.replace(told, arguments=arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-actor-"))
        self._loop = LoopThread("processes")
        self._runner = ProcessRunner(
            [self._plan],
            self._folder,
            float(drain_s),
            secret_file=Path(secret_file),
            # Do not limit failed starts: ports may still be in use by the previous process, which
            # is ending.
            max_failed_starts=None,
        )
        self._loop.run(self._runner.__aenter__())

    def describe(self) -> str:
        """Return, as JSON, the machine and the process id of the actor's process, and its first
        line once it is up.
        """
        said = self._runner.list_up().get(self._plan.name)
        pid = self._runner.list_pids().get(self._plan.name)
        values = {"name": self._plan.name, "node": self._node, "pid": pid, "up": said}
        return msgspec.json.encode(values).decode()

    def end(self) -> str:
        """End the actor's process, after the drain of its requests; return its name."""
        self._loop.run(self._runner.__aexit__())
        self._loop.close(CALL_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._plan.name


class RayCluster:
    """The actors of a cluster. A context manager: entering places them, leaving ends them.

    REQUIRES: ``ray.init`` was called.

    Args:
        spec: describes the cluster.
        secret_file: path of the cluster's secret, the same on each machine.
    """

    def __init__(self, spec: ClusterSpec, secret_file: Path) -> None:
        self._spec = spec
        self._secret_file = secret_file
        self._actors: list[Any] = []
        self._group: Any = None
        self.plans: list[ProcessPlan] = []

    def __enter__(self) -> Self:
        import ray  # pyright: ignore[reportMissingImports]

        hosts = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
        self.plans = plan_ray(self._spec, hosts)
        try:
            self._place([self._make_bundle(plan) for plan in self.plans])
        except BaseException:
            self.__exit__()
            raise
        return self

    def _place(self, bundles: list[dict[str, float]]) -> None:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(PLACE_TIMEOUT_S):
            names = ", ".join(list_role_resources(self._spec))
            raise DeadlineError(
                "cluster.place",
                f"no machines for {len(bundles)} processes within {PLACE_TIMEOUT_S:g} s: start "
                f"nodes with the resources {names}",
            )
        for index, (plan, bundle) in enumerate(zip(self.plans, bundles, strict=True)):
            options = ray.remote(ProcessActor).options(
                name=plan.name,
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            text = msgspec.json.encode(plan).decode()
            told = (text, str(self._spec.drain_s), str(self._secret_file))
            self._actors.append(options.remote(*told))

    def __exit__(self, *_: object) -> None:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
        from ray.util.placement_group import remove_placement_group  # pyright: ignore[reportMissingImports]

        # End the actors in reverse order, since processes that others depend on come first in the
        # plan.
        for actor in reversed(self._actors):
            with contextlib.suppress(RayError):
                ray.get(actor.end.remote(), timeout=self._spec.drain_s + END_TIMEOUT_S)
            ray.kill(actor)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)

    def _make_bundle(self, plan: ProcessPlan) -> dict[str, float]:
        role, resources = self._find_role(plan)
        bundle: dict[str, float] = {f"tandem_{role}": 1.0}
        if resources.cpu:
            bundle["CPU"] = float(resources.cpu.removesuffix("m")) / (
                1000 if resources.cpu.endswith("m") else 1
            )
        if resources.gpu:
            bundle["GPU"] = float(resources.gpu)
        return bundle

    def _find_role(self, plan: ProcessPlan) -> tuple[str, Resources]:
        if plan.kind == "server":
            return "server", self._spec.servers.resources
        if plan.kind != "launcher":
            assert self._spec.store is not None, "planned from it"
            return "store", self._spec.store.resources
        group = next(
            each
            for each in self._spec.groups
            if plan.name == each.name or plan.name.rpartition("-")[0] == each.name
        )
        return group.role, group.resources

    def describe(self) -> list[dict[str, Any]]:
        """Return the description of each actor's process, without actors that are restarting."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

        told: list[dict[str, Any]] = []
        for actor in self._actors:
            with contextlib.suppress(RayError):
                text: Any = ray.get(actor.describe.remote(), timeout=CALL_TIMEOUT_S)
                told.append(msgspec.json.decode(text))
        return told

    def wait_up(self, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until every process is up, and return ``describe``.

        Raises: DeadlineError (names those that are not up).
        """
        end_s = time.monotonic() + timeout_s
        while True:
            told = self.describe()
            up = {each["name"] for each in told if each["up"]}
            if len(up) == len(self.plans):
                return told
            if time.monotonic() > end_s:
                missing = ", ".join(plan.name for plan in self.plans if plan.name not in up)
                raise DeadlineError("cluster.up", f"not up within {timeout_s:g} s: {missing}")
            time.sleep(LOOK_S)
