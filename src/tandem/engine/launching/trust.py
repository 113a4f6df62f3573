"""The secret of a cluster, and further secrets that are derived from it."""

import base64
from pathlib import Path

from tandem.engine.cluster.config import ClusterConfig
from tandem.rpc import read_secret
from tandem.rpc.trust.auth import derive_key_bytes

__all__ = ["derive_ray_token", "derive_transfer_secret", "read_cluster_secret"]


def read_cluster_secret(config: ClusterConfig) -> str | None:
    """Return the secret of a cluster; None if it is on one machine and needs none.

    Raises: errors of ``read_secret``.
    """
    if config.secret_file is not None:
        return read_secret(Path(config.secret_file))
    return config.secret


def derive_transfer_secret(secret: str) -> str:
    """Return the secret of the transfer engine, derived from the cluster's secret, which cannot be
    computed from it.
    """
    return _derive(secret, b"transfer v1")


def derive_ray_token(secret: str) -> str:
    """Return the token with which Ray's own processes authenticate."""
    return _derive(secret, b"ray v1")


def _derive(secret: str, purpose: bytes) -> str:
    key = derive_key_bytes(secret.encode(), salt=b"tandem cluster", info=purpose)
    return base64.urlsafe_b64encode(key).decode().rstrip("=")
