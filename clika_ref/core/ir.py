"""The IR: `Graph`, `Node`, `Value` and `Use`, and the four mutators of a graph."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false
# Graph, node and value share private links; an operand may be a tuple of anything.

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from clika_ref.core.errors import PassError
from clika_ref.core.types import Origin, TensorType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from clika_ref.core.operators import Operator
    from clika_ref.core.symbols import Guard, Symbol


Data: TypeAlias = "torch.Tensor | Callable[[], torch.Tensor]"
"""The elements of a constant, or the function that computes them."""

MAX_NOTEBOOK_LINES = 200
"""Maximum number of lines in the notebook view of a graph; longer views are slow and do not help."""


class Use(NamedTuple):
    """One read of a value by ``user``: operand ``position`` of a node, or an output (or state entry) of the graph."""

    user: Node | Graph
    position: int | str


class Value:
    """A tensor in the graph: an input, a constant (``data`` is set) or output ``index`` of its ``producer``.

    ``type`` is its `TensorType`, ``name`` its unique name in the graph. The data of a constant may be a function that
    computes it. A tensor derived from weights, such as a weight scaled by a folded batch norm, then takes no memory of
    its own: each read computes it again.
    """

    __match_args__ = ("name",)
    __slots__ = ("_data", "_uses", "index", "name", "producer", "type")

    def __init__(
        self, type: TensorType, name: str, producer: Node | None = None, index: int = 0, data: Data | None = None
    ) -> None:
        self.type = type
        self.name = name
        self.producer = producer
        self.index = index
        self._data = data
        self._uses: dict[Use, None] = {}

    @property
    def uses(self) -> tuple[Use, ...]:
        """All reads of this value, in order of insertion; a snapshot, so the graph may change meanwhile."""
        return tuple(self._uses)

    @property
    def use_count(self) -> int:
        """The number of reads of this value."""
        return len(self._uses)

    def is_read_by(self, user: Node | Graph, position: int | str) -> bool:
        """Return whether ``user`` reads this value: a node as operand ``position``, or a graph as such an output."""
        return (user, position) in self._uses

    @property
    def data(self) -> torch.Tensor | None:
        """The elements of a constant."""
        return self._data() if callable(self._data) else self._data

    @data.setter
    def data(self, data: Data | None) -> None:
        self._data = data

    @property
    def is_constant(self) -> bool:
        """Whether the value is a parameter, a buffer or another constant."""
        return self._data is not None

    @property
    def deferred_data(self) -> Callable[[], torch.Tensor] | None:
        """The function that computes the elements of a constant on each read; None if they are stored."""
        return self._data if callable(self._data) else None

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class Node:
    """One call of an operator ``op``, with attributes ``attrs`` by name.

    ``inputs`` are values, Python numbers, size expressions, or None for absent operands. ``origin`` is the source of
    the node in the model. ``bodies`` are the graphs that an operator of control flow runs, in the order of
    `Operator.bodies`: the branches of a condition, or the body of a loop.
    """

    __match_args__ = ("op_type", "inputs", "attrs", "outputs")
    __slots__ = ("_graph", "_next", "_previous", "attrs", "bodies", "inputs", "op", "origin", "outputs")

    def __init__(
        self,
        op: Operator,
        inputs: Sequence[Any],
        attrs: dict[str, Any],
        origin: Origin | None = None,
        bodies: Sequence[Graph] = (),
    ) -> None:
        self.op = op
        self.inputs: tuple[Any, ...] = tuple(inputs)
        self.attrs = attrs
        self.outputs: tuple[Value, ...] = ()
        self.origin = origin or Origin()
        self.bodies: tuple[Graph, ...] = tuple(bodies)
        self._graph: Graph | None = None
        self._previous: Node | None = None
        self._next: Node | None = None

    @property
    def op_type(self) -> str:
        """The name of the operator, for ``match`` statements."""
        return self.op.name

    @property
    def is_random(self) -> bool:
        """Whether two runs of this call, with its bodies, may differ."""
        decides = self.op.random
        own = bool(self.attrs[decides]) if isinstance(decides, str) else decides
        return own or any(node.is_random for body in self.bodies for node in body.nodes)

    @property
    def output(self) -> Value:
        """The only output of a node with one output."""
        (value,) = self.outputs
        return value

    @property
    def first_tensor(self) -> Value:
        """The first operand that is a tensor: the data input of operators that have one."""
        return next(v for v in self.inputs if isinstance(v, Value))

    @property
    def name(self) -> str:
        """The name of the first output, used to refer to the node."""
        return self.outputs[0].name if self.outputs else self.op.name

    def __repr__(self) -> str:
        results = ", ".join(map(repr, self.outputs))
        attrs = ", ".join(f"{k}={_format_operand(v)}" for k, v in self.attrs.items())
        operands = ", ".join(map(_format_operand, self.inputs))
        line = f"{results} = {self.op.name}{f'[{attrs}]' if attrs else ''}({operands})"
        return f"{line}  # {self.origin}" if self.origin.scopes or self.origin.lines else line


def _type_of(tensor: torch.Tensor | None) -> TensorType:
    assert tensor is not None
    return TensorType.of(tensor)


def walk(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph in order, each followed by those of its bodies; they may be erased and inserted."""
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from walk(body)


