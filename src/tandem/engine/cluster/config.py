"""Settings of a cluster of instances, started by this process or by launchers on other hosts."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError

__all__ = ["ClusterConfig"]

MAX_INSTANCES = 64


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instances that serve, and the time that a request waits for them."""

    prefill: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_INSTANCES,
            description="Instances that only prefill; with cluster.decode. 0 = none.",
        ),
    ] = 0
    decode: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_INSTANCES,
            description="Instances that only decode; with cluster.prefill. 0 = none.",
        ),
    ] = 0
    unified: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_INSTANCES,
            description="Instances that prefill and decode; 0 = one, if no others are asked for.",
        ),
    ] = 0
    launchers: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses of launchers (`tandem cluster launch`) whose instances serve, "
            "instead of ones of this server; a host name that has several addresses means the "
            "launcher at each."
        ),
    ] = ()
    secret: Annotated[
        str | None,
        Meta(
            description="Secret of the cluster, which its processes prove to each other over TCP.",
            extra={"secret": True},
        ),
    ] = None
    secret_file: Annotated[
        str | None,
        Meta(description="File of mode 0600 with that secret, from `tandem cluster keys`."),
    ] = None
    policy: Annotated[
        Literal["random", "round_robin", "load", "prefix", "sglang", "dynamo", "mooncake"],
        Meta(
            description="How instances are chosen: mooncake = the least predicted time to first "
            "token (transfer + queue + prefill), and between tokens for decodes; prefix = the "
            "fewest tokens to compute, where those whose KV is there count as computed; load = the "
            "fewest alone; round_robin and random; sglang and dynamo = the rules of these routers.",
        ),
    ] = "prefix"
    admission: Annotated[
        Literal["none", "early", "predicted"],
        Meta(
            description="Which requests with objectives (server.slo) are accepted: none = all; "
            "early = those whose predicted times keep them, as decodes are now; predicted = as "
            "decodes will be at their first token. Others get 429 with Retry-After.",
        ),
    ] = "none"
    roles: Annotated[
        Literal["fixed", "load"],
        Meta(
            description="When instances change between prefill and decode: fixed = by command "
            "alone; load = also when one side misses the objectives of requests (server.slo; "
            "without any 10 s to the first token, 100 ms between tokens) and the other has room.",
        ),
    ] = "fixed"
    journal: Annotated[
        str,
        Meta(
            description="New file for a journal of the conductor, up to 1 GiB: loads, steps and "
            "heads of hashes that it was told, and its decisions; `tandem sim decide` replays it. "
            "Empty: none."
        ),
    ] = ""
    lease_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=3600.0,
            description="Seconds that a prefill instance holds blocks until they are read.",
        ),
    ] = 30.0
    recovery_s: Annotated[
        float,
        Meta(
            ge=0.0,
            le=3600.0,
            description="Seconds that an accepted request waits for a lost instance to come back.",
        ),
    ] = 60.0
    max_attempts: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="How often a request goes on elsewhere after a failure before it ends with "
            "an error.",
        ),
    ] = 3

    def __post_init__(self) -> None:
        """Check that the settings together describe a valid cluster.

        Raises: ConfigError (they do not; ``field`` names one of the settings).
        """
        if self.launchers and self.prefill + self.decode + self.unified:
            raise ConfigError(
                "cluster.configure",
                "the instances of launchers are counted at these: give no numbers of them",
                field="cluster.launchers",
            )
        if self.secret and self.secret_file:
            raise ConfigError(
                "cluster.configure", "two secrets: give one of them", field="cluster.secret_file"
            )
        if self.roles == "load" and not (self.launchers or self.prefill or self.decode):
            raise ConfigError(
                "cluster.configure",
                "roles change between prefill and decode instances: start some with --prefill and "
                "--decode, or name cluster.launchers",
                field="cluster.roles",
            )
        if self.prefill and self.unified:
            raise ConfigError(
                "cluster.configure",
                f"{self.unified} unified instances beside prefill and decode instances: choose "
                "one of the two",
                field="cluster.unified",
            )

    def require_pairs(self) -> None:
        """Refuse prefill instances without decode instances, and the reverse.

        Raises: ConfigError (there are instances of one of the two roles alone).
        """
        if bool(self.prefill) != bool(self.decode):
            missing = "decode" if self.prefill else "prefill"
            raise ConfigError(
                "cluster.configure",
                f"{self.prefill} prefill and {self.decode} decode instances: name at least one of "
                "both",
                field=f"cluster.{missing}",
            )

    @property
    def num_instances(self) -> int:
        """Number of instances to start."""
        return self.prefill + self.decode or max(self.unified, 1)
