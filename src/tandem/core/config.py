"""Layered configuration: default < file < environment < command line, each value with its origin.

A subsystem declares one frozen ``msgspec.Struct`` whose fields are annotated with
``Meta(description=...)``; a root struct composes them. Everything else is derived from those
declarations: flag ``--engine.block-size``, key ``engine: {block_size: ...}`` in the YAML file,
variable ``TANDEM_ENGINE__BLOCK_SIZE``, and the reference page. This is the only module of the
project that reads the environment.
"""

import difflib
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import msgspec.inspect as mi
import yaml

from tandem.core.errors import ConfigError, UnsupportedError

__all__ = [
    "ENV_PREFIX",
    "ISA_VARIABLES",
    "LIBRARY_VARIABLES",
    "MAX_ISA",
    "SIZE_PATTERN",
    "ConfigField",
    "Resolved",
    "YamlLoader",
    "cap_libraries",
    "check_bounds",
    "check_text",
    "child_environment",
    "choose_isa",
    "let_idle_threads_sleep",
    "list_fields",
    "list_library_caps",
    "list_strange_variables",
    "mask_secrets",
    "parse_size",
    "parse_yaml",
    "read_environment",
    "read_max_isa",
    "resolve_config",
    "set_library_variables",
]

SIZE_PATTERN = r"^(\d+(\.\d+)? ?([KkMmGgTt]([Ii]?[Bb])?|[Bb]))?$"
"""Pattern of settings that are sizes, such as 16GiB, 16G or 16gb; empty is allowed."""
COUNT_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([kmg])", re.IGNORECASE)
"""Pattern of a count such as 4k, which is 4096."""
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
"""Exponents of 1024, or 1000, by the letter of a unit."""
SYNONYMS = {
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn"), "fp8"),
    "q8_0": "int8",
}
"""Values of settings with a fixed set of them, by other programs' names of the same."""
WORDS = {"on": "true", "yes": "true", "off": "false", "no": "false"}
"""Further texts of truth values."""
ENV_PREFIX = "TANDEM_"
MAX_ISA = "TANDEM_MAX_ISA"
"""Environment variable that limits the instruction set. It is not a setting, because it must act
when libraries are imported, before any configuration is read."""
OTHER_VARIABLES = {MAX_ISA, "TANDEM_KERNEL_ISAS", "TANDEM_TEST_MODEL"}
"""Variables that are no settings."""
ISA_VARIABLES = {
    "plain": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512_bw": ("", "AVX512", "AVX512_CORE"),
    "avx512_vnni": ("", "AVX512_E1", "AVX512_CORE_VNNI"),
    "avx512_bf16": ("", "AVX512_E2", "AVX512_CORE_BF16"),
    "amx": ("", "AVX512_E4", "AVX512_CORE_AMX"),
}
"""Values of ``LIBRARY_VARIABLES`` for each instruction set; empty: the CPU's own. torch obeys its
variable even if the CPU lacks the instruction set, so a variable is only ever lowered."""
LIBRARY_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
MAX_YAML_NODES = 100_000
"""Largest number of nodes of a YAML document, with each use of an alias counted, so that a few
lines of nested aliases cannot expand to billions of values."""
MAX_YAML_DEPTH = 64
"""Largest nesting depth of a YAML document; it also stops a value that contains itself."""
T = TypeVar("T", bound=msgspec.Struct)