def walk_graphs(graph: Graph) -> Iterator[Graph]:
    """Yield all bodies of a graph, inner ones first, then the graph."""
    for node in graph.nodes:
        for body in node.bodies:
            yield from walk_graphs(body)
    yield graph


def walk_values(graph: Graph) -> Iterator[Value]:
    """Yield the inputs and the results of nodes of a graph and its bodies."""
    for part in walk_graphs(graph):
        yield from part.inputs
        for node in part.nodes:
            yield from node.outputs


def list_read_constants(body: Graph) -> list[Value]:
    """Return the constants that a body and its own bodies read."""
    read = [v for node in walk(body) for v in node.inputs]
    read += [v for graph in walk_graphs(body) for v in graph.outputs]
    constants = set(body.constants.values())
    return list(dict.fromkeys(v for v in read if isinstance(v, Value) and v in constants))


def _release_constants(body: Graph) -> None:
    """Remove the reads of constants by a body that is erased."""
    reads = [(v, Use(node, i)) for node in walk(body) for i, v in enumerate(node.inputs)]
    reads += [(v, Use(graph, i)) for graph in walk_graphs(body) for i, v in enumerate(graph.outputs)]
    constants = set(body.constants.values())
    for value, use in reads:
        if isinstance(value, Value) and value in constants:
            value._uses.pop(use, None)


def _rename_source(symbol: Symbol, renamed: dict[str, str]) -> Symbol:
    source = replace(symbol.source, name=renamed.get(symbol.source.name, symbol.source.name))
    return replace(symbol, source=source)


def _format_operand(item: Any) -> str:
    if isinstance(item, Value):
        return f"%{item.name}"
    if isinstance(item, tuple):
        return f"({', '.join(map(_format_operand, item))})"
    return str(item)


