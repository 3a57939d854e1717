"""The public objects: all importable from the top, all named as such, and imported only when they are used."""

import inspect
import re
import subprocess
import sys
import typing

import pytest

import clika_ref


@pytest.mark.parametrize("name", clika_ref.__all__)
def test_a_public_object_is_importable_and_documented(name):
    found = getattr(clika_ref, name)
    if name in ("AnyCallable", "ModelArgType"):  # type aliases
        assert typing.get_origin(found) is not None or typing.get_args(found)
        return
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__name__ == name
    assert found.__module__ == f"clika_ref.{clika_ref.MODULE_BY_PUBLIC_NAME[name]}"
    first, *_ = (inspect.getdoc(found) or "").splitlines() or [""]
    assert first.rstrip().endswith((".", ",", ":")), f"{name} is not documented"


def test_the_list_of_public_names_is_that_of_the_table_and_of_dir():
    assert clika_ref.__all__ == sorted(clika_ref.MODULE_BY_PUBLIC_NAME) == dir(clika_ref)
    assert not [name for name in clika_ref.__all__ if name.startswith("_")]


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(AttributeError, match=r"clika_ref has no 'compile'; it offers .*clika_compile"):
        _ = clika_ref.compile


def fresh(code: str) -> list[str]:
    """Run code in a new interpreter; return the words that it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("torch", "sympy", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "hypothesis", "rich", "typer")
    loaded = fresh(f"import sys, clika_ref; print(*[m for m in {heavy!r} if m in sys.modules])")
    assert loaded == []


@pytest.mark.slow
def test_importing_what_compiles_does_not_load_what_it_needs_when_called():
    heavy = ("sympy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "hypothesis", "rich", "typer")
    code = f"import sys; from clika_ref import clika_compile; print(*[m for m in {heavy!r} if m in sys.modules])"
    assert fresh(code) == []


def test_the_type_checker_sees_every_name_that_users_write():
    source = inspect.getsource(clika_ref)
    block = source[source.index("if TYPE_CHECKING") : source.index("MODULE_BY_PUBLIC_NAME")]
    block = re.sub(r"import \(\s+", "import ", block)  # ruff wraps long imports
    missing = [name for name in clika_ref.__all__ if f"import {name} as {name}" not in block]
    assert missing == []
