"""Runs ``llamafactory-cli`` command lines unchanged: ``python -m tandem.integrations.llamafactory
train X``.

A line is translated to a ``tandem`` command, which is printed and replaces this process.
``USE_KT=1`` before a line has no effect, since experts always run on Tandem's kernels. In a shell:
``alias llamafactory-cli='python -m tandem.integrations.llamafactory'``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError, TandemError, UnsupportedError

__all__ = ["main", "translate"]

WHERE = "integrations.llamafactory"
MAX_FILE_BYTES = 1 << 20
PLAIN_TEMPLATES = ("empty", "default")
IGNORED = frozenset(
    [
        "trust_remote_code",
        "template",
        "infer_backend",
        "infer_dtype",
        "finetuning_type",
        "stage",
        "export_size",
        "export_device",
        "use_kt",
        "kt_optimize_rule",
        "cpu_infer",
        "chunk_size",
        "kt_config",
        "use_cache",
        "flash_attn",
    ]
)
"""Keys of chat and export files that are ignored: they ask for something that Tandem always does,
or change no answer.
"""
INSTEAD = {
    "eval": "tandem eval MODEL --adapter DIR --data FILE",
    "webchat": "tandem serve MODEL, whose page is a chat",
    "webui": "tandem finetune RECIPE",
    "env": "tandem doctor",
}
Values = dict[str, Any]


def translate(words: list[str]) -> list[str]:
    """Return the arguments of ``tandem`` that do the same as a ``llamafactory-cli`` line.

    Args:
        words: the line after ``llamafactory-cli``: a command, a YAML file, ``key=value`` words.

    Raises:
        NotFoundError: the file is missing.
        ConfigError: it is no mapping of keys, or lacks one; ``field`` names it.
        UnsupportedError: a command or key without an equivalent; the text names the nearest one.
    """
    if not words or words[0] in ("help", "-h", "--help"):
        return ["--help"]
    command, rest = words[0], words[1:]
    if command == "version":
        return ["version"]
    if command in INSTEAD:
        raise UnsupportedError(WHERE, f"{command} is not built: use `{INSTEAD[command]}`")
    makers: dict[str, Callable[[Values], list[str]]] = {
        "chat": _chat,
        "api": _serve,
        "export": _export,
    }
    if command != "train" and command not in makers:
        raise ConfigError(WHERE, f"{command!r}: give one of train, {', '.join(makers)}, version")
    if not rest or rest[0].startswith("-"):
        what = f"{command} {' '.join(rest)}: give a YAML file, then key=value words"
        raise ConfigError(WHERE, what)
    if command == "train":
        return ["finetune", *rest]
    return makers[command](_read_values(Path(rest[0]), rest[1:]))


def _read_values(path: Path, overrides: list[str]) -> Values:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(WHERE, f"{path} has more than {MAX_FILE_BYTES} bytes")
        values = parse_yaml(path.read_text("utf-8"))
        if not isinstance(values, dict):
            raise ConfigError(WHERE, f"{path} is not a mapping of keys")
        for word in overrides:
            key, sign, text = word.partition("=")
            if not sign:
                raise ConfigError(WHERE, f"{word!r}: write key=value", field=key)
            values[key] = parse_yaml(text)
    except OSError as error:
        raise NotFoundError(WHERE, f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(WHERE, f"{path} is not YAML: {error}") from error
    return {str(key): value for key, value in values.items()}


def _take(values: Values, *wanted: str) -> list[str | None]:
    """Return the values of keys of a ``llamafactory-cli`` line. Raises UnsupportedError if it has
    other keys that would change the result.
    """
    for key, value in values.items():
        if key not in wanted and key not in IGNORED and value not in (None, False):
            raise UnsupportedError(WHERE, f"{key}: it has no equivalent: remove it", field=key)
    found = [values.get(key) for key in wanted]
    return [None if value is None else str(value) for value in found]


def _take_model(values: Values, *wanted: str) -> tuple[str, list[str | None]]:
    model, *others = _take(values, "model_name_or_path", *wanted)
    if not model:
        raise ConfigError(WHERE, "no model_name_or_path", field="model_name_or_path")
    return model, others


def _chat(values: Values) -> list[str]:
    model, (adapter, system, temperature, tokens) = _take_model(
        values, "adapter_name_or_path", "default_system", "temperature", "max_new_tokens"
    )
    if values.get("template") in PLAIN_TEMPLATES:
        what = f"template {values['template']}: chats are in the checkpoint's template: remove it"
        raise UnsupportedError(WHERE, what, field="template")
    options = {"--adapter": adapter, "--system": system, "--temperature": temperature}
    options["--max-tokens"] = tokens
    return ["chat", model, *_make_flags(options)]


def _serve(values: Values) -> list[str]:
    model, (adapter,) = _take_model(values, "adapter_name_or_path")
    if adapter:
        what = (
            "api with an adapter: merge it with `llamafactory-cli export`, then serve that folder"
        )
        raise UnsupportedError(WHERE, what, field="adapter_name_or_path")
    return ["serve", model]


def _export(values: Values) -> list[str]:
    model, (adapter, folder) = _take_model(values, "adapter_name_or_path", "export_dir")
    for key, value in (("adapter_name_or_path", adapter), ("export_dir", folder)):
        if not value:
            raise ConfigError(WHERE, f"no {key}: export merges an adapter into a folder", field=key)
    return ["export", model, *_make_flags({"--adapter": adapter, "--out": folder})]


def _make_flags(options: dict[str, str | None]) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (name, value)]


def main() -> None:
    """Print the ``tandem`` command that does the same as the given ``llamafactory-cli`` line, and
    replace this process by it.
    """
    try:
        words = translate(sys.argv[1:])
    except TandemError as error:
        sys.stderr.write(f"tandem: {error}\n")
        sys.exit(1)
    sys.stderr.write(f"$ tandem {join(words)}\n")
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tandem", *words])  # noqa: S606 - no shell


if __name__ == "__main__":
    main()
