"""What a mutant is, and the decorators that seed one: a lowering, a type rule or a pass that is wrong in one way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from clika_ref.core.inference import forget_types
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry

Applied = Callable[[Registry], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One seeded fault. ``subject`` is the operator or pass whose checks must find it."""

    name: str
    subject: str
    change: str
    """What is wrong, in one sentence."""
    levels: tuple[str, ...]
    """The levels that are to find it, before others do."""
    apply: Applied
    """Makes a registry faulty for the time of a ``with`` block."""
    blind: bool = False
    """Whether its author had seen neither samples nor tests."""

    @contextlib.contextmanager
    def seeded(self, registry: Registry) -> Iterator[None]:
        """Make a registry faulty within the block, and as it was behind it; types inferred before are forgotten."""
        forget_types()
        try:
            with self.apply(registry):
                yield
        finally:
            forget_types()


class Catalogue:
    """The mutants of one file. Its decorators take what is wrong and the faulty code.

    >>> faults = Catalogue("pooling")
    >>> @faults.lowering("avg_pool2d", "ceil_mode is ignored")
    ... def _(original, op, *operands, **attrs):
    ...     return original(op, *operands, **{**attrs, "ceil_mode": False})
    >>> faults.mutants[0].name
    'pooling-1-avg_pool2d'
    """

    def __init__(self, name: str, *, blind: bool = False) -> None:
        self.name = name
        self.blind = blind
        self.mutants: list[Mutant] = []

    def lowering(self, subject: str, change: str, *, levels: tuple[str, ...] = ("operators",)) -> Callable[..., Any]:
        """Seed a faulty lowering: ``(original, op, *operands, **attributes)``."""

        def declare(faulty: Callable[..., Any]) -> Callable[..., Any]:
            self._add(subject, change, levels, lambda registry: _slot(registry.operators[subject], "lowering", faulty))
            return faulty

        return declare

    def type_rule(self, subject: str, change: str, *, levels: tuple[str, ...] = ("dynamic",)) -> Callable[..., Any]:
        """Seed a faulty type rule: ``(original, *operand types, **attributes)``."""

        def declare(faulty: Callable[..., Any]) -> Callable[..., Any]:
            self._add(subject, change, levels, lambda registry: _slot(registry.operators[subject], "type_rule", faulty))
            return faulty

        return declare

    def rewrite(self, subject: str, change: str, *, levels: tuple[str, ...] = ("passes",)) -> Callable[..., Any]:
        """Seed a faulty pass: ``(original, graph, operators)`` changes the graph in place."""

        def declare(faulty: Callable[..., Any]) -> Callable[..., Any]:
            self._add(subject, change, levels, lambda registry: _pass(registry, subject, faulty))
            return faulty

        return declare

    def patch(self, subject: str, change: str, *, levels: tuple[str, ...]) -> Callable[..., Any]:
        """Seed any other fault: a generator function ``(registry)`` that patches, yields, and restores."""

        def declare(faulty: Callable[[Registry], Iterator[None]]) -> Callable[..., Any]:
            self._add(subject, change, levels, contextlib.contextmanager(faulty))
            return faulty

        return declare

    def _add(self, subject: str, change: str, levels: tuple[str, ...], apply: Applied) -> None:
        name = f"{self.name}-{len(self.mutants) + 1}-{subject}"
        self.mutants.append(Mutant(name, subject, change, levels, apply, self.blind))


def nothing() -> Applied:
    """Return what changes nothing: for the test that a suite without a fault finds none."""
    return lambda _: contextlib.nullcontext()


@contextlib.contextmanager
def _slot(op: Operator, slot: str, faulty: Callable[..., Any]) -> Iterator[None]:
    original = getattr(op, slot)

    def replaced(*operands: Any, **attrs: Any) -> Any:
        return faulty(original, *operands, **attrs)

    setattr(op, slot, replaced)
    try:
        yield
    finally:
        setattr(op, slot, original)


@contextlib.contextmanager
def _pass(registry: Registry, subject: str, faulty: Callable[..., Any]) -> Iterator[None]:
    kind = type(registry.passes[subject])
    original = kind.__call__

    def replaced(self: Any, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        faulty(lambda g, o: original(self, g, o), graph, operators)

    replaced.__module__ = kind.__module__  # the suite reads the code of a pass: this stands for it
    kind.__call__ = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__call__ = original  # type: ignore[method-assign]
