"""Settings of the API server, and the check that other hosts get access only by intent.

Owns no state and opens no socket; ``check_exposure`` and ``load_api_keys`` read files that the
settings name. Flags and documentation are generated from the fields' descriptions.
"""

import hashlib
import ipaddress
import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError
from tandem.core.logs import LogLevel
from tandem.server.objectives import ServiceTerms, TermsTable, parse_terms

__all__ = [
    "ACCESS_LOGGER",
    "ServerConfig",
    "check_exposure",
    "configure_access_log",
    "is_loopback",
    "load_api_keys",
    "load_terms",
]


ACCESS_LOGGER = "tandem.server.access"
"""Name of the logger of the access log; the entry point sets its level."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP API."""

    host: Annotated[str, Meta(min_length=1, description="Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to bind; 0 picks a free one.")] = (
        8000
    )
    api_key: Annotated[
        tuple[str, ...],
        Meta(description="Keys that clients may present as Bearer tokens.", extra={"secret": True}),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of further API keys, one a line; # starts a comment. After a key may "
            "follow its terms: ttft_ms=, tpot_ms=, priority= (lower is served first), weight= (of "
            "its share)."
        ),
    ] = None
    slo: Annotated[
        tuple[str, ...],
        Meta(
            description="Objectives of requests, 'ttft_ms=500,tpot_ms=50' for all or with "
            "'model=NAME,' for one model; a key's terms and the headers x-slo-ttft-ms and "
            "x-slo-tpot-ms of a request come before. cluster.admission says whether they are kept."
        ),
    ] = ()
    admin_api_key: Annotated[
        tuple[str, ...],
        Meta(
            description="Keys that may load and unload adapters, flush the cache, abort any "
            "request, and do all else; empty: nobody may load any adapter.",
            extra={"secret": True},
        ),
    ] = ()
    allow_unauthenticated: Annotated[
        bool, Meta(description="Serve beyond this machine although no API key is set.")
    ] = False
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description="Names that /v1/models lists, the first is reported; empty: the last part "
            "of the model's. Its path and 'default' are accepted too."
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None, Meta(description="PEM certificate chain; with ssl_keyfile, serve HTTPS.")
    ] = None
    ssl_keyfile: Annotated[str | None, Meta(description="PEM key of ssl_certfile.")] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names accepted in the Host header beside loopback, this machine's "
            "name and IP addresses; '*.example.org' covers a domain, '*' switches the check off."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins of web pages that may use this server from a browser, such as "
            "https://chat.example.org; '*' is every one. Its own may always; those of loopback and "
            "of apps may chat, embed and list models where host is loopback and no key is set."
        ),
    ] = ()
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=2**32, description="Largest request body; more is answered 413.")
    ] = 8 * 2**20
    head_timeout_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds a client may take to send a request's head."),
    ] = 30.0
    body_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds a client may take to send a body.")
    ] = 30.0
    send_timeout_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds a client may leave an answer unread."),
    ] = 60.0
    request_timeout_s: Annotated[
        float, Meta(gt=0, le=7 * 86400, description="Seconds a generation may take in all.")
    ] = 3600.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="Seconds that running requests get after SIGTERM."),
    ] = 30.0
    max_in_flight: Annotated[
        int, Meta(ge=1, le=2**20, description="HTTP requests handled at once; more get 503.")
    ] = 1024
    max_choices: Annotated[
        int, Meta(ge=1, le=2**16, description="Generations in one request (prompts times n).")
    ] = 256
    default_max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Chat tokens if a request names no limit; unset: what fits."),
    ] = None
    cut_max_tokens: Annotated[
        bool,
        Meta(
            description="Reduce a request's limit of tokens to what its context leaves, as "
            "llama.cpp and Ollama do; false: refuse a limit that does not fit."
        ),
    ] = True
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=64, description="Threads that tokenize and render chat templates.")
    ] = 2
    template_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="Seconds a chat template may take to render.")
    ] = 5.0
    grammar_timeout_s: Annotated[
        float, Meta(gt=0, le=60, description="Seconds a client's grammar may take to compile.")
    ] = 5.0
    response_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**40,
            description="Memory for the responses that one key's requests to /v1/responses may go "
            "on from; whole conversations are forgotten for new ones. 0 keeps none.",
        ),
    ] = 64 * 2**20
    response_total_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=2**40,
            description="Memory for the kept responses of all keys together; conversations of the "
            "key that has the most are forgotten first.",
        ),
    ] = 2**30
    response_idle_s: Annotated[
        float,
        Meta(
            gt=0,
            le=365 * 86400,
            description="Seconds after which a conversation of kept responses that nobody uses is "
            "forgotten.",
        ),
    ] = 86400.0
    chat_template: Annotated[
        str,
        Meta(description="File of a jinja chat template, instead of the model's own; empty: its."),
    ] = ""
    output_format: Annotated[
        str,
        Meta(
            min_length=1,
            description="Form in which the model writes reasoning and tool calls: qwen, qwen_xml, "
            "deepseek_v3, deepseek_v31, deepseek_v32, kimi_k2, glm, minimax_m2, harmony, llama3, "
            "mistral, gemma4, think (reasoning alone), none; auto reads it from the chat template.",
        ),
    ] = "auto"
    batch_folder: Annotated[
        str | None,
        Meta(
            description="Folder of /v1/files and /v1/batches, which go on from it after a restart; "
            "unset: a temporary one, removed at the end."
        ),
    ] = None
    batch_bytes: Annotated[
        int,
        Meta(ge=0, le=2**50, description="Bytes of all files together; 0 switches batches off."),
    ] = 2**30
    batch_keep_s: Annotated[
        float,
        Meta(
            gt=0,
            le=10 * 366 * 86400,
            description="Seconds for which ended batches, and files that no batch needs, are kept.",
        ),
    ] = 30 * 86400.0
    batch_width: Annotated[
        int, Meta(ge=1, le=1024, description="Requests of batches that are answered at once.")
    ] = 16
    access_log: Annotated[
        bool | None,
        Meta(
            description="Log a line for each HTTP request; unset: if --log-level is info or debug."
        ),
    ] = None
    metrics: Annotated[bool, Meta(description="Serve Prometheus metrics at /metrics.")] = True
    timelines: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="Generations whose timelines the server remembers (tandem explain).",
        ),
    ] = 4096
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP address, such as http://127.0.0.1:4318/v1/traces, that gets "
            "OpenTelemetry spans of each request; needs tandem-llm[otel]. They tell times, counts "
            "and ids, no prompt."
        ),
    ] = None
    load_log_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds between log lines (level info) that tell the load while there is "
            "any; 0 is none.",
        ),
    ] = 10.0


