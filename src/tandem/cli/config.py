"""The root of the configuration, and the flags made from it.

Every setting of every subsystem is a flag ``--section.name``; the few that everybody uses have a
short name as well. Nobody writes a flag by hand: both come from the structs.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from tandem.core.config import (
    ConfigField,
    Resolved,
    list_fields,
    read_environment,
    resolve_config,
)
from tandem.engine.config import EngineConfig
from tandem.models.config import ModelConfig
from tandem.rpc.config import RpcConfig
from tandem.server.config import ServerConfig
from tandem.store.config import StoreConfig

__all__ = ["SHORT_NAMES", "Config", "load_config", "with_config_flags"]

SHORT_NAMES = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_key": "--api-key",
    "server.served_model_name": "--served-model-name",
    "engine.max_model_len": "--max-model-len",
    "store.election.backend": "--election",
    "store.election.endpoints": "--etcd-endpoints",
}
"""Settings that have a second, short flag."""

F = TypeVar("F", bound=Callable[..., Any])


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user said, before anything is decided."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    rpc: RpcConfig = msgspec.field(default_factory=RpcConfig)
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)


def load_config(
    file: Path | None, flags: Mapping[str, Any], *, model: str | None = None
) -> Resolved[Config]:
    """Merge defaults, file, environment and flags.

    Args:
        file: the YAML file of ``--config``.
        flags: values by flag parameter, as ``with_config_flags`` hands them over; None is unset.
        model: the positional argument MODEL, the strongest origin of ``model.path``.

    Raises: ConfigError naming the setting and its origin.
    """
    given = {
        field.path: (SHORT_NAMES.get(field.path, field.flag), flags[_parameter(field)])
        for field in list_fields(Config)
        if flags.get(_parameter(field)) is not None
    }
    if model is not None:
        given["model.path"] = ("MODEL", model)
    return resolve_config(Config, file=file, environment=read_environment(), flags=given)


def with_config_flags(function: F) -> F:
    """Give a command one option per setting; it receives them as ``**flags``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    made = [_make_parameter(field) for field in list_fields(Config)]
    function.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[*own, *made]
    )
    function.__annotations__ |= {p.name: p.annotation for p in made}
    return function


def _parameter(field: ConfigField) -> str:
    return field.path.replace(".", "__")


def _make_parameter(field: ConfigField) -> inspect.Parameter:
    names = [field.flag]
    if field.path in SHORT_NAMES:
        names.insert(0, SHORT_NAMES[field.path])
    shown = "***" if field.secret and field.default else field.default
    option = typer.Option(
        *names,
        help=f"{field.description} [{shown}]",
        metavar=field.type_name.upper(),
        rich_help_panel=f"Settings: {field.path.split('.')[0]}",
        show_default=False,
    )
    return inspect.Parameter(
        _parameter(field),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
