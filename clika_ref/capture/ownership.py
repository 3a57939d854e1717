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

from clika_ref.capture.origins import is_packaged
from clika_ref.capture.watching import line_of

DEPTH = 4
"""Maximum number of containers, objects and functions between a function and a module that it uses."""

ENTRIES = 500
"""Maximum number of searched entries per container: functions also name data, possibly with millions of entries."""

VALUES = 10_000
"""Maximum number of values at one depth before the search stops opening containers (some ten milliseconds)."""

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
"""Instructions that read a global. A code object lists names of globals and of attributes in the same table."""


def reachable(function: Callable[..., Any]) -> dict[str, nn.Module | nn.Parameter]:
    """Return the modules and loose parameters that a function can reach, each once, under valid submodule names.

    The search covers its closure, the globals it names, and its bound object; in these, dicts, lists, tuples, object
    attributes, and other functions of the user. The nearest come first. Only the first `ENTRIES` entries of a large
    container are searched.
    """
    found: dict[str, nn.Module | nn.Parameter] = {}
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", function)]
    for _ in range(DEPTH + 1):
        beyond: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen:
                continue
            if isinstance(value, nn.Module | nn.Parameter):
                seen.update(map(id, value.modules() if isinstance(value, nn.Module) else (value,)))
                found[_name(path, found)] = value
            elif len(beyond) < VALUES:
                seen.add(id(value))
                inner = islice(_inside(value).items(), ENTRIES)
                beyond += [(f"{path}_{step}" if path else str(step), v) for step, v in inner]
        level = beyond
    return found


def _inside(value: Any) -> Mapping[Any, Any]:
    """Return the values that a value refers to, by a readable name."""
    if isinstance(value, dict):  # no other mapping: it may compute or load its values on access
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value[:ENTRIES]))
    if isinstance(value, functools.partial):
        return {"function": value.func, **dict(enumerate(value.args)), **value.keywords}
    if inspect.isfunction(value):
        return {} if is_packaged(value.__code__.co_filename) else named_by(value)
    if inspect.ismethod(value):
        return {**_inside(value.__self__), **_inside(value.__func__)}
    if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
        return {}
    return {**vars(value), **_inside(inspect.getattr_static(type(value), "__call__", None))}


def named_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function, and the globals that it or its inner functions name."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    outside = {n: function.__globals__[n] for n in sorted(names & function.__globals__.keys())}
    filled = {n: c for n, c in cells.items() if c != types.CellType()}  # skip cells of variables that are not bound yet
    return {**outside, **{n: c.cell_contents for n, c in filled.items()}}


def _name(path: str, taken: Mapping[str, Any]) -> str:
    word = re.sub(r"\W", "_", path) or "module"
    if hasattr(nn.Module(), word):  # a submodule cannot have the name of a method or attribute of nn.Module
        word += "_"
    name, count = word, 1
    while name in taken:
        name, count = f"{word}_{count}", count + 1
    return name


@contextlib.contextmanager
def strangers(owner: nn.Module, name: str) -> Iterator[list[str]]:
    """Yield warnings about modules with weights that run while the context lasts but are no part of ``owner``."""
    found: list[str] = []
    known, thread = {id(m) for m in owner.modules()}, threading.get_ident()
    kept: list[nn.Module] = []  # keeps them alive, so that ids are not reused

    def look(module: nn.Module, _: Any) -> None:
        if id(module) in known or threading.get_ident() != thread:
            return
        kept.append(module)
        known.update(id(part) for part in module.modules())
        if any(True for _ in (*module.parameters(), *module.buffers())):
            line = line_of(sys._getframe(1))
            found.append(
                f"{type(module).__name__}{f', called at {line},' if line else ''} is no part of {name}: its weights "
                "become constants that are not trained, and it stays in the mode that it is in. Make it a part (an "
                "attribute, nn.ModuleList, nn.ModuleDict), or hold it in a variable, list or dict that a function names"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield found
    finally:
        handle.remove()
