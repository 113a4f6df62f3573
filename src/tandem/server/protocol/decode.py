"""Decoding of a body to a request struct, or to an error that names the field.

msgspec checks types and bounds. This module adds the place of a syntax error or of invalid UTF-8,
and refuses known fields that are not supported and must not be ignored.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from tandem.core.errors import ConfigError, UnsupportedError

__all__ = [
    "MAX_CONTAINERS",
    "check_containers",
    "decode_body",
    "refuse_unsupported",
    "round_integral",
]

_T = TypeVar("_T")
_PATH = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_BYTE = re.compile(r"\(byte (?P<offset>\d+)\)")
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[{}\[\]:,]|[^\s"{}\[\]:,]+')
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_SURROGATE = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>\\u[dD][89a-fA-F])"
)
"""Pattern of an escaped backslash or a whole surrogate pair, which are skipped, or of a lone
half."""
_LONGEST_SCAN = 1 << 16
"""Number of bytes that are searched for the place of a syntax error; beyond, the error gives an
offset."""
MAX_CONTAINERS = 2**18
"""Largest number of lists and objects in a body. One call decodes a body with the interpreter's
lock held, and the garbage collector visits each container repeatedly: ten times as many take
seconds, in which no other client is served. 65,536 messages with parts have three containers each.
"""
_CONTAINER_OR_TEXT = re.compile(rb'[\[{]|"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NEUTRAL = (b"null", b"false", b"[]", b"{}", b'""', b"0")
"""Values with which an unsupported field asks for nothing."""

_top_level = msgspec.json.Decoder(dict[str, Raw])


def decode_body(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Decode a JSON body.

    Raises:
        ConfigError: the body is not JSON, not UTF-8 or nested too deep, or a field, named by
            ``field``, has a wrong type or value.
    """
    check_containers(body)
    try:
        # msgspec does not check unknown fields for UTF-8, so the whole body is decoded first.
        body.decode()
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        text = f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        raise _syntax_error(text, body, error.start) from error
    except msgspec.ValidationError as error:
        text = str(error)
        if "got `float`" in text:
            try:
                # In JSON, and in JSON Schema, 1.0 is an integer: integral floats are converted and
                # the body is read again.
                value = round_integral(msgspec.json.decode(body))
                return msgspec.convert(value, decoder.type, str_keys=True)
            except (msgspec.MsgspecError, RecursionError):
                pass  # Report the first error.
        found = _PATH.search(text)
        # In msgspec's error messages ``[...]`` is the path of a value in a mapping; the suffix is
        # removed, since it names no field.
        field = found["path"].removeprefix(".").removesuffix("[...]") if found is not None else ""
        what = text[: found.start()] if found is not None else text
        missing = _MISSING.search(what)
        if missing is not None:
            field = f"{field}.{missing['name']}".removeprefix(".")
        where = f"{field}: " if field else ""
        raise ConfigError("server.decode", f"{where}{what}", field=field or None) from error
    except msgspec.DecodeError as error:
        found = _BYTE.search(str(error))
        offset = int(found["offset"]) if found is not None else len(body)
        # msgspec reports half a surrogate pair at the end of a string as a truncated body: the half
        # is looked for, to name the true mistake.
        halves = (m for m in _SURROGATE.finditer(body, 0, _LONGEST_SCAN) if m["lone"] is not None)
        half = next(halves, None)
        if half is not None and half.start() < offset:
            text = "the body holds half of a surrogate pair"
            raise _syntax_error(text, body, half.start()) from error
        raise _syntax_error(f"the body is not valid JSON: {error}", body, offset) from error
    except RecursionError as error:
        raise ConfigError("server.decode", "the body is nested too deep") from error


def check_containers(body: bytes) -> None:
    """Check that a body has at most ``MAX_CONTAINERS`` lists and objects; brackets in texts do not
    count.

    Raises:
        ConfigError: there are more.
    """
    if len(body) <= MAX_CONTAINERS or body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    # Matches are counted in a Python loop, not by one call, so that other threads may run in
    # between.
    count = 0
    for found in _CONTAINER_OR_TEXT.finditer(body):
        count += not found[0].startswith(b'"')
        if count > MAX_CONTAINERS:
            what = f"the body has more than {MAX_CONTAINERS} lists and objects: send less at a time"
            raise ConfigError("server.decode", what)


def round_integral(value: Any) -> Any:
    """Return a decoded JSON value with floats that are whole, such as 1.0, replaced by integers."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [round_integral(item) for item in value]
    if isinstance(value, dict):
        return {key: round_integral(item) for key, item in value.items()}
    return value


def refuse_unsupported(body: bytes | Raw, refused: Mapping[str, str], prefix: str = "") -> None:
    """Check that a body has no unsupported field that would change the answer.

    Args:
        body: a JSON object, which was decoded before.
        refused: reason by field name.
        prefix: path of the object, for the error.

    Raises:
        UnsupportedError: it has one; names the field.
    """
    for name, value in _top_level.decode(body).items():
        reason = refused.get(name)
        if reason is not None and bytes(value) not in _NEUTRAL:
            field = f"{prefix}{name}"
            raise UnsupportedError("server.decode", f"{field}: {reason}", field=field)


def _syntax_error(text: str, body: bytes, offset: int) -> ConfigError:
    field = _field_at(body, offset) if offset <= _LONGEST_SCAN else ""
    where = f" in {field}" if field else ""
    return ConfigError("server.decode", f"{text}{where}", field=field or None)


def _field_at(body: bytes, offset: int) -> str:
    """Return the path of the field at byte ``offset``, by scanning the body up to there."""
    path: list[str | int] = []
    key = ""
    for token in _JSON_TOKEN.findall(body[:offset]):
        if token == b"{":
            path.append("")
        elif token == b"[":
            path.append(0)
        elif token in (b"}", b"]"):
            if path:
                path.pop()
        elif token == b":":
            if path and isinstance(path[-1], str):
                path[-1] = key
        elif token == b",":
            if path:
                last = path[-1]
                path[-1] = last + 1 if isinstance(last, int) else ""
        elif token.startswith(b'"'):
            key = token.strip(b'"').decode("utf-8", "replace")
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path if step != "")
    return "".join(steps).removeprefix(".")[:200]
