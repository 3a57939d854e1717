"""The public objects: importable from the top level, listed in ``__all__``, and imported only on first use."""

import inspect
import re
import subprocess
import sys
import typing

import pytest

import clika_ref


@pytest.mark.parametrize("name", clika_ref.__all__)
def test_public_object_importable_and_documented(name):
    """Each public name is importable from `clika_ref` and has a docstring."""
    found = getattr(clika_ref, name)
    if name in ("AnyCallable", "ModelArgType"):  # type aliases
        assert typing.get_origin(found) is not None or typing.get_args(found)
        return
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__name__ == name
    assert found.__module__ == f"clika_ref.{clika_ref.MODULE_BY_PUBLIC_NAME[name]}"
    first, *_ = (inspect.getdoc(found) or "").splitlines() or [""]
    assert first.rstrip().endswith((".", ",", ":")), f"{name} is not documented"


def test_public_names_match_all_table_and_dir():
    """`__all__`, `dir` and the table of modules list the same public names."""
    assert clika_ref.__all__ == sorted(clika_ref.MODULE_BY_PUBLIC_NAME) == dir(clika_ref)
    assert not [name for name in clika_ref.__all__ if name.startswith("_")]


def test_getattr_unknown_name_lists_public_names():
    """An unknown attribute of `clika_ref` raises an error that lists the public names."""
    with pytest.raises(AttributeError, match=r"clika_ref has no 'compile'; it offers .*clika_compile"):
        _ = clika_ref.compile


def run_in_new_interpreter(code: str) -> list[str]:
    """Run code in a new interpreter; return the words that it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_package_loads_no_heavy_library():
    """`import clika_ref` loads no heavy library, torch included."""
    heavy = ("torch", "sympy", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "hypothesis", "rich", "typer")
    loaded = run_in_new_interpreter(f"import sys, clika_ref; print(*[m for m in {heavy!r} if m in sys.modules])")
    assert loaded == []


@pytest.mark.slow
def test_import_clika_compile_loads_no_lazy_library():
    """Importing `clika_compile` loads no library that only its call needs."""
    heavy = ("sympy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "hypothesis", "rich", "typer")
    code = f"import sys; from clika_ref import clika_compile; print(*[m for m in {heavy!r} if m in sys.modules])"
    assert run_in_new_interpreter(code) == []


@pytest.mark.slow
def test_first_compilation_loads_no_yaml_and_no_pictures():
    """A compilation and its plugins load neither the parser of settings files nor the code of pictures and reports."""
    heavy = ("ruamel", "clika_ref_visualize.pictures", "clika_ref_visualize.report", "onnxruntime", "openvino", "numba")
    code = f"""
import sys, torch
from clika_ref import clika_compile
clika_compile(torch.nn.Linear(3, 3), tracing_inputs=[torch.randn(2, 3)])
print(*[m for m in {heavy!r} if m in sys.modules])
"""
    assert run_in_new_interpreter(code) == []


def test_type_checking_block_imports_every_public_name():
    """The TYPE_CHECKING block imports every public name for type checkers."""
    source = inspect.getsource(clika_ref)
    block = source[source.index("if TYPE_CHECKING") : source.index("MODULE_BY_PUBLIC_NAME")]
    block = re.sub(r"import \(\s+", "import ", block)  # ruff wraps long imports
    missing = [name for name in clika_ref.__all__ if f"import {name} as {name}" not in block]
    assert missing == []
