"""The mutant class, and decorators that seed faulty lowerings, type rules, passes and rewrite rules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from clika_ref.core.inference import clear_type_cache
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.rewriter import Rule
from clika_ref_conformance.mutants.patched_op import PatchedOp, override_attributes

FaultContext = Callable[[Registry], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """One seeded fault, to be found by the checks of ``subject``, an operator or pass."""

    name: str
    subject: str
    change: str
    """The fault, in one sentence."""
    levels: tuple[str, ...]
    """The levels that should find it; others are tried after them."""
    apply: FaultContext
    """Applies the fault to a registry for the duration of a ``with`` block."""
    blind: bool = False
    """Whether its author had seen neither samples nor tests."""

    @contextlib.contextmanager
    def activate(self, registry: Registry) -> Iterator[None]:
        """Apply the fault to a registry within the block, and undo it afterwards; clears the cached types."""
        clear_type_cache()
        try:
            with self.apply(registry):
                yield
        finally:
            clear_type_cache()


class Catalogue:
    """The mutants of one file, with decorators that take a description of the fault and the faulty code.

    >>> faults = Catalogue("pooling")
    >>> @faults.lowering("avg_pool2d", "ceil_mode is ignored")
    ... def _(original, op, *operands, **attrs):
    ...     return original(op, *operands, **{**attrs, "ceil_mode": False})
    >>> faults.mutants[0].name
    'pooling-1-avg_pool2d'
    """

    def __init__(self, name: str, *, blind: bool = False, levels: tuple[str, ...] = ("passes",)) -> None:
        """Create an empty catalogue; ``levels`` are the default levels for faults of functions and rules."""
        self.name = name
        self.blind = blind
        self.levels = levels
        self.mutants: list[Mutant] = []

    def lowering(self, subject: str, change: str, *, levels: tuple[str, ...] = ("operators",)) -> Callable[..., Any]:
        """Seed a faulty lowering: ``(original, op, *operands, **attributes)``."""
        return self._seed(subject, change, levels, partial(_patch_operator_slot, "lowering"))

    def attribute_values(
        self, subject: str, change: str, /, *, levels: tuple[str, ...] = ("operators",), **values: Any
    ) -> None:
        """Seed a lowering that sees other values of some attributes of its operator."""
        self.lowering(subject, change, levels=levels)(
            lambda original, op, *operands, **attrs: original(op, *operands, **{**attrs, **values})
        )

    def node_functions(
        self, subject: str, change: str, /, *, levels: tuple[str, ...] = ("operators",), **instead: Callable[..., Any]
    ) -> None:
        """Seed a lowering with other functions for some ONNX operator types, as of `PatchedOp`."""
        self.lowering(subject, change, levels=levels)(
            lambda original, op, *operands, **attrs: original(PatchedOp(op, **instead), *operands, **attrs)
        )

    def node_attributes(
        self, subject: str, change: str, op_type: str, /, *, levels: tuple[str, ...] = ("operators",), **attributes: Any
    ) -> None:
        """Seed a lowering with other attributes of the nodes of an ONNX operator type; None omits an attribute."""
        self.lowering(subject, change, levels=levels)(
            lambda original, op, *operands, **attrs: original(
                override_attributes(op, op_type, **attributes), *operands, **attrs
            )
        )

    def type_rule(self, subject: str, change: str, *, levels: tuple[str, ...] = ("dynamic",)) -> Callable[..., Any]:
        """Seed a faulty type rule: ``(original, *operand types, **attributes)``."""
        return self._seed(subject, change, levels, partial(_patch_operator_slot, "type_rule"))

    def rewrite(self, subject: str, change: str, *, levels: tuple[str, ...] = ("passes",)) -> Callable[..., Any]:
        """Seed a faulty pass: ``(original, graph, operators)``, which changes the graph in place."""
        return self._seed(subject, change, levels, _patch_pass)

    def function(self, subject: str, change: str, holder: Any, name: str, *levels: str) -> Callable[..., Any]:
        """Seed a faulty function of a module or a class: ``(original, *operands)``."""
        levels = levels or self.levels
        return lambda faulty: self.patch(subject, change, levels=levels)(_make_function_patch(holder, name, faulty))

    def substitute(
        self, subject: str, change: str, holder: Any, name: str, value: Any, *, levels: tuple[str, ...] = ()
    ) -> None:
        """Seed another value of a name of a module or a class."""
        self._add(subject, change, levels or self.levels, lambda _: patch.object(holder, name, value))

    def rule(self, subject: str, change: str, module: Any, name: str) -> Callable[..., Any]:
        """Seed a faulty rule of a pass: ``(original, node, build)``."""
        return lambda faulty: self.patch(subject, change, levels=self.levels)(_make_rule_patch(module, name, faulty))

    def patch(self, subject: str, change: str, *, levels: tuple[str, ...]) -> Callable[..., Any]:
        """Seed any other fault: a generator function ``(registry)`` that patches, yields, and restores."""

        def declare(faulty: Callable[[Registry], Iterator[None]]) -> Callable[..., Any]:
            self._add(subject, change, levels, contextlib.contextmanager(faulty))
            return faulty

        return declare

    def _seed(
        self,
        subject: str,
        change: str,
        levels: tuple[str, ...],
        patch_subject: Callable[..., AbstractContextManager[Any]],
    ) -> Callable[..., Any]:
        """Return the decorator of faulty code that ``patch_subject(registry, subject, faulty)`` puts in place."""

        def declare(faulty: Callable[..., Any]) -> Callable[..., Any]:
            self._add(subject, change, levels, lambda registry: patch_subject(registry, subject, faulty))
            return faulty

        return declare

    def _add(self, subject: str, change: str, levels: tuple[str, ...], apply: FaultContext) -> None:
        name = f"{self.name}-{len(self.mutants) + 1}-{subject}"
        self.mutants.append(Mutant(name, subject, change, levels, apply, self.blind))


class MutantSignatureError(BaseException):
    """The signature of a mutant does not match the original, so that any check would find it.

    Not an ``Exception``, so that the suite does not report it as a failure of a pass.
    """


def _call_faulty(faulty: Callable[..., Any], original: Callable[..., Any], *operands: Any, **named: Any) -> Any:
    """Call faulty code.

    Raises:
        MutantSignatureError: it does not accept these operands.
    """
    _check_signature(faulty, original, *operands, **named)
    return faulty(original, *operands, **named)


def _check_signature(faulty: Callable[..., Any], original: Callable[..., Any], *operands: Any, **named: Any) -> None:
    try:
        inspect.signature(faulty).bind(original, *operands, **named)
    except TypeError as error:
        raise MutantSignatureError(
            f"the mutant of {original.__qualname__} cannot be called in place of it: {error}"
        ) from error


@contextlib.contextmanager
def _patch_operator_slot(slot: str, registry: Registry, subject: str, faulty: Callable[..., Any]) -> Iterator[None]:
    op = registry.operators[subject]
    original = getattr(op, slot)
    _check_signature(faulty, original, *((None,) if slot == "lowering" else ()), *op.operands, **op.attributes)

    def call_faulty(*operands: Any, **attrs: Any) -> Any:
        return _call_faulty(faulty, original, *operands, **attrs)

    setattr(op, slot, call_faulty)
    try:
        yield
    finally:
        setattr(op, slot, original)


@contextlib.contextmanager
def _patch_pass(registry: Registry, subject: str, faulty: Callable[..., Any]) -> Iterator[None]:
    kind = type(registry.passes[subject])
    original = kind.__call__

    def call_faulty(self: Any, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        _call_faulty(faulty, lambda g, o: original(self, g, o), graph, operators)

    call_faulty.__module__ = kind.__module__  # the suite only analyses code in the package of the pass
    kind.__call__ = call_faulty  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__call__ = original  # type: ignore[method-assign]


def _make_function_patch(holder: Any, name: str, faulty: Callable[..., Any]) -> Callable[[Any], Iterator[None]]:
    """Return a patch that replaces a function ``name`` by a faulty one, which gets the original as first argument."""

    def patch_function(_: Registry) -> Iterator[None]:
        original = getattr(holder, name)

        def call_faulty(*operands: Any, **named: Any) -> Any:
            return _call_faulty(faulty, original, *operands, **named)

        call_faulty.__module__ = original.__module__  # the suite only analyses code in the package of the pass
        with patch.object(holder, name, call_faulty):
            yield

    return patch_function


def _make_rule_patch(module: Any, name: str, faulty: Callable[..., Any]) -> Callable[[Any], Iterator[None]]:
    """Return a patch that replaces a rule in a module, and among the rules of its passes."""

    def patch_rule(_: Registry) -> Iterator[None]:
        right: Rule = getattr(module, name)

        def rewrite(node: Any, build: Any) -> Any:
            return _call_faulty(faulty, right.rewrite, node, build)

        rewrite.__module__ = right.rewrite.__module__
        wrong = Rule(right.name, right.kinds, rewrite)
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(module, name, wrong))
            for holder in list(vars(module).values()):
                rules = getattr(holder, "rules", ())
                if right in rules:
                    stack.enter_context(patch.object(holder, "rules", tuple(wrong if r is right else r for r in rules)))
            yield

    return patch_rule
