"""``tandem config show``: every setting, its value, and where the value came from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.config import SERVE_SETTINGS, SHORT_NAMES, Config, load_config, with_config_flags
from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.core.config import list_fields, mask_secrets

__all__ = ["app"]

app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Do nothing: a callback makes typer treat the application as a group of commands."""


@app.command("show")
@with_config_flags(SERVE_SETTINGS)
def show(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    json: JsonFlag = False,
    **flags: Any,
) -> None:
    """Print every setting with its value and origin: default, file, environment or flag."""
    resolved = load_config(config, flags)
    rows = mask_secrets(list_fields(Config), resolved.config)
    if json:
        print_json(
            [
                {
                    "setting": field.path,
                    "value": value,
                    "origin": resolved.origins[field.path],
                    "default": field.default,
                    "type": field.type_name,
                    "flag": field.flag,
                    "short": SHORT_NAMES.get(field.path),
                    "environment": field.variable,
                    "description": field.description,
                }
                for field, value in rows
            ]
        )
        return
    print_table(
        ("setting", "value", "origin", "description"),
        [(f.path, value, resolved.origins[f.path], f.description) for f, value in rows],
    )
