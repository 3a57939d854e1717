"""Import control flow: `torch.cond`, ``while_loop``, ``scan`` and ``map`` become nodes with bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from clika_ref.capture.aliasing import TracedTensor
from clika_ref.capture.importer import Importer
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.symbols import Symbol, SymbolSource, is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.tensors import FakeTensor

OWN_PREFIXES = ("clika.", "constants.")
"""Prefixes of constants that no module owns."""

NUMBER_TYPES = {int: torch.int64, bool: torch.bool, float: torch.float64}
"""The dtypes of Python numbers that a body returns."""


@dataclass(frozen=True)
class ControlFlowCall:
    """A call of control flow in a trace, in the form of the operator that represents it."""

    operator: str
    """The name of the operator."""
    programs: tuple[fx.GraphModule, ...]
    """The traced bodies; each takes all ``inputs``, or one row of those that are scanned."""
    inputs: tuple[Any, ...]
    """The entries that the bodies take."""
    leading: tuple[Any, ...] = ()
    """The entries before them, which no body takes: the predicate of a condition."""
    varying: int = 0
    """The number of inputs, from the first, that differ between the runs of a loop."""
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])


def _parse_cond(predicate: Any, when_true: Any, when_false: Any, operands: Any) -> ControlFlowCall:
    return ControlFlowCall("cond", (when_true, when_false), operands, leading=(predicate,))


def _parse_while_loop(condition: Any, body: Any, carried: Any, others: Any) -> ControlFlowCall:
    return ControlFlowCall(
        "while_loop", (condition, body), (*carried, *others), varying=len(carried), attrs={"carried": len(carried)}
    )


def _parse_scan(body: Any, carried: Any, rows: Any, others: Any) -> ControlFlowCall:
    counts = {"carried": len(carried), "scanned": len(rows)}
    varying = len(carried) + len(rows)
    return ControlFlowCall("scan", (body,), (*carried, *rows, *others), varying=varying, attrs=counts)


def _parse_map(body: Any, rows: Any, others: Any) -> ControlFlowCall:
    return _parse_scan(body, (), rows, others)


FORMS: dict[str, Callable[..., ControlFlowCall]] = {
    "cond": _parse_cond,
    "while_loop": _parse_while_loop,
    "scan": _parse_scan,
    "map_impl": _parse_map,
}
"""How to read the arguments of each call of control flow, by its name in traces."""


class ControlFlowImporter(Importer):
    """Imports a traced program with its control flow.

    A body reads parameters, buffers and constants directly. All else enters as an operand of the node: tensors, and
    sizes that the body can read from none of its tensors.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._body_operands: list[TracedTensor] = []
        """The tensors that this importer's body reads from outside."""

    def _import_region(self, node: fx.Node, target: Any) -> Any:
        parse = FORMS.get(target.name())
        if parse is None:
            return super()._import_region(node, target)
        return self._import_control_flow(node, parse(*self._entries(node.args)))

    def _import_control_flow(self, node: fx.Node, call: ControlFlowCall) -> Any:
        op, known = self.registry.operators[call.operator], len(self.unsupported)
        bodies = [
            self._import_body(f"{node.name}.{name}", program, call)
            for name, program in zip(op.bodies, call.programs, strict=True)
        ]
        if len(self.unsupported) > known:
            raise ModelError("calls inside it could not be imported")
        read = [i for i in range(len(call.inputs)) if i < call.varying or any(b.reads(i) for b in bodies)]
        sizes = declare_body_symbols([body.select_inputs(read) for body in bodies])
        operands = [*call.leading, *(call.inputs[i] for i in read), *sizes]
        fakes = node.meta["val"]
        types = [self._result_type(fake) for fake in fakes]
        made = Node(op, [self._operand(o) for o in operands], call.attrs, self.origin, [b.graph for b in bodies])
        self.graph.insert(made, types, names=[node.name] * len(types))
        return tuple(map(self._bind_control_result, made.outputs, fakes))

    def _operand(self, entry: Any) -> Any:
        if not isinstance(entry, TracedTensor | int | float | sympy.Basic):
            raise ModelError(f"control flow with a {type(entry).__name__} is not supported. Pass a tensor.")
        return self.value_of(entry)

    def _result_type(self, fake: Any) -> TensorType:
        if isinstance(fake, torch.Tensor):
            return self._make_type(fake, fake.dtype)
        return TensorType(torch.bool if isinstance(fake, bool | torch.SymBool) else torch.int64, ())

    def _bind_control_result(self, value: Value, fake: Any) -> Any:
        if not isinstance(fake, torch.Tensor):
            if isinstance(fake, torch.SymInt):
                self.table.bind_element(value, fake)
            return self.table.translate(fake)
        self.table.bind_result(value, fake)
        value.type = self._make_type(fake, fake.dtype)
        return self.aliases.root(value, fake)

    def _import_body(self, name: str, program: fx.GraphModule, call: ControlFlowCall) -> _TracedBody:
        body = self.graph.new_body(name)
        inner = self.for_body(body)
        inner.aliases.track(program)
        _reject_traced_constants(name, program)
        placeholders = program.graph.find_nodes(op="placeholder")
        values = [
            inner._declare_input(placeholder, None if i < call.varying else entry)
            for i, (placeholder, entry) in enumerate(zip(placeholders, call.inputs, strict=True))
        ]
        known = len(self.unsupported)
        results = inner.run(program)
        inner._reject_writes(name)
        _name_modules(body)
        if len(self.unsupported) == known:
            for result in results if isinstance(results, tuple) else (results,):
                body.add_output(inner._output(result))
        return _TracedBody(body, values)

    def _declare_input(self, placeholder: fx.Node, entry: Any) -> Value | None:
        """Bind an input of a body to a new value, or to the constant or number that each run gets (``entry``)."""
        fake = placeholder.meta["val"]
        if not isinstance(fake, torch.Tensor):
            if entry is not None or not isinstance(fake, torch.SymInt):
                self.bind(placeholder, self.table.translate(fake) if entry is None else entry)
                return None
            value = self.graph.add_input(TensorType(torch.int64, ()), placeholder.name)
            self.table.bind_number(value, fake)
            self.bind(placeholder, self.table.translate(fake))
            return value
        if fake.is_complex():
            raise ModelError("control flow on complex numbers is not supported. Pass torch.view_as_real of them.")
        if isinstance(entry, TracedTensor) and entry.value.is_constant and not entry.version:
            self._bind_operand(placeholder, self.aliases.root(entry.value, fake))
            return None
        value = self.graph.add_input(TensorType(fake.dtype, ()), placeholder.name)
        self.table.bind_result(value, fake)
        value.type = self._make_type(fake, fake.dtype)
        self._bind_operand(placeholder, self.aliases.root(value, fake))
        return value

    def _bind_operand(self, placeholder: fx.Node, entry: TracedTensor) -> None:
        self.bind(placeholder, entry)
        self._body_operands.append(entry)

    def _reject_writes(self, name: str) -> None:
        """Reject a body that writes to a tensor from outside."""
        written = [e.value.name for e in self._body_operands if e.memory is not None and e.memory.version]
        if written:
            raise ModelError(
                f"{name} writes to {', '.join(written)}, which is not supported. Return the new value, and write it "
                "after the call."
            )

    def _output(self, entry: Any) -> Value:
        """Return a result of a body as a value."""
        if isinstance(entry, TracedTensor):
            return self.value_of(entry)
        kind = int if isinstance(entry, sympy.Basic) and entry.is_integer else type(entry)
        if kind not in NUMBER_TYPES:
            raise ModelError(f"a body returns {entry!r}, a {type(entry).__name__}. Return tensors.")
        type_ = TensorType(NUMBER_TYPES[kind], ())
        return self.builder()("full", size=(), fill_value=entry, dtype=type_.dtype, types=(type_,))