def configure_access_log(config: ServerConfig, log_level: str) -> None:
    """Set the level of the access log's logger, which may differ from that of everything else."""
    is_logged = config.access_log
    if is_logged is None:
        is_logged = log_level in (LogLevel.INFO, LogLevel.DEBUG)
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO if is_logged else logging.WARNING)


def is_loopback(host: str) -> bool:
    """Return True if an address for ``host`` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return all API keys that the settings name, without duplicates.

    Raises:
        ConfigError: the file cannot be read, or a key is empty or not printable ASCII.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        file_keys = [line.split()[0] for line in _read_key_lines(config.api_key_file)]
        if not file_keys:
            # A key file without keys is refused: it would quietly switch authentication off.
            raise ConfigError(
                "server.load_api_keys",
                f"{config.api_key_file} holds no key: write one a line",
                field="server.api_key_file",
            )
        keys += file_keys
    for key in [*keys, *config.admin_api_key]:
        if not key or not all("!" <= char <= "~" for char in key):
            raise ConfigError(
                "server.load_api_keys",
                "an API key is empty or holds a space or a character outside ASCII",
                field="server.api_key",
            )
    return tuple(dict.fromkeys(keys))


def _read_key_lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "server.load_api_keys",
            f"cannot read {path}: {error}",
            field="server.api_key_file",
        ) from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def load_terms(config: ServerConfig) -> TermsTable:
    """Return the terms of service (objectives, priority, share) in the settings and the key file.

    Raises:
        ConfigError: the file cannot be read, or terms are invalid.
    """
    by_client: dict[str, ServiceTerms] = {}
    if config.api_key_file is not None:
        for line in _read_key_lines(config.api_key_file):
            key, *words = line.split()
            if words:
                client = hashlib.sha256(key.encode()).hexdigest()
                by_client[client] = parse_terms(words, "server.api_key_file")
    return TermsTable(config.slo, by_client)


def check_exposure(config: ServerConfig, keys: tuple[str, ...]) -> None:
    """Check that the settings do not give other hosts access by accident.

    Raises:
        ConfigError: an address beyond loopback without a key or an explicit flag; only half of a
            TLS pair.
    """
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        missing = "ssl_certfile" if config.ssl_certfile is None else "ssl_keyfile"
        raise ConfigError(
            "server.check_exposure",
            f"TLS needs a certificate and its key, {missing} is not set",
            field=f"server.{missing}",
        )
    if keys or config.allow_unauthenticated or is_loopback(config.host):
        return
    raise ConfigError(
        "server.check_exposure",
        f"host {config.host} is reachable from other machines and no API key is set: give "
        "--api-key KEY, or --server.allow-unauthenticated true if everybody there may use it",
        field="server.allow_unauthenticated",
    )
