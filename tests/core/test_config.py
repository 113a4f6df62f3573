"""Layers of configuration, their origins, and errors that name the place."""

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml
from msgspec import Meta

from tandem.core.config import (
    SIZE_PATTERN,
    list_fields,
    list_strange_variables,
    mask_secrets,
    parse_size,
    parse_yaml,
    resolve_config,
)
from tandem.core.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, Meta(ge=1, description="Tokens a block.")] = 64
    order: Annotated[Literal["a", "b"], Meta(description="Order.")] = "a"
    names: Annotated[tuple[str, ...], Meta(description="Names.")] = ()
    limit: Annotated[int | None, Meta(description="Limit.")] = None
    flag: Annotated[bool, Meta(description="Flag.")] = False


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inner: Inner = msgspec.field(default_factory=Inner)
    key: Annotated[str, Meta(description="Key.", extra={"secret": True})] = ""


def test_later_layers_win_and_say_so(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("inner: {block_size: 16, order: b, names: [x]}\n")
    resolved = resolve_config(
        Outer,
        file=file,
        environment={
            "TANDEM_INNER__BLOCK_SIZE": "32",
            "TANDEM_INNER__LIMIT": "7",
            "HOME": "/",
        },
        flags={
            "inner.block_size": ("--inner.block-size", "128"),
            "inner.names": ("--names", "a,b"),
            "inner.flag": ("--flag", "true"),
        },
    )
    inner = resolved.config.inner
    assert (inner.block_size, inner.order, inner.names) == (128, "b", ("a", "b"))
    assert (inner.limit, inner.flag) == (7, True)
    assert resolved.origins["inner.block_size"] == "flag --inner.block-size"
    assert resolved.origins["inner.order"] == "file c.yaml"
    assert resolved.origins["inner.limit"] == "env TANDEM_INNER__LIMIT"
    assert resolved.origins["key"] == "default"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"flags": {"inner.blok_size": ("--inner.blok-size", "1")}}, ["inner.block_size"]),
        ({"flags": {"inner.block_size": ("--bs", "x")}}, ["inner.block_size", "--bs"]),
        ({"flags": {"inner.block_size": ("--bs", "0")}}, ["inner.block_size", ">= 1"]),
        ({"environment": {"TANDEM_INNER__ORDER": "c"}}, ["inner.order", "TANDEM_INNER__ORDER"]),
        ({"environment": {"TANDEM_INNER__NOPE": "c"}}, ["inner.nope"]),
    ],
)
def test_errors_name_field_and_origin(layers, words):
    with pytest.raises(ConfigError) as caught:
        resolve_config(Outer, **layers)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n", "inner: {block_size: [}", "inner: 3\n", "\x00"])
def test_bad_files_are_refused(tmp_path: Path, text: str):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        resolve_config(Outer, file=file)


NO_VALUES = {
    "a date of no calendar": ("{v}: 2020-13-45", "timestamp"),
    "no number": ("{v}: !!int x", "int"),
    "digits without end": ("{v}: " + "9" * 5000, "int"),
    "no truth": ("{v}: !!bool x", "bool"),
    "no time": ("{v}: !!timestamp x", "timestamp"),
    "brackets": ("{v}: " + "[" * sys.getrecursionlimit(), "too deep"),
    "itself": ("{v}: &a {{x: *a}}", "levels deep"),
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_yaml_that_no_constructor_takes_is_refused(tmp_path: Path, name: str):
    text, what = NO_VALUES[name]
    file = tmp_path / "c.yaml"
    file.write_text(text.format(v="inner"))
    with pytest.raises(ConfigError, match=what) as caught:
        resolve_config(Outer, file=file)
    assert "c.yaml is not YAML" in str(caught.value)
    with pytest.raises(yaml.YAMLError, match=what):
        parse_yaml(text.format(v="a"))


def test_a_section_without_settings_is_none(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("inner:\n  # block_size: 16\nkey: x\n")
    assert resolve_config(Outer, file=file).config == Outer(key="x")
    file.write_text("inner:\n  block_size:\n")
    with pytest.raises(ConfigError, match="block_size"):
        resolve_config(Outer, file=file)


def test_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        resolve_config(Outer, file=tmp_path / "none.yaml")


def test_fields_know_their_names_and_secrets_stay_hidden():
    fields = {field.path: field for field in list_fields(Outer)}
    assert fields["inner.block_size"].flag == "--inner.block-size"
    assert fields["inner.block_size"].variable == "TANDEM_INNER__BLOCK_SIZE"
    assert fields["inner.limit"].type_name == "int | none"
    config = resolve_config(Outer, flags={"key": ("--key", "s3cret")}).config
    shown = {field.path: value for field, value in mask_secrets(list(fields.values()), config)}
    assert shown["key"] == "***"
    assert shown["inner.block_size"] == 64


def test_texts_of_people_are_read():
    """Counts and sizes with units, choices and truth values in capitals."""
    cases = [
        ("inner.block_size", "4k", 4096),
        ("inner.block_size", "32K", 32768),
        ("inner.limit", "1.5M", 1572864),
        ("inner.limit", "10MB", 10_000_000),
        ("inner.limit", "10 MiB", 10 << 20),
        ("inner.order", "B", "b"),
        ("inner.flag", "TRUE", True),
        ("inner.flag", "off", False),
        ("inner.names", "4k", ("4k",)),
    ]
    for path, text, expected in cases:
        config = resolve_config(Outer, flags={path: ("--flag", text)}).config
        assert getattr(config.inner, path.partition(".")[2]) == expected, text
    for text in ("4q", "k", "4kk"):
        with pytest.raises(ConfigError, match="block_size"):
            resolve_config(Outer, flags={"inner.block_size": ("--flag", text)})
    sizes = {"16GiB": 16 << 30, "16g": 16 << 30, "16 GB": 16 * 10**9, "1.5kib": 1536, "7": None}
    for text, size in sizes.items():
        assert bool(re.search(SIZE_PATTERN, text)) == (size is not None)
        if size is not None:
            assert parse_size(text) == size
    assert parse_size("") == 0


def test_variables_that_name_nothing_are_found():
    environment = {"TANDEM_PORT": "1", "TANDEM_SERVER__PORT": "2", "TANDEM_MAX_ISA": "avx2"}
    assert list_strange_variables(environment) == ["TANDEM_PORT"]
