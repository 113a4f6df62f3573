"""The check of manifests against bundled schemas: Kubernetes' own, and hand-written subsets."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from tandem.core.errors import UnsupportedError

__all__ = ["check_manifests", "list_problems"]

CORE = "kubernetes_core.json"
SUBSET = "hand_written_subset.json"


@cache
def _read(name: str) -> dict[str, Any]:
    folder = resources.files("tandem.integrations.deploying.schemas")
    return json.loads(folder.joinpath(name).read_text())


def list_problems(manifest: Mapping[str, Any]) -> list[str]:
    """Return where a Kubernetes manifest violates its schema, each place with the reason.

    Needs jsonschema. A kind without a schema is a violation.
    """
    import jsonschema
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT7

    kind = f"{manifest.get('apiVersion')}/{manifest.get('kind')}"
    for name in (CORE, SUBSET):
        definition = _read(name)["kinds"].get(kind)
        if definition is not None:
            break
    else:
        return [f"{kind}: there is no schema"]
    registry: Any = Registry().with_resources(
        [(each, Resource.from_contents(_read(each), DRAFT7)) for each in (CORE, SUBSET)]
    )
    schema = {"$ref": f"{name}#/definitions/{definition}"}
    validator = jsonschema.Draft7Validator(schema, registry=registry)
    return [
        f"{kind}: {'.'.join(map(str, error.absolute_path)) or 'it'}: {error.message[:300]}"
        for error in validator.iter_errors(manifest)
    ]


def check_manifests(manifests: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error if a Kubernetes manifest violates its schema.

    Raises: UnsupportedError (names each place).
    """
    problems = [problem for each in manifests for problem in list_problems(each)]
    if problems:
        raise UnsupportedError("cluster.render", "; ".join(problems))
