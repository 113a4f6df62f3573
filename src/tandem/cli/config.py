"""The root of the configuration, and the command-line flags generated from it.

Every setting is a flag ``--section.name``; a few frequent ones have a short name too. All flags are
generated from the structs. ``--help`` shows frequent settings, ``--help-all`` all of them.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import typer
import typer.core
from rich.markup import escape

from tandem.core.config import (
    ConfigField,
    Resolved,
    list_fields,
    list_strange_variables,
    read_environment,
    resolve_config,
)
from tandem.core.errors import ConfigError, PermissionDeniedError
from tandem.engine.cluster.config import ClusterConfig
from tandem.engine.config import EngineConfig, KvEventConfig
from tandem.engine.launching.config import LauncherConfig
from tandem.engine.tiers.config import TierConfig
from tandem.models.config import ModelConfig
from tandem.rpc.config import RpcConfig
from tandem.server.config import ServerConfig
from tandem.server.hub.config import HubConfig
from tandem.store.config import StoreConfig

__all__ = [
    "LAUNCH_SETTINGS",
    "PLAN_SETTINGS",
    "SERVE_SETTINGS",
    "SHORT_NAMES",
    "STORE_SETTINGS",
    "Config",
    "check_store",
    "find_flag",
    "load_config",
    "with_config_flags",
]

SHORT_NAMES = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_key": "--api-key",
    "server.served_model_name": "--served-model-name",
    "model.adapter": "--adapter",
    "engine.max_model_len": "--max-model-len",
    "engine.memory": "--memory",
    "cluster.prefill": "--prefill",
    "cluster.decode": "--decode",
    "cluster.unified": "--unified",
    "store.election.backend": "--election",
    "store.election.endpoints": "--etcd-endpoints",
}
"""Short flags of settings that have a second flag."""

SERVE_SETTINGS = frozenset(
    {
        "model.dtype",
        "model.expert_format",
        "model.linear_format",
        "model.adapter",
        "model.adapter_folder",
        "engine.max_model_len",
        "engine.memory",
        "engine.kv_cache_gib",
        "engine.kv_dtype",
        "server.host",
        "server.port",
        "server.api_key",
        "server.served_model_name",
        "cluster.prefill",
        "cluster.decode",
        "cluster.unified",
        "cluster.launchers",
        "hub.file",
        "store.memory",
        "store.ssd_dir",
        "store.master",
    }
)
"""Settings of a server that ``--help`` shows; ``--help-all`` shows all."""

PLAN_SETTINGS = frozenset(
    {
        "model.dtype",
        "model.expert_format",
        "model.linear_format",
        "model.deferred_experts",
        "engine.max_model_len",
        "engine.memory",
        "engine.kv_cache_gib",
        "engine.kv_dtype",
        "cluster.prefill",
        "cluster.decode",
        "cluster.unified",
    }
)
"""Settings that ``tandem plan --help`` shows; it takes every setting of a server."""
LAUNCH_SETTINGS = frozenset(
    {
        *(path for path in SERVE_SETTINGS if not path.startswith("server.")),
        "launcher.listen",
        "launcher.name",
        "cluster.secret_file",
    }
) - {"cluster.launchers", "hub.file"}
"""Settings that ``tandem cluster launch --help`` shows."""

STORE_SETTINGS = frozenset(
    {
        "store.master",
        "store.secret",
        "store.name",
        "store.listen",
        "store.segment_bytes",
        "store.ssd_dir",
        "store.ssd_bytes",
        "store.deadline_ms",
        "store.metrics_port",
        "store.election.backend",
    }
)
"""Settings that the help of ``tandem store`` commands shows."""

F = TypeVar("F", bound=Callable[..., Any])


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The user's settings as given, in which values left to the planner are not decided yet."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    hub: HubConfig = msgspec.field(default_factory=HubConfig)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    launcher: LauncherConfig = msgspec.field(default_factory=LauncherConfig)
    rpc: RpcConfig = msgspec.field(default_factory=RpcConfig)
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)
    tiers: TierConfig = msgspec.field(default_factory=TierConfig)
    kv_events: KvEventConfig = msgspec.field(default_factory=KvEventConfig)


def load_config(
    file: Path | None,
    flags: Mapping[str, Any],
    *,
    model: str | None = None,
    foreign: Mapping[str, tuple[str, str]] | None = None,
) -> Resolved[Config]:
    """Merge defaults, file, environment and flags.

    Args:
        file: YAML file of ``--config``.
        flags: values by flag parameter, from ``with_config_flags``; None: not given.
        model: positional argument MODEL, which overrides all other origins of ``model.path``.
        foreign: by path of the setting, a flag of another server that sets it, and its value.

    Raises: ConfigError, which names the setting and its origin.
    """
    given: dict[str, tuple[str, Any]] = {}
    for field in list_fields(Config):
        value = flags.get(_parameter(field))
        if isinstance(value, list):
            # A repeated flag's values are joined with commas; an empty list means that the flag was
            # not given.
            value = ",".join(cast("list[str]", value)) if value else None
        if value is not None:
            given[field.path] = (SHORT_NAMES.get(field.path, field.flag), value)
    for path, (flag, value) in (foreign or {}).items():
        if path in given:
            what = f"{given[path][0]} and {flag} are the same setting: give one of them"
            raise ConfigError("cli.config", what, field=path)
        given[path] = (flag, value)
    if model is not None:
        given["model.path"] = ("MODEL", model)
    environment = read_environment()
    for name in list_strange_variables(environment):
        sys.stderr.write(f"tandem: variable {name} is none of a setting: TANDEM_SECTION__NAME is\n")
    return resolve_config(Config, file=file, environment=environment, flags=given)


def find_flag(path: str) -> str | None:
    """Return the flag of a setting, the short one if it has one; None if there is no such
    setting.
    """
    fields = {field.path: field.flag for field in list_fields(Config)}
    return SHORT_NAMES.get(path, fields.get(path))


def with_config_flags(
    shown: frozenset[str], more: Sequence[inspect.Parameter] = ()
) -> Callable[[F], F]:
    """Return a decorator that gives a command one option per setting, received as ``**flags``.

    Args:
        shown: paths of the settings that ``--help`` lists; ``--help-all`` lists all.
        more: further options, received in the same way.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [
            p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]

        @functools.wraps(function)
        def command(*, help_all: bool, **arguments: Any) -> Any:
            del help_all  # Its callback has printed the help and ended the program.
            return function(**arguments)

        parameters = [*own, *_make_parameters(shown), *more, _make_help_all()]
        command.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess,reportAttributeAccessIssue]
            parameters=parameters
        )
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return cast("F", command)

    return decorate