def _reject_traced_constants(name: str, program: fx.GraphModule) -> None:
    """Reject a body that contains a traced tensor as a constant, which no input replaces."""
    for node in program.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(program, str(node.target), None), FakeTensor):
            raise ModelError(f"{name} reads a tensor from outside that is no operand. Pass it as an operand.")


def _name_modules(body: Graph) -> None:
    """Set the module paths of layers by the names of their weights, as traces of bodies do not contain them."""
    for node in body.nodes:
        named = (v.name for v in node.inputs if isinstance(v, Value) and v.is_constant and "." in v.name)
        path = next((name.rpartition(".")[0] for name in named if not name.startswith(OWN_PREFIXES)), "")
        if path and not node.origin.scopes:
            parts = path.split(".")
            node.origin = replace(node.origin, scopes=tuple(".".join(parts[: i + 1]) for i in range(len(parts))))


@dataclass(frozen=True)
class _TracedBody:
    graph: Graph
    values: Sequence[Value | None]
    """The value of each input of the call; None for constants and numbers."""

    def reads(self, position: int) -> bool:
        value = self.values[position]
        return value is not None and value.use_count > 0

    def select_inputs(self, positions: Sequence[int]) -> Graph:
        """Return the graph with the inputs at these positions only."""
        self.graph.inputs = [value for i in positions if (value := self.values[i]) is not None]
        return self.graph


def declare_body_symbols(bodies: Sequence[Graph]) -> list[sympy.Symbol]:
    """Declare the symbols of bodies by their inputs; return those that need a further input, added to all bodies."""
    found = [_list_symbols(body) for body in bodies]
    passed: dict[str, sympy.Symbol] = {}
    for body, symbols in zip(bodies, found, strict=True):
        sources = {
            size: SymbolSource(value.name, dim)
            for value in reversed(body.inputs)
            for dim, size in enumerate(value.type.shape)
            if isinstance(size, sympy.Symbol)
            and size in symbols
            and size.is_nonnegative  # the symbol of a dim is nonnegative, that of a number is not
        }
        for symbol in symbols:
            if symbol in sources:
                body.symbols[symbol.name] = Symbol(symbol.name, _lowest(symbol), None, sources[symbol])
            else:
                passed[symbol.name] = symbol
    for body, symbols in zip(bodies, found, strict=True):
        for name, symbol in passed.items():
            value = body.add_input(TensorType(torch.int64, ()), name)
            if symbol in symbols and name not in body.symbols:
                source = SymbolSource(value.name, None, holds_length=bool(symbol.is_nonnegative))
                body.symbols[name] = Symbol(name, _lowest(symbol), None, source)
    return list(passed.values())


def _lowest(symbol: sympy.Symbol) -> int | None:
    return 0 if symbol.is_nonnegative else None


def _list_symbols(body: Graph) -> list[sympy.Symbol]:
    """Return the symbols that a body uses but does not declare."""
    items: list[Any] = [value.type.shape for value in body.inputs]
    for node in body.nodes:
        items += [item for item in (*node.inputs, *node.attrs.values()) if is_symbolic(item)]
        items += [value.type.shape for value in node.outputs]
    used = dict.fromkeys(symbol for item in items for symbol in _free_symbols(item))
    return [symbol for symbol in used if symbol.name not in body.symbols]


def _free_symbols(item: Any) -> list[sympy.Symbol]:
    if isinstance(item, tuple):
        return [symbol for part in item for symbol in _free_symbols(part)]
    return sorted(item.free_symbols, key=str) if is_symbolic(item) else []
