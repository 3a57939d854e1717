"""The errors that a function may raise, itself or through its callees, read from its code."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

DEPTH = 3
"""Depth to which calls are followed; deeper functions list their errors in docstrings, which a test checks."""

CLIKA_ERRORS = {"ModelError", "PassError", "PluginError", "TargetError", "ValueError"}

OF_LOADING = {"load_registry"}
"""Functions that load plugins on first use; docs/api/index.md lists their errors once for all functions."""


def find_errors(function: Callable[..., Any], owner: type | None) -> set[str]:
    """Return the classes of errors that may leave a function, a method of ``owner`` or of nothing."""
    return _find_errors(function, owner, (function,))


def _find_errors(function: Callable[..., Any], owner: type | None, path: tuple[Callable[..., Any], ...]) -> set[str]:
    node = parse_source(function)
    if node is None:
        return set()
    found = find_raised_errors(node)
    found |= set() if len(path) == 1 else find_documented_errors(function)
    if len(path) <= DEPTH:
        for called, its_owner in find_called_functions(node, function, owner):
            if called not in path and called.__name__ not in OF_LOADING:
                found |= _find_errors(called, its_owner, (*path, called))
    caught = {n.id for n in _handled_types(node)}
    return set() if "ClikaError" in caught else (found & CLIKA_ERRORS) - caught


def parse_source(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the source of a function; None if it is not written in Python."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def find_raised_errors(function: ast.FunctionDef) -> set[str]:
    """Return the classes of errors that a function itself raises by name, without those of inner functions."""
    inner = {
        id(n) for d in ast.walk(function) if isinstance(d, ast.FunctionDef) and d is not function for n in ast.walk(d)
    }
    nodes = [n.exc for n in ast.walk(function) if isinstance(n, ast.Raise) and n.exc is not None and id(n) not in inner]
    called = [n.func if isinstance(n, ast.Call) else n for n in nodes]
    return {n.id for n in called if isinstance(n, ast.Name) and n.id.endswith("Error")}


def find_documented_errors(function: Callable[..., Any]) -> set[str]:
    """Return the classes of errors that a docstring lists."""
    return set(re.findall(r"^\s+(\w+Error):", inspect.getdoc(function) or "", re.MULTILINE))


def find_called_functions(
    node: ast.FunctionDef, function: Callable[..., Any], owner: type | None
) -> Iterator[tuple[Callable[..., Any], type | None]]:
    """Yield the functions of this project that a function calls by name, and the methods of its class."""
    names = vars(importlib.import_module(function.__module__))
    for call in (n.func for n in ast.walk(node) if isinstance(n, ast.Call)):
        if isinstance(call, ast.Name):
            found = names.get(call.id)
            if inspect.isfunction(found) and found.__module__.startswith("clika_ref"):
                yield found, None
        elif isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id in ("self", "cls"):
            method = inspect.getattr_static(owner, call.attr, None)
            method = getattr(method, "__func__", method)
            if inspect.isfunction(method):
                yield method, owner


def _handled_types(node: ast.FunctionDef) -> Iterator[ast.Name]:
    for handler in ast.walk(node):
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None:
            yield from (n for n in ast.walk(handler.type) if isinstance(n, ast.Name))
