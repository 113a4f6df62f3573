"""The terms on which requests are served: latency objectives, priority and share.

Each latency objective is taken from the first of these that states it: the request's headers, the
line of its API key in the key file, the model's entry in the setting ``server.slo``, the entry
there without a model. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tandem.core.errors import ConfigError
from tandem.core.wire import NO_SLO, Slo

__all__ = ["TPOT_HEADER", "TTFT_HEADER", "ServiceTerms", "TermsTable", "parse_terms"]

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
MAX_MS = 3_600_000.0
MAX_WEIGHT = 1000.0
MAX_PRIORITY = 1000


class ServiceTerms(NamedTuple):
    """The terms of service (latency objectives, priority, weight) of a client, a model or a
    server.
    """

    slo: Slo = NO_SLO
    priority: int = 0
    """Number added to the priority of each of the client's requests; a lower sum is served first.
    """
    weight: float = 1.0
    """Weight of the client's share of the server, relative to other clients'."""


def parse_terms(words: Sequence[str], field: str) -> ServiceTerms:
    """Read terms of service of the form NAME=VALUE: ttft_ms, tpot_ms, priority, weight.

    Raises: ConfigError (another form; names ``field``).
    """
    values: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition("=")
        limits = {
            "ttft_ms": (0.001, MAX_MS),
            "tpot_ms": (0.001, MAX_MS),
            "priority": (-MAX_PRIORITY, MAX_PRIORITY),
            "weight": (0.001, MAX_WEIGHT),
        }
        if name not in limits or name in values:
            what = f"{word!r}: give each of {', '.join(limits)} as NAME=VALUE, once at most"
            raise ConfigError("server.parse_terms", what, field=field)
        least, most = limits[name]
        values[name] = _parse_number(text, least, most, field)
    return ServiceTerms(
        slo=_make_slo(values.get("ttft_ms"), values.get("tpot_ms")),
        priority=int(values.get("priority", 0)),
        weight=values.get("weight", 1.0),
    )


def _parse_number(text: str, least: float, most: float, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        what = f"{text[:50]!r} is no number from {least:g} to {most:g}"
        raise ConfigError("server.parse_terms", what, field=field)
    return value


def _make_slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    return Slo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
    )


class TermsTable:
    """The terms of service (latency objectives, priority, weight) of one server, by model and by
    client.

    Args:
        entries: entries of ``server.slo``, each ``ttft_ms=T,tpot_ms=T``, with ``model=NAME`` for
            one model.
        by_client: terms of clients, by the name that requests carry.

    Raises: ConfigError (an entry has another form).
    """

    def __init__(
        self, entries: Sequence[str] = (), by_client: Mapping[str, ServiceTerms] | None = None
    ) -> None:
        self._by_model: dict[str, ServiceTerms] = {}
        self._by_client = {} if by_client is None else dict(by_client)
        for words in _group_words(entries):
            models = [word.removeprefix("model=") for word in words if word.startswith("model=")]
            model = models[0] if models else ""
            rest = [word for word in words if not word.startswith("model=")]
            if len(models) > 1 or not rest or model in self._by_model:
                what = (
                    f"{','.join(words)!r}: give objectives once for a model, and once without one"
                )
                raise ConfigError("server.parse_terms", what, field="server.slo")
            self._by_model[model] = parse_terms(rest, "server.slo")

    def find(
        self, model: str, client: str, get_header: Callable[[str], str | None]
    ) -> ServiceTerms:
        """Return the terms of service of a request.

        Args:
            model: name of the model that was asked for.
            client: name of the sender.
            get_header: returns a header of the request, or None.

        Raises: ConfigError (an objective in a header is not a number).
        """
        own = self._by_client.get(client, ServiceTerms())
        asked = _make_slo(
            _read_header(get_header, TTFT_HEADER), _read_header(get_header, TPOT_HEADER)
        )
        sources = [asked, own.slo]
        sources += [self._by_model[name].slo for name in (model, "") if name in self._by_model]
        slo = Slo(
            ttft_s=next((each.ttft_s for each in sources if each.ttft_s is not None), None),
            tpot_s=next((each.tpot_s for each in sources if each.tpot_s is not None), None),
        )
        return own._replace(slo=slo)


def _group_words(entries: Sequence[str]) -> list[list[str]]:
    """Group the words of ``server.slo`` into entries.

    A flag or environment variable splits a list at its commas, so each word arrives as an entry of
    its own: single words belong together up to the next ``model=``.
    """
    groups: list[list[str]] = []
    was_alone = False
    for entry in entries:
        words = [word.strip() for word in entry.split(",") if word.strip()]
        is_alone = len(words) == 1
        if is_alone and was_alone and not words[0].startswith("model="):
            groups[-1] += words
        else:
            groups.append(words)
        was_alone = is_alone
    return groups


def _read_header(get_header: Callable[[str], str | None], name: str) -> float | None:
    text = get_header(name)
    return None if text is None else _parse_number(text, 0.001, MAX_MS, name)
