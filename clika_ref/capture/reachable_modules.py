"""Find the modules that a function can reach, and modules that a model calls but does not own."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from clika_ref.capture.origins import find_calling_line, is_installed_file

MAX_SEARCH_DEPTH = 4
"""Maximum number of containers, objects and functions between a function and a module that it uses."""

MAX_SEARCHED_ENTRIES = 500
"""Maximum number of searched entries per container: functions also name data, possibly with millions of entries."""

MAX_VALUES_PER_DEPTH = 10_000
"""Maximum number of values at one depth before the search stops opening containers (some ten milliseconds)."""

GLOBAL_LOAD_OPCODES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
"""Instructions that read a global. A code object lists names of globals and of attributes in the same table."""


def find_reachable_modules(function: Callable[..., Any]) -> dict[str, nn.Module | nn.Parameter]:
    """Return the modules and loose parameters that a function can reach, each once, under valid submodule names.

    The search covers its closure, the globals it names, and its bound object; in these, dicts, lists, tuples, object
    attributes, and other functions of the user. The nearest come first. Only the first `MAX_SEARCHED_ENTRIES` entries
    of a large container are searched.
    """
    found: dict[str, nn.Module | nn.Parameter] = {}
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", function)]
    for _ in range(MAX_SEARCH_DEPTH + 1):
        beyond: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen:
                continue
            if isinstance(value, nn.Module | nn.Parameter):
                seen.update(map(id, value.modules() if isinstance(value, nn.Module) else (value,)))
                found[_make_name(path, found)] = value
            elif len(beyond) < MAX_VALUES_PER_DEPTH:
                seen.add(id(value))
                inner = islice(_list_references(value).items(), MAX_SEARCHED_ENTRIES)
                beyond += [(f"{path}_{step}" if path else str(step), v) for step, v in inner]
        level = beyond
    return found


def _list_references(value: Any) -> Mapping[Any, Any]:
    """Return the values that a value refers to, by a readable name."""
    if isinstance(value, dict):  # no other mapping: it may compute or load its values on access
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value[:MAX_SEARCHED_ENTRIES]))
    if isinstance(value, functools.partial):
        return {"function": value.func, **dict(enumerate(value.args)), **value.keywords}
    if inspect.isfunction(value):
        return {} if is_installed_file(value.__code__.co_filename) else find_referenced_names(value)
    if inspect.ismethod(value):
        return {**_list_references(value.__self__), **_list_references(value.__func__)}
    if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
        return {}
    return {**vars(value), **_list_references(inspect.getattr_static(type(value), "__call__", None))}


def find_referenced_names(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function, and the globals that it or its inner functions name."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL_LOAD_OPCODES)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    outside = {n: function.__globals__[n] for n in sorted(names & function.__globals__.keys())}
    filled = {n: c for n, c in cells.items() if c != types.CellType()}  # skip cells of variables that are not bound yet
    return {**outside, **{n: c.cell_contents for n, c in filled.items()}}


def _make_name(path: str, taken: Mapping[str, Any]) -> str:
    word = re.sub(r"\W", "_", path) or "module"
    if hasattr(nn.Module(), word):  # a submodule cannot have the name of a method or attribute of nn.Module
        word += "_"
    name, count = word, 1
    while name in taken:
        name, count = f"{word}_{count}", count + 1
    return name


@contextlib.contextmanager
def record_unowned_modules(owner: nn.Module, name: str) -> Iterator[list[str]]:
    """Yield warnings about modules with weights that run while the context lasts but are no part of ``owner``."""
    found: list[str] = []
    known, thread = {id(m) for m in owner.modules()}, threading.get_ident()
    visited: list[nn.Module] = []  # keeps them alive, so that ids are not reused

    def check_module(module: nn.Module, _: Any) -> None:
        if id(module) in known or threading.get_ident() != thread:
            return
        visited.append(module)
        known.update(id(part) for part in module.modules())
        if any(True for _ in (*module.parameters(), *module.buffers())):
            line = find_calling_line(sys._getframe(1))
            found.append(
                f"{type(module).__name__}{f', called at {line},' if line else ''} is not part of {name}: its weights "
                "become constants that are not trained, and its train or eval mode does not change. Make it a "
                "submodule (an attribute, nn.ModuleList, nn.ModuleDict), or keep it in a variable, list or dict that "
                "the function refers to by name."
            )

    handle = register_module_forward_pre_hook(check_module)
    try:
        yield found
    finally:
        handle.remove()