class ConfigField(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, as declared by a field of a struct."""

    path: str
    """Dotted path from the root, such as ``engine.block_size``."""
    type_name: str
    default: Any
    description: str
    secret: bool = False

    @property
    def is_list(self) -> bool:
        """True if the setting takes several values; its text is split at commas."""
        return "list" in self.type_name.split(" | ")

    @property
    def flag(self) -> str:
        """Name of the setting's command-line flag, such as ``--engine.block-size``."""
        return "--" + self.path.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the setting's environment variable, such as ``TANDEM_ENGINE__BLOCK_SIZE``."""
        return ENV_PREFIX + self.path.replace(".", "__").upper()


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """A validated configuration, with the origin of each value."""

    config: T
    origins: dict[str, str]
    """Origin by path of the setting: ``default``, ``file NAME``, ``env NAME`` or ``flag NAME``."""


@functools.cache
def list_fields(root: type[msgspec.Struct]) -> tuple[ConfigField, ...]:
    """Return every setting below ``root``, in order of declaration.

    Raises: AssertionError (a field has no description, which is a bug).
    """
    return tuple(_walk_fields(root, ""))


def resolve_config(
    root: type[T],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolved[T]:
    """Merge all layers (default, file, environment, flags) and validate the result.

    Args:
        root: root struct of the settings.
        file: a YAML file, or None.
        environment: environment variables. Names without our prefix are ignored; unknown names with
            it and a section separator are refused.
        flags: by dotted path, the flag's name as the user typed it and its value; text is parsed.

    Raises: ConfigError, which names the field, its origin, and the most similar known name.
    """
    fields = {field.path: field for field in list_fields(root)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")

    def put(path: str, value: Any, origin: str) -> None:
        if path not in fields:
            raise ConfigError("config.resolve", _unknown(path, origin, fields), field=path)
        values[path] = value
        origins[path] = origin

    if file is not None:
        for path, value in _flatten(_read_yaml(file), fields):
            put(path, value, f"file {file.name}")
    for name, value in (environment or {}).items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            put(path, _Text(value), f"env {name}")
    for path, (name, value) in (flags or {}).items():
        put(path, _Text(value) if isinstance(value, str) else value, f"flag {name}")
    return Resolved(_build(root, "", values, origins), origins)


def list_strange_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that begin as ours do and mean nothing: no setting has such a name."""
    return sorted(
        name
        for name in environment
        if name.startswith(ENV_PREFIX) and "__" not in name and name not in OTHER_VARIABLES
    )


def check_bounds(config: msgspec.Struct, section: str) -> None:
    """Check the bounds of a struct that was made in Python, because msgspec checks only decoded
    ones.

    Args:
        config: the struct; its numbers, strings and tuples are checked by their fields' types.
        section: name of the section, for errors.

    Raises: ConfigError, which names the field.
    """
    for name, hint in _list_hints(type(config)):
        value = getattr(config, name)
        if type(value) not in (bool, int, float, str, tuple):
            continue
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            path = f"{section}.{name}"
            raise ConfigError("config.check", f"{path}: {error}", field=path) from error


def parse_size(text: str) -> int:
    """Return the bytes of a size that matches ``SIZE_PATTERN``; 0 if it is empty.

    16GiB and 16G are 16 * 2^30 bytes, 16GB is 16 * 10^9; letters may be of either case.
    """
    number = text.lower().rstrip("bkmgti ")
    unit = text.lower()[len(number) :].strip()
    base = 1000 if len(unit) == 2 else 1024
    return int(float(number) * base ** POWERS.get(unit[:1], 0)) if number else 0


def check_text(text: str | None, path: str) -> None:
    """Check that a text can be encoded as UTF-8; half a surrogate pair, for example, cannot.

    Raises: ConfigError, which names the field by ``path``.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError("config.check", f"{path} is no valid text", field=path) from error


@functools.cache
def _list_hints(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(struct)]


class YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, with every error raised as ``yaml.YAMLError`` with its line.

    PyYAML itself raises other errors from its constructors: a date with month 13 is a
    ``ValueError``, ``!!bool x`` a ``KeyError``, ten thousand brackets a ``RecursionError``.
    """

    def get_single_node(self) -> yaml.Node | None:
        """Return the root node of the only document; None if there is no document.

        Raises: yaml.YAMLError (the text does not parse, is nested too deep, or has several
            documents).
        """
        try:
            root: yaml.Node | None = super().get_single_node()
        except RecursionError as error:
            raise yaml.YAMLError("nested too deep") from error
        if root is not None:
            _check_yaml_size(root)
        return root

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the Python value of a node.

        Raises: yaml.YAMLError (its text is not a value of its kind, such as a date).
        """
        try:
            return cast("object", super().construct_object(node, deep))  # pyright: ignore[reportUnknownMemberType]
        except yaml.YAMLError:
            raise
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            what = f"{str(node.value)[:100]!r} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document; None if it is empty.

    Raises: yaml.YAMLError (the text is not one valid document).
    """
    loader = YamlLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()  # pyright: ignore[reportUnknownMemberType]


def read_environment() -> dict[str, str]:
    """Return a copy of the process environment, for ``resolve_config`` and child processes."""
    return dict(os.environ)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without secrets, and with ``extra``, for a child process.

    A child gets its configuration over its own channel. An API key in its environment could be read
    in ``/proc`` as long as it lives. The limit on the instruction set is kept.
    """
    env = {k: v for k, v in os.environ.items() if k == MAX_ISA or not k.startswith(ENV_PREFIX)}
    env.update(extra or {})
    return env


def set_library_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, for a library that has no other configuration.

    Call it before the library is imported. Child processes inherit the variables.
    """
    os.environ.update(values)


def let_idle_threads_sleep() -> None:
    """Make OpenMP's threads sleep while they wait, unless the user has set this. Call before torch.

    If they spin instead, they starve the threads of our kernels that share their cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def cap_libraries() -> None:
    """Apply ``TANDEM_MAX_ISA`` to torch, MKL and oneDNN, which read their variables when imported.

    ``import tandem`` calls this, so it comes before our first import of torch. Child processes
    inherit the variables. Does nothing if torch is loaded already or the name is unknown;
    ``read_max_isa``, which all native code calls, refuses both.
    """
    if "torch" not in sys.modules:
        os.environ.update(list_library_caps())


def choose_isa(cap: str, usable: Sequence[str]) -> tuple[str, str]:
    """Return the instruction set that native kernels use by themselves, and the reason.

    Args:
        cap: value of ``TANDEM_MAX_ISA``; empty: none.
        usable: instruction sets that the CPU and this build have, the widest last.
    """
    isa = next(name for name in reversed(usable) if name != "amx")
    if cap and cap == usable[-1]:
        return isa, f"{MAX_ISA}={cap} allows no wider one"
    reason = "the widest that this CPU, its operating system and this build have"
    if usable[-1] == "amx":
        reason += ", but for amx, which has to be named"
    return isa, reason


def read_max_isa() -> str | None:
    """Return the limit on the instruction set (``TANDEM_MAX_ISA``); None if there is none.

    Raises:
        ConfigError: it is not the name of an instruction set.
        UnsupportedError: torch was loaded before the limit was applied to it.
    """
    isa = os.environ.get(MAX_ISA)
    if not isa:
        return None
    if isa not in ISA_VARIABLES:
        what = f"{MAX_ISA}={isa}: choose one of {', '.join(ISA_VARIABLES)}"
        raise ConfigError("config.max_isa", what, field="max_isa")
    late = [f"{k}={v}" for k, v in list_library_caps().items() if os.environ.get(k) != v]
    if late:
        what = (
            f"{MAX_ISA}={isa}, but torch was loaded without {' '.join(late)}: import tandem before "
            "torch, or set these variables too"
        )
        raise UnsupportedError("config.max_isa", what)
    return isa


def list_library_caps() -> dict[str, str]:
    """Return the environment variables that limit torch, MKL and oneDNN to ``TANDEM_MAX_ISA``."""
    values = ISA_VARIABLES.get(os.environ.get(MAX_ISA, ""), ())
    return {name: value for name, value in zip(LIBRARY_VARIABLES, values, strict=False) if value}


class _Text(str):
    """A value that a user typed or set in the environment, to be parsed by the type of its
    field.
    """

    __slots__ = ()


def _walk_fields(struct: type[msgspec.Struct], prefix: str) -> Iterator[ConfigField]:
    info = cast("mi.StructType", mi.type_info(struct))
    for field in info.fields:
        path = f"{prefix}{field.name}"
        kind, meta = _unwrap(field.type)
        if isinstance(kind, mi.StructType):
            yield from _walk_fields(kind.cls, path + ".")
            continue
        description = meta.get("description")
        assert description, f"setting {path} has no description"
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield ConfigField(
            path=path,
            type_name=_type_name(kind),
            default=default,
            description=str(description),
            secret=bool(meta.get("secret", False)),
        )


def _unwrap(kind: mi.Type) -> tuple[mi.Type, dict[str, Any]]:
    meta: dict[str, Any] = {}
    while isinstance(kind, mi.Metadata):
        extras = cast("list[dict[str, Any] | None]", [kind.extra_json_schema, kind.extra])  # pyright: ignore[reportUnknownMemberType]
        for extra in extras:
            meta.update(extra or {})
        kind = kind.type
    return kind, meta


def _type_name(kind: mi.Type) -> str:
    if isinstance(kind, mi.UnionType):
        return " | ".join(_type_name(_unwrap(part)[0]) for part in kind.types)
    if isinstance(kind, mi.LiteralType):
        return " | ".join(str(value) for value in kind.values)
    if isinstance(kind, mi.CollectionType):
        return "list"
    names = {mi.IntType: "int", mi.FloatType: "float", mi.StrType: "str", mi.BoolType: "bool"}
    for cls, name in names.items():
        if isinstance(kind, cls):
            return name
    return "none" if isinstance(kind, mi.NoneType) else type(kind).__name__.removesuffix("Type")


def _check_yaml_size(root: yaml.Node) -> None:
    stack, seen = [(root, 0)], 0
    while stack:
        node, depth = stack.pop()
        seen += 1
        if seen > MAX_YAML_NODES or depth > MAX_YAML_DEPTH:
            what = f"over {MAX_YAML_NODES} values or {MAX_YAML_DEPTH} levels deep"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            stack += [(child, depth + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            stack += [(child, depth + 1) for pair in node.value for child in pair]


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        data = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config.read", f"{file}: {error.strerror}: give a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config.read", f"{file} is not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError("config.read", f"{file}: the top level must be a mapping of sections")
    return cast("dict[str, Any]", data)


def _flatten(
    data: Mapping[str, Any], fields: Mapping[str, ConfigField], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = f"{prefix}{key}"
        if value is None and any(name.startswith(path + ".") for name in fields):
            continue  # The section contains only comments.
        if isinstance(value, dict) and path not in fields:
            yield from _flatten(cast("dict[str, Any]", value), fields, path + ".")
        else:
            yield path, value


def _unknown(path: str, origin: str, fields: Mapping[str, ConfigField]) -> str:
    near = difflib.get_close_matches(path, list(fields), n=1)
    hint = f"; did you mean {near[0]}?" if near else "; `tandem config show` lists all"
    return f"there is no setting {path} (from {origin}){hint}"


def _build(
    struct: type[T], prefix: str, values: Mapping[str, Any], origins: Mapping[str, str]
) -> T:
    info = cast("mi.StructType", mi.type_info(struct))
    arguments: dict[str, Any] = {}
    hints = msgspec.structs.fields(struct)
    for field, hint in zip(info.fields, hints, strict=True):
        path = f"{prefix}{field.name}"
        kind, _ = _unwrap(field.type)
        if isinstance(kind, mi.StructType):
            arguments[field.name] = _build(kind.cls, path + ".", values, origins)
        elif path in values:
            arguments[field.name] = _convert(path, values[path], hint.type, kind, origins[path])
        elif field.required:
            raise ConfigError("config.resolve", f"setting {path} is required", field=path)
    return struct(**arguments)


def _convert(path: str, value: Any, hint: Any, kind: mi.Type, origin: str) -> Any:
    if isinstance(value, _Text):
        takes_list = isinstance(kind, mi.CollectionType) or (
            isinstance(kind, mi.UnionType)
            and any(isinstance(_unwrap(part)[0], mi.CollectionType) for part in kind.types)
        )
        value = (
            [part for part in value.split(",") if part] if takes_list else _read(str(value), kind)
        )
        strict = False
    else:
        strict = True
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError as error:
        what = f"{path} (from {origin}): {error}{_describe_choices(kind)}"
        raise ConfigError("config.resolve", what, field=path) from error


def _read(text: str, kind: mi.Type) -> str:
    """Return a text that a user typed in the form that its setting takes: a number in full, a
    choice by its own name.
    """
    kinds = [_unwrap(part)[0] for part in kind.types] if isinstance(kind, mi.UnionType) else [kind]
    lower = text.lower()
    if any(isinstance(each, mi.IntType) for each in kinds):
        if (count := COUNT_PATTERN.fullmatch(text)) is not None:
            return str(int(float(count[1]) * 1024 ** POWERS[count[2].lower()]))
        if text and re.search(SIZE_PATTERN, text):
            return str(parse_size(text))
    if any(isinstance(each, mi.BoolType) for each in kinds):
        return WORDS.get(lower, lower)
    for each in kinds:
        if isinstance(each, mi.LiteralType | mi.EnumType):
            known = each.values if isinstance(each, mi.LiteralType) else [m.value for m in each.cls]
            for wanted in (lower, SYNONYMS.get(lower, "")):
                found = [value for value in known if str(value).lower() == wanted]
                if found and text not in known:
                    return str(found[0])
    return text


def _describe_choices(kind: mi.Type) -> str:
    """Return ``: one of a, b`` to append to the description of a setting with a fixed set of
    values; else an empty string.
    """
    if isinstance(kind, mi.CollectionType):
        kind = _unwrap(kind.item_type)[0]
    if isinstance(kind, mi.LiteralType):
        return f": one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, mi.EnumType):
        return f": one of {', '.join(str(member.value) for member in kind.cls)}"
    return ""


def mask_secrets(
    fields: Sequence[ConfigField], config: msgspec.Struct
) -> list[tuple[ConfigField, Any]]:
    """Return each setting with its value in ``config``; a secret that is set appears as ``***``."""
    rows: list[tuple[ConfigField, Any]] = []
    for field in fields:
        value: Any = config
        for name in field.path.split("."):
            value = getattr(value, name)
        rows.append((field, "***" if field.secret and value else value))
    return rows
