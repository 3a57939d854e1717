"""The operators that a pass looks for, from its rules and the operator names in its code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from clika_ref.core.operators import Operator
from clika_ref.core.passes import Pass
from clika_ref.core.rewriter import Rule

METHOD_WRAPPERS = (classmethod, staticmethod, property)


def collect_rules(p: Pass) -> list[Rule]:
    """Return the rules that a pass can reach, sorted by name; empty if it visits the graph without rules."""
    found = {item.name: item for item in _collect_reachable(p) if isinstance(item, Rule)}
    return [found[name] for name in sorted(found)]


def find_operator_groups(p: Pass | Rule, operators: Mapping[str, Operator]) -> list[tuple[str, ...]]:
    """Return the groups of operators in the code of a pass or rule, each sorted; a name in code is its own group.

    A table of a hundred elementwise operators is one group, like a single name. Drawing a group first therefore favours
    the operators that a pattern depends on.
    """
    groups: set[tuple[str, ...]] = set()
    for item in _collect_reachable(p):
        names = [item] if isinstance(item, str) else _find_operator_names(item)
        known = sorted({name for name in names if isinstance(name, str) and name in operators})
        if known:
            groups.add(tuple(known))
    return sorted(groups)


def _find_operator_names(item: Any) -> Collection[Any]:
    if isinstance(item, Rule):
        return item.kinds
    return item if isinstance(item, tuple | list | set | frozenset | dict) else ()


def _collect_reachable(p: Pass | Rule) -> Iterator[Any]:
    """Yield the objects that a pass can refer to.

    These are its options, and the functions, classes, tables and constants of its own package.
    """
    rule = p if isinstance(p, Rule) else None
    package = (rule.rewrite if rule else type(p)).__module__.partition(".")[0]
    seen: set[int] = set()
    options = () if rule else getattr(p, "__dict__", {}).values()
    stack: list[Any] = [rule or type(p), *(option for option in options if not isinstance(option, str))]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        stack.extend(_parts(item, package))


def _parts(item: Any, package: str) -> list[Any]:
    if isinstance(item, Rule):
        return [item.rewrite]
    if isinstance(item, tuple | list | set | frozenset):
        return [part for part in item if not isinstance(part, str)]
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, METHOD_WRAPPERS):
        return [getattr(item, "__func__", None) or getattr(item, "fget", None)]
    if isinstance(item, MethodType):
        return [item.__func__]
    if not isinstance(item, type | FunctionType) or item.__module__.partition(".")[0] != package:
        return []
    if isinstance(item, type):
        return [part for name, part in vars(item).items() if name not in {"__module__", "__doc__"}]
    cells = [cell.cell_contents for cell in item.__closure__ or ()]
    codes = [*_codes(item.__code__)]
    constants = [c for code in codes for c in code.co_consts if not isinstance(c, CodeType)]
    names = sorted({name for code in codes for name in code.co_names} & item.__globals__.keys())
    return [*cells, *constants, *(item.__globals__[name] for name in names)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
