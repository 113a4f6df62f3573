"""Goal: a native error becomes the Python error of its code, with all its context."""

import subprocess
import sys

import pytest

from tandem import _native
from tandem.core.errors import ERROR_CODES, TandemError, UnsupportedError


def test_codes_are_those_of_python_in_order():
    assert _native.error_codes() == list(ERROR_CODES)


@pytest.mark.parametrize("code", ERROR_CODES)
def test_error_keeps_class_and_context(code: str):
    with pytest.raises(ERROR_CODES[code]) as caught:
        _native.raise_error(code, "pool.submit", "7 of 8: wait", "threads")
    assert type(caught.value) is ERROR_CODES[code]
    assert str(caught.value) == "[pool.submit] 7 of 8: wait"
    assert (caught.value.where, caught.value.field) == ("pool.submit", "threads")


def test_empty_field_is_none():
    with pytest.raises(TandemError) as caught:
        _native.raise_error("internal", "a.b", "c")
    assert caught.value.field is None


def test_missing_extension_says_how_to_build(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tandem._native._core", None)
    monkeypatch.delitem(sys.modules, "tandem._native")
    with pytest.raises(UnsupportedError, match="pip install -e"):
        __import__("tandem._native")


def test_extension_loads_neither_torch_nor_numpy():
    code = "import sys, tandem._native; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "set()"
