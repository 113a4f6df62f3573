"""``tandem ps``: the models of a running server."""

import msgspec

from tandem.cli.asking.call import call_server
from tandem.cli.clusters.instances import URL, ApiKeyFlag, UrlFlag
from tandem.cli.output import JsonFlag, format_bytes, print_json, print_table

__all__ = ["ps"]


class _Model(msgspec.Struct):
    name: str
    size: int
    context_length: int


class _Running(msgspec.Struct):
    models: list[_Model]


def ps(url: UrlFlag = URL, api_key: ApiKeyFlag = None, json: JsonFlag = False) -> None:
    """List the models of a running server."""
    running = call_server(url, "/api/ps", _Running, api_key=api_key)
    if json:
        print_json(running.models)
    else:
        rows = [(m.name, format_bytes(m.size), m.context_length) for m in running.models]
        print_table(("NAME", "SIZE", "CONTEXT"), rows)
