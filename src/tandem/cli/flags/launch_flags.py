"""Flags of other servers' launch commands, which ``tandem serve`` accepts too.

Each flag is in one of three classes. A mapped flag sets one of our settings; a settled flag asks
for what Tandem always does, so only a note is printed; a refused flag is an error with the reason
and the setting to use instead. None is ignored silently. The flags are not in ``--help``: they are
for commands that were written for those programs.
"""

import inspect
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tandem.cli.flags.flag import LaunchFlag
from tandem.cli.flags.llama_server import LLAMA_SERVER_FLAGS
from tandem.cli.flags.sglang import SGLANG_FLAGS
from tandem.cli.flags.vllm import VLLM_FLAGS
from tandem.core.errors import ConfigError

__all__ = ["LAUNCH_FLAGS", "LaunchFlag", "Translation", "make_launch_parameters", "translate"]


class Translation(NamedTuple):
    """The meaning here of another server's flags: settings by path, each with the flag that set it
    and the value, and notes for the user.
    """

    settings: dict[str, tuple[str, str]]
    notes: list[str]


LAUNCH_FLAGS = (*SGLANG_FLAGS, *LLAMA_SERVER_FLAGS, *VLLM_FLAGS)
"""All flags; each name stands in one table, that of the first program that has it."""


def make_launch_parameters() -> list[inspect.Parameter]:
    """Return one hidden option for each flag of another server, for a command's signature."""
    return [
        inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if flag.has_value else False,
            annotation=Annotated[
                str | None if flag.has_value else bool,
                typer.Option(*flag.names, hidden=True, show_default=False),
            ],
        )
        for flag in LAUNCH_FLAGS
    ]


def translate(arguments: dict[str, Any], *, model: str | None) -> Translation:
    """Remove other servers' flags from a command's arguments; return the settings that they mean.

    Args:
        arguments: arguments of the command; the flags are removed from it.
        model: positional argument MODEL, which ``--model`` must not contradict.

    Raises: ConfigError (a flag is refused, contradicts another, or has a wrong value).
    """
    given: dict[str, str] = {}
    for flag in LAUNCH_FLAGS:
        value = arguments.pop(flag.parameter, None)
        if value is not None and value is not False:
            given[flag.names[0]] = "" if value is True else str(value)
    result = Translation({}, [])
    for flag in LAUNCH_FLAGS:
        name = flag.names[0]
        if name not in given:
            continue
        value = given[name]
        if flag.kind == "settled":
            result.notes.append(f"{name}: {flag.target}")
        elif flag.kind == "refused":
            if value not in flag.harmless:
                what = f"{name}{f' {value}' if value else ''}: {flag.target}"
                raise ConfigError("cli.serve", what, field=name.removeprefix("--"))
        else:
            mapped = value if flag.convert is None else flag.convert(value, given)
            if value in flag.notes:
                result.notes.append(f"{name} {value}: {flag.notes[value]}")
            if not mapped:
                continue
            if flag.target in result.settings:
                other = result.settings[flag.target][0]
                what = f"{other} and {name} are the same setting: give one of them"
                raise ConfigError("cli.serve", what, field=flag.target)
            result.settings[flag.target] = (name, mapped)
    _check_model(result, model)
    return result


def _check_model(result: Translation, model: str | None) -> None:
    told = result.settings.get("model.path")
    if told is not None and model is not None and Path(told[1]) != Path(model):
        what = f"MODEL is {model} and {told[0]} is {told[1]}: give one of them"
        raise ConfigError("cli.serve", what, field="model.path")
