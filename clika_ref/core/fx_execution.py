"""Run a graph fast: as Python code that FX generates, instead of the interpreter."""

# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# sympy has no type annotations.

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from clika_ref.core.execution import find_device, to_tensor
from clika_ref.core.ir import Graph, Node, Value, list_read_constants
from clika_ref.core.symbols import atom_to_number, expr_to_function, is_symbolic

if TYPE_CHECKING:
    import sympy

    from clika_ref.core.symbols import Symbol


def compile_with_fx(graph: Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile a graph to a function of its constants and inputs.

    The first argument of the function holds the constants as attributes ``constant_<i>``, in order. One tensor for each
    input of the graph follows. The function returns one tensor for each output, and writes new state in place.
    """
    return _compile(to_fx(graph))


def to_fx(graph: Graph) -> fx.Graph:
    """Return the fast form of a graph: an FX graph equivalent to the interpreter.

    It returns the outputs as a tuple and writes new state in place, like the original module. Inputs are named
    ``input_0``, ... and constants are attributes ``constant_0``, ...: FX pastes names into the source it generates, and
    a graph loaded from a file may contain arbitrary names.
    """
    return _FxWriter(graph, {value: f"constant_{i}" for i, value in enumerate(graph.constants.values())}).write()


def snapshot_state(state: torch.Tensor, is_shared: bool) -> torch.Tensor:  # noqa: FBT001 - FX passes it by position
    """Return the old value of ``state``, of any shape, that the call overwrites later.

    It is a copy if ``is_shared``, or if gradients are recorded: autograd cannot go backward through a tensor that was
    overwritten. In inference, caches are not copied.
    """
    return state.clone() if is_shared or torch.is_grad_enabled() else state


def _find_base(value: Value) -> Value:
    """Follow views, and copies of views, to the value that owns the memory."""
    while value.producer is not None and value.producer.op.write_back_rule is not None:
        value = value.producer.first_tensor
    return value


def _compile(code: fx.Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile an FX graph to a function; its first argument is the object that has the constants as attributes."""
    source = code.python_code("self")
    namespace: dict[str, Any] = dict(source.globals)
    exec(compile(source.src, "<graph>", "exec"), namespace)  # noqa: S102 - FX's source, without names of the graph
    return namespace["forward"]


class _BodiesCall:
    """A call of an operator of control flow with functions for its bodies, as FX's code calls it."""

    def __init__(self, node: Node, constants: Sequence[Sequence[Value]]) -> None:
        functools.update_wrapper(self, node.op.reference)
        self.op = node.op
        self.functions = [
            _compile(_FxWriter(body, {}).write(read)) for body, read in zip(node.bodies, constants, strict=True)
        ]

    def __call__(self, constants: Sequence[Sequence[torch.Tensor]], *operands: Any, **attrs: Any) -> Any:
        device = find_device(
            [x for x in (*operands, *(t for read in constants for t in read)) if isinstance(x, torch.Tensor)]
        )
        bodies = {
            name: functools.partial(_call_body, function, device, read)
            for name, function, read in zip(self.op.bodies, self.functions, constants, strict=True)
        }
        return self.op(*operands, **attrs, **bodies)


def _call_body(
    function: Callable[..., tuple[torch.Tensor, ...]],
    device: torch.device,
    constants: Sequence[torch.Tensor],
    *operands: Any,
) -> tuple[torch.Tensor, ...]:
    return function(None, *constants, *(to_tensor(x, device) for x in operands))


class _FxWriter:
    def __init__(self, graph: Graph, constants: dict[Value, str]) -> None:
        self.graph = graph
        self.fx = fx.Graph()
        self.nodes: dict[Value, fx.Node] = {}
        self.constants = constants
        self.sizes: dict[sympy.Basic, Any] = {}
        self.device: fx.Node | None = None
        self.symbols_by_source: dict[str, list[Symbol]] = {}

    def write(self, parameters: Sequence[Value] = ()) -> fx.Graph:
        """Return the FX graph. The function takes the constants ``parameters`` before the inputs."""
        for i, value in enumerate(parameters):
            self.nodes[value] = self.fx.placeholder(f"constant_{i}")
        for i, value in enumerate(self.graph.inputs):
            self.nodes[value] = self.fx.placeholder(f"input_{i}")
        for symbol in self.graph.symbols.values():
            self.symbols_by_source.setdefault(symbol.source.name, []).append(symbol)
        for value in self.graph.inputs:
            self._bind(value)
        by_name = {v.name: v for v in (*self.graph.inputs, *self.graph.constants.values())}
        shared = set(map(_find_base, (*self.graph.outputs, *self.graph.state.values())))
        state_nodes = [
            self._state_destination(by_name[name], is_shared=by_name[name] in shared) for name in self.graph.state
        ]
        for node in self.graph.nodes:
            self._call(node)
        for destination, value in zip(state_nodes, self.graph.state.values(), strict=True):
            self.fx.call_method("copy_", (destination, self._value(value)))
        self.fx.output(tuple(map(self._value, self.graph.outputs)))
        return self.fx

    def _state_destination(self, value: Value, *, is_shared: bool) -> fx.Node:
        """Return the node that new state is written to at the end; until then, reads use `snapshot_state`."""
        destination = self._value(value)
        self.nodes[value] = self.fx.call_function(snapshot_state, (destination, is_shared))
        if isinstance(value.data, torch.nn.Parameter):  # autograd rejects in-place writes to a leaf
            destination = self.fx.call_method("detach", (destination,))
        return destination

    def _value(self, value: Value) -> fx.Node:
        if value not in self.nodes:  # a constant, fetched at its first use
            self.nodes[value] = self.fx.get_attr(self.constants[value])
        return self.nodes[value]

    def _bind(self, value: Value) -> None:
        for symbol in self.symbols_by_source.get(value.name, ()):
            if symbol.source.dim is None:
                size = self.fx.call_method("item", (self.nodes[value],))
            else:
                size = self.fx.call_method("size", (self.nodes[value], symbol.source.dim))
            self.sizes[symbol.expr] = size

    def _call(self, node: Node) -> None:
        operands = tuple(self._argument(v) for v in node.inputs)
        attrs = {name: self._argument(v) for name, v in node.attrs.items()}
        if node.op.takes_device and attrs["device"] is None:
            attrs["device"] = self._device()
        call = self.fx.call_function(*self._find_function(node, operands), attrs)
        for value in node.outputs:
            if not node.op.returns_tuple:
                self.nodes[value] = call
            elif value.use_count or value.name in self.symbols_by_source:
                self.nodes[value] = self.fx.call_function(operator.getitem, (call, value.index))
            self._bind(value)

    def _find_function(self, node: Node, operands: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return the function of a node, and its positional arguments."""
        if not node.bodies:
            return node.op, operands
        constants = tuple(tuple(list_read_constants(body)) for body in node.bodies)
        values = tuple(tuple(map(self._value, read)) for read in constants)
        return _BodiesCall(node, constants), (values, *operands)

    def _device(self) -> fx.Node | torch.device:
        if self.device is None:
            anchor = next(iter([*self.graph.inputs, *self.nodes, *self.constants]), None)
            if anchor is None:  # a body that reads nothing
                return torch.device("cpu")
            self.device = self.fx.call_function(getattr, (self._value(anchor), "device"))
        return self.device

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._value(item)
        if isinstance(item, tuple):
            return tuple(map(self._argument, item))
        if isinstance(item, complex):  # its source text would change inf, NaN and -0.0
            return self.fx.call_function(complex, (item.real, item.imag))
        return self._size(item) if is_symbolic(item) else item

    def _size(self, expr: sympy.Basic) -> Any:
        if not expr.args and expr not in self.sizes:
            number = atom_to_number(expr)
            if isinstance(number, Fraction):  # its source text is not defined in the generated code
                return self.fx.call_function(Fraction, (number.numerator, number.denominator))
            return number
        if expr not in self.sizes:
            self.sizes[expr] = self.fx.call_function(expr_to_function(expr), tuple(map(self._size, expr.args)))
        return self.sizes[expr]