class Graph:
    """A model: nodes in topological order, between inputs and outputs.

    ``constants`` maps qualified names to parameters, buffers and other constants. ``state`` maps the names of constants
    (or inputs) that a call overwrites to their new values. ``symbols`` are the dynamic sizes, and ``guards`` the
    relations between them that the graph relies on. ``aliases`` maps further names of tied weights to the stored one.
    Each change increments ``revision``.

    A graph may be the body of a node of another graph, its ``parent`` (`new_body`). It reads the constants of the
    outermost graph under their names; all else that its parent computes enters through its inputs, as operands of the
    node. Its symbols are read from its own inputs. Names are unique across a graph and its bodies, and a change of a
    body increments the revisions of its parents.
    """

    def __init__(self, name: str = "graph", parent: Graph | None = None) -> None:
        self.name = name
        self.parent = parent
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.constants: dict[str, Value] = {} if parent is None else parent.constants
        self.state: dict[str, Value] = {}
        self.symbols: dict[str, Symbol] = {}
        self.guards: list[Guard] = []
        self.aliases: dict[str, str] = {} if parent is None else parent.aliases
        self.revision = 0
        self._names: dict[str, int] = {} if parent is None else parent._names
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0

    # Reading

    @property
    def nodes(self) -> Iterator[Node]:
        """The nodes in order; nodes may be erased and inserted during iteration."""
        node = self._first
        while node is not None:
            if node._graph is self:
                yield node
            node = node._next  # an erased node keeps its links, so that iteration can continue

    def nodes_backward(self, before: Node | None = None) -> Iterator[Node]:
        """Yield the nodes from last to first, or those ``before`` a node; they may be erased and inserted meanwhile."""
        node = self._last if before is None else before._previous
        while node is not None:
            if node._graph is self:
                yield node
            node = node._previous

    @property
    def root(self) -> Graph:
        """The outermost graph: the graph itself, unless it is a body."""
        return self if self.parent is None else self.parent.root

    def is_overwritten(self, name: str) -> bool:
        """Return whether a call overwrites the constant or input ``name``; a body reads constants of the root."""
        return name in self.root.state

    def __len__(self) -> int:
        return self._count

    def __contains__(self, node: Node) -> bool:
        return node._graph is self

    def __str__(self) -> str:
        lines = [f"graph {self.name}({', '.join(map(repr, self.inputs))})"]
        lines += [f"  symbol {symbol}" for symbol in self.symbols.values()]
        lines += [f"  guard {guard}" for guard in self.guards]
        for node in self.nodes:
            lines.append(f"  {node!r}")
            lines += [f"    {line}" for body in node.bodies for line in str(body).splitlines()]
        lines += [f"  state {name} <- %{value.name}" for name, value in self.state.items()]
        return "\n".join([*lines, f"  return {', '.join('%' + v.name for v in self.outputs)}"])

    def _repr_html_(self) -> str:
        """Return the notebook view: the first lines."""
        lines = str(self).splitlines()
        rest = [f"and {len(lines) - MAX_NOTEBOOK_LINES:,} more lines"] if len(lines) > MAX_NOTEBOOK_LINES else []
        return "<pre>" + escape("\n".join([*lines[:MAX_NOTEBOOK_LINES], *rest])) + "</pre>"

    # Building

    def mark_changed(self) -> None:
        """Increment the revisions of the graph and of its parents."""
        graph: Graph | None = self
        while graph is not None:
            graph.revision += 1
            graph = graph.parent

    def new_body(self, name: str) -> Graph:
        """Return an empty body for a node of this graph."""
        return Graph(name, self)

    def fresh_name(self, hint: str) -> str:
        """Return ``hint``, or ``hint_1``, ``hint_2``, ... if it is taken."""
        count = self._names.get(hint)
        if count is None:
            self._names[hint] = 0
            return hint
        while (name := f"{hint}_{count + 1}") in self._names:
            count += 1
        self._names |= {hint: count + 1, name: 0}
        return name

    def add_input(self, type: TensorType, name: str) -> Value:
        """Append an input of type ``type`` with a unique form of ``name``."""
        value = Value(type, self.fresh_name(name))
        self.inputs.append(value)
        self.mark_changed()
        return value

    def add_constant(self, data: Data | None, name: str, type: TensorType | None = None) -> Value:
        """Register a constant under its qualified name (made unique). Pass ``type`` if ``data`` is no tensor."""
        value = Value(type or _type_of(data() if callable(data) else data), self.fresh_name(name), data=data)
        self.constants[value.name] = value
        self.mark_changed()
        return value

    def add_output(self, value: Value) -> None:
        """Append an output."""
        value._uses[Use(self, len(self.outputs))] = None
        self.outputs.append(value)
        self.mark_changed()

    def set_output(self, position: int, value: Value) -> None:
        """Replace the output at ``position`` by ``value``."""
        del self.outputs[position]._uses[Use(self, position)]
        value._uses[Use(self, position)] = None
        self.outputs[position] = value
        self.mark_changed()

    def set_state(self, name: str, value: Value) -> None:
        """Declare that a call overwrites the constant or input ``name`` with ``value``."""
        if name in self.state:
            del self.state[name]._uses[Use(self, name)]
        self.state[name] = value
        value._uses[Use(self, name)] = None
        self.mark_changed()

    # The four mutators

    def insert(
        self, node: Node, types: Sequence[TensorType], before: Node | None = None, names: Sequence[str] = ()
    ) -> Node:
        """Insert a node before another, or at the end; its outputs get ``types`` and unique forms of ``names``."""
        hints = names or [node.op.name] * len(types)
        node.outputs = tuple(
            Value(t, self.fresh_name(hint), node, i) for i, (t, hint) in enumerate(zip(types, hints, strict=True))
        )
        for position, value in enumerate(node.inputs):
            if isinstance(value, Value):
                value._uses[Use(node, position)] = None
        self._link(node, before)
        return node

    def erase(self, node: Node) -> None:
        """Remove a node whose outputs are unused.

        Raises:
            PassError: an output is still read.
        """
        for value in node.outputs:
            if value._uses:
                user, position = next(iter(value._uses))
                reader = user if isinstance(user, Node) else f"output {position!r} of the graph"
                raise PassError(f"cannot erase {node!r}: {reader} still reads %{value.name}. Replace it there first.")
        for position, value in enumerate(node.inputs):
            if isinstance(value, Value):
                del value._uses[Use(node, position)]
        for body in node.bodies:
            _release_constants(body)
        self._unlink(node)

    def replace(self, old: Value, new: Value) -> None:
        """Make every reader of ``old`` read ``new``, a value of the same type.

        A constant may also have readers in other bodies. They read ``new`` only if it is a constant as well.

        Raises:
            PassError: the types differ.
        """
        if old.type != new.type:
            raise PassError(
                f"cannot replace {old!r} by {new!r}: their types differ. Replace a value by one of the same type."
            )
        if old is new:
            return
        for user, position in old.uses:
            reader = user._graph if isinstance(user, Node) else user
            if reader is not self and not new.is_constant:
                continue
            del old._uses[Use(user, position)]
            new._uses[Use(user, position)] = None
            if isinstance(user, Node):
                inputs = list(user.inputs)
                inputs[int(position)] = new
                user.inputs = tuple(inputs)
            elif isinstance(position, int):
                user.outputs[position] = new
            else:
                user.state[position] = new
            if reader is not None and reader is not self:
                reader.mark_changed()
        self.mark_changed()

    def set_input(self, node: Node, position: int, new: Any) -> None:
        """Set the operand at ``position`` of ``node`` to ``new``: a value, a number, or None."""
        old = node.inputs[position]
        if isinstance(old, Value):
            del old._uses[Use(node, position)]
        if isinstance(new, Value):
            new._uses[Use(node, position)] = None
        node.inputs = (*node.inputs[:position], new, *node.inputs[position + 1 :])
        self.mark_changed()

    # Whole-graph operations

    def remove_constant(self, name: str) -> None:
        """Remove the constant ``name``, which nothing reads. Its name becomes free.

        Raises:
            PassError: it is still read.
        """
        value = self.constants[name]
        if value.use_count:
            raise PassError(
                f"remove_constant({name!r}): it is still read {value.use_count} times; replace it there first"
            )
        del self.constants[name]
        self._names.pop(name, None)
        self.mark_changed()

    def drop_unused_constants(self) -> None:
        """Remove constants that no node, output or state entry reads (on a clone that is being lowered)."""
        unused = [n for n, value in self.constants.items() if not value._uses and n not in self.state]
        for name in unused:
            del self.constants[name]
        self.revision += len(unused)

    def clone(self, outputs: Sequence[Value] | None = None) -> Graph:
        """Return an independent graph that shares the constant tensors, with all outputs or only ``outputs``.

        Unused names become free in the clone, so that later names do not depend on the history of the graph.
        """
        copy = Graph(self.name)
        copy.symbols, copy.guards, copy.aliases = dict(self.symbols), list(self.guards), dict(self.aliases)
        mapping = {value: copy.add_input(value.type, value.name) for value in self.inputs}
        for name, value in self.constants.items():
            mapping[value] = copy.constants[name] = Value(value.type, name, data=value._data)
        copy._names |= dict.fromkeys(copy.constants, 0)
        for node in self.nodes:
            copy.insert_copy(node, mapping)
        for name in copy._names:
            copy._names[name] = 0
        for value in self.outputs if outputs is None else outputs:
            copy.add_output(mapping[value])
        for name, value in self.state.items():
            copy.set_state(name, mapping[value])
        return copy

    def insert_copy(self, node: Node, mapping: dict[Value, Value]) -> Node:
        """Append a copy of a node of another graph, with copies of its bodies.

        ``mapping`` has a value of this graph for each value that the node and its bodies read from outside, and gets
        the outputs of the copy.
        """
        inputs = [mapping[v] if isinstance(v, Value) else v for v in node.inputs]
        bodies = [self._copy_body(body, mapping) for body in node.bodies]
        twin = Node(node.op, inputs, node.attrs, node.origin, bodies)
        self.insert(twin, [v.type for v in node.outputs], None, [v.name for v in node.outputs])
        mapping.update(zip(node.outputs, twin.outputs, strict=True))
        return twin

    def _copy_body(self, body: Graph, mapping: dict[Value, Value]) -> Graph:
        copy = self.new_body(body.name)
        inner = mapping | {value: copy.add_input(value.type, value.name) for value in body.inputs}
        renamed = {old.name: new.name for old, new in inner.items() if old.name != new.name}
        for node in body.nodes:
            twin = copy.insert_copy(node, inner)
            renamed |= {a.name: b.name for a, b in zip(node.outputs, twin.outputs, strict=True) if a.name != b.name}
        copy.symbols = {name: _rename_source(symbol, renamed) for name, symbol in body.symbols.items()}
        for value in body.outputs:
            copy.add_output(inner[value])
        return copy

    def _link(self, node: Node, before: Node | None) -> None:
        previous = self._last if before is None else before._previous
        node._graph, node._previous, node._next = self, previous, before
        if previous is None:
            self._first = node
        else:
            previous._next = node
        if before is None:
            self._last = node
        else:
            before._previous = node
        self._count += 1
        self.mark_changed()

    def _unlink(self, node: Node) -> None:
        previous, following = node._previous, node._next
        if previous is None:
            self._first = following
        else:
            previous._next = following
        if following is None:
            self._last = previous
        else:
            following._previous = previous
        node._graph = None
        self._count -= 1
        self.mark_changed()