def _show_all_help(context: typer.Context, is_wanted: bool) -> None:
    if not is_wanted:
        return
    options = [p for p in context.command.params if isinstance(p, typer.core.TyperOption)]
    hidden = [option for option in options if option.hidden]
    for option in hidden:
        option.hidden = False
    try:
        sys.stdout.write(context.get_help() + "\n")
    finally:
        # The command may be run again in this process, as tests do.
        for option in hidden:
            option.hidden = True
    raise typer.Exit


def _make_help_all() -> inspect.Parameter:
    option = typer.Option(
        "--help-all",
        help="Show this help with every setting.",
        is_eager=True,
        callback=_show_all_help,
        show_default=False,
    )
    return inspect.Parameter(
        "help_all",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, option],
    )


def _parameter(field: ConfigField) -> str:
    return field.path.replace(".", "__")


@functools.cache
def _make_parameters(shown: frozenset[str]) -> list[inspect.Parameter]:
    return [_make_parameter(field, shown) for field in list_fields(Config)]


def _make_parameter(field: ConfigField, shown: frozenset[str]) -> inspect.Parameter:
    names = [field.flag]
    if field.path in SHORT_NAMES:
        names.insert(0, SHORT_NAMES[field.path])
    default = "***" if field.secret and field.default else field.default
    option = typer.Option(
        *names,
        # rich reads brackets as markup: a default such as [/dev/shm] would be taken for a closing
        # tag, so the text is escaped.
        help=escape(f"{field.description} [{default}]"),
        metavar=field.type_name.upper(),
        rich_help_panel=f"Settings: {field.path.split('.')[0]}",
        show_default=False,
        hidden=field.path not in shown,
    )
    return inspect.Parameter(
        _parameter(field),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        # A list may be given in one flag with commas, or by repeating the flag.
        annotation=Annotated[list[str] | None if field.is_list else str | None, option],
    )


def check_store(store: StoreConfig) -> None:
    """Check that the settings of a server's store fit together, so that none of them would be
    ignored.

    Raises: ConfigError (one would be).
    """
    if store.memory_bytes and store.master:
        raise ConfigError(
            "cli.serve",
            f"store.memory starts a store of the server's own, store.master joins {store.master}: "
            "choose one of the two",
            field="store.memory",
        )
    if store.ssd_dir and not (store.memory_bytes or store.master):
        raise ConfigError(
            "cli.serve",
            "store.ssd_dir is a tier below the store's memory: give store.memory as well",
            field="store.ssd_dir",
        )
    if store.master:
        from tandem.store.services.connect import auth_for, find_endpoints

        for url in find_endpoints(store):
            try:
                auth_for(store, url)
            except PermissionDeniedError as error:
                raise ConfigError(
                    "cli.serve",
                    f"store.master: {error.what} (--store.secret, or TANDEM_STORE__SECRET)",
                    field="store.secret",
                ) from None
