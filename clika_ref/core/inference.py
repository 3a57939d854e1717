"""Output types, inferred by running the eager reference on fake tensors, and the builder that adds typed nodes."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Sympy and torch's symbolic shapes have no type annotations.

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from clika_ref.core.errors import PassError
from clika_ref.core.ir import Data, Graph, Node, Value
from clika_ref.core.symbols import evaluate, is_symbolic, make_symbol
from clika_ref.core.types import Origin, TensorType
from clika_ref.torch_internals.symbols import check
from clika_ref.torch_internals.tensors import FakeTensorMode, disable_fake_tensor_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clika_ref.core.operators import Operator


def infer_types(op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    """Return the output types of a call of ``op`` with attributes ``attrs``.

    ``operands`` are values, types, numbers, size expressions or None.

    Raises:
        PassError: the reference rejects the call, or its type holds only under a condition on the symbols.
    """
    types = tuple(v.type if isinstance(v, Value) else v for v in operands)
    try:
        named_attrs = tuple(sorted(attrs.items(), key=lambda item: item[0]))
        return _infer_cached(op, types, named_attrs, _type_key((types, named_attrs)))
    except Exception as error:
        shown = ", ".join(map(str, (*types, *(f"{k}={v}" for k, v in attrs.items()))))
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise PassError(f"{op.name}({shown}): cannot infer the output type: {reason}") from error


def _type_key(item: Any) -> Any:
    """Return the nested types of an item. They separate 1, 1.0 and True, which are equal as cache keys."""
    return tuple(map(_type_key, item)) if isinstance(item, tuple) else type(item)


@lru_cache(maxsize=4096)
def _infer_cached(
    op: Operator, operands: tuple[Any, ...], attrs: tuple[tuple[str, Any], ...], _kinds: Any
) -> tuple[TensorType, ...]:
    if op.type_rule is not None:
        result = op.type_rule(*operands, **dict(attrs))
        return result if isinstance(result, tuple) else (result,)
    static = all(not isinstance(t, TensorType) or t.is_static for t in operands)
    static = static and not any(is_symbolic(v) for v in operands) and not any(is_symbolic(v) for _, v in attrs)
    return _infer_static(op, operands, dict(attrs)) if static else _infer_symbolic(op, operands, dict(attrs))


def clear_type_cache() -> None:
    """Clear the cache of inferred types. Call it after changing a type rule; the cache is keyed by operator."""
    _infer_cached.cache_clear()


def _infer_static(op: Operator, operands: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[TensorType, ...]:
    tensors: list[Any] = [
        torch.empty(cast("Any", t.shape), dtype=t.dtype, device="meta") if isinstance(t, TensorType) else t
        for t in operands
    ]
    if op.takes_device:
        attrs["device"] = torch.device("meta")
    return tuple(TensorType.of(t) for t in _to_list(op(*tensors, **attrs)))


def _infer_symbolic(op: Operator, operands: tuple[Any, ...], attrs: dict[str, Any]) -> tuple[TensorType, ...]:
    """Run the reference on unbacked symbols in a fresh ``ShapeEnv``, and reject a result that relies on assumptions.

    Backed symbols silently give wrong types, and a shared environment keeps assumptions of earlier calls. The fake
    tensor cache is off: new symbols would never hit it, and filling it takes as long as the calls.
    """
    env = ShapeEnv()
    symbols = sorted(_find_symbols((*operands, *attrs.values())), key=lambda s: s.name)
    sizes = {symbol.name: env.create_unbacked_symint() for symbol in symbols}
    for symbol in symbols:
        check(not symbol.is_nonnegative or sizes[symbol.name] >= 0)
    own = {sizes[symbol.name].node.expr: symbol for symbol in symbols}
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode, disable_fake_tensor_cache(mode):
        tensors = [_make_fake(t, sizes) for t in operands]
        assumed = sum(map(len, env.deferred_runtime_asserts.values()))  # the sizes of operands are not negative
        results = _to_list(op(*tensors, **{k: _substitute_sizes(v, sizes) for k, v in attrs.items()}))
    deferred = [a.expr for asserts in env.deferred_runtime_asserts.values() for a in asserts][assumed:]
    lengths = {expr: make_symbol(symbol.name) for expr, symbol in own.items()}  # a number used as a size is nonnegative
    asked = [g for g in (*(g.expr for g in env.guards), *deferred) if g.xreplace(lengths) is not sympy.true]
    if asked:
        conditions = " and ".join(str(g.xreplace(own)) for g in asked)
        raise PassError(f"the type holds only if {conditions}. Declare the rule with @{op.name}.types.")
    return tuple(TensorType(t.dtype, tuple(_translate_size(s, own) for s in t.shape)) for t in results)


def _to_list(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _find_symbols(item: Any) -> set[sympy.Symbol]:
    if isinstance(item, TensorType):
        return _find_symbols(item.shape)
    if isinstance(item, tuple):
        return set().union(*map(_find_symbols, item)) if item else set()
    return {s for s in item.free_symbols if isinstance(s, sympy.Symbol)} if isinstance(item, sympy.Basic) else set()


def _substitute_sizes(item: Any, sizes: Mapping[str, Any]) -> Any:
    return tuple(_substitute_sizes(i, sizes) for i in item) if isinstance(item, tuple) else evaluate(item, sizes)


def _make_fake(item: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(item, TensorType):
        return torch.empty(_substitute_sizes(item.shape, sizes), dtype=item.dtype)
    return _substitute_sizes(item, sizes)


def _translate_size(size: int | torch.SymInt, own: dict[sympy.Basic, sympy.Symbol]) -> Any:
    if isinstance(size, int):
        return size
    expr = size.node.expr.xreplace(own)
    foreign = {s for s in expr.free_symbols if s not in own.values()}
    if foreign:
        raise PassError(f"a size depends on the data ({expr})")
    return int(expr) if isinstance(expr, sympy.Integer) else expr


class Builder:
    """Adds typed nodes before a given node, or at the end, with one origin. Rewrite rules receive one as ``build``.

    Args:
        graph: the graph to add nodes to.
        operators: the operators of the registry by name.
        before: the node to insert before; None appends at the end.
        origin: the origin of the new nodes.
    """

    def __init__(
        self, graph: Graph, operators: Mapping[str, Operator], before: Node | None = None, origin: Origin | None = None
    ) -> None:
        self.graph = graph
        self.operators = operators
        self.before = before
        self.origin = origin or Origin()

    def __call__(self, op: Operator | str, *operands: Any, types: Sequence[TensorType] = (), **attrs: Any) -> Any:
        """Add one call and return its value, or a tuple of its values. Types are inferred unless given."""
        operator = self.operators[op] if isinstance(op, str) else op
        call = operator.call(*operands, **attrs)
        found = types or infer_types(operator, call.operands, call.attrs)
        node = self.graph.insert(Node(operator, call.operands, call.attrs, self.origin), found, self.before)
        return node.output if len(node.outputs) == 1 else node.outputs

    def constant(self, data: Data, name: str, type: TensorType | None = None) -> Value:
        """Register a new constant under a unique form of ``name``. Pass ``type`` if ``data`` is a function."""
        return self.graph.add_constant(data, name, type)
