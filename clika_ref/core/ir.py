"""The IR: `Graph`, `Node`, `Value` and `Use`, and the four mutators of a graph."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false
# Graph, node and value share private links; an operand may be a tuple of anything.

from __future__ import annotations

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
    the node in the model.
    """

    __match_args__ = ("op_type", "inputs", "attrs", "outputs")
    __slots__ = ("_graph", "_next", "_previous", "attrs", "inputs", "op", "origin", "outputs")

    def __init__(
        self, op: Operator, inputs: Sequence[Any], attrs: dict[str, Any], origin: Origin | None = None
    ) -> None:
        self.op = op
        self.inputs: tuple[Any, ...] = tuple(inputs)
        self.attrs = attrs
        self.outputs: tuple[Value, ...] = ()
        self.origin = origin or Origin()
        self._graph: Graph | None = None
        self._previous: Node | None = None
        self._next: Node | None = None

    @property
    def op_type(self) -> str:
        """The name of the operator, for ``match`` statements."""
        return self.op.name

    @property
    def is_random(self) -> bool:
        """Whether two runs of this call may differ."""
        decides = self.op.random
        return bool(self.attrs[decides]) if isinstance(decides, str) else decides

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
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.constants: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.symbols: dict[str, Symbol] = {}
        self.guards: list[Guard] = []
        self.aliases: dict[str, str] = {}
        self.revision = 0
        self._names: dict[str, int] = {}
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

    def __len__(self) -> int:
        return self._count

    def __contains__(self, node: Node) -> bool:
        return node._graph is self

    def __str__(self) -> str:
        lines = [f"graph {self.name}({', '.join(map(repr, self.inputs))})"]
        lines += [f"  symbol {symbol}" for symbol in self.symbols.values()]
        lines += [f"  guard {guard}" for guard in self.guards]
        lines += [f"  {node!r}" for node in self.nodes]
        lines += [f"  state {name} <- %{value.name}" for name, value in self.state.items()]
        return "\n".join([*lines, f"  return {', '.join('%' + v.name for v in self.outputs)}"])

    def _repr_html_(self) -> str:
        """Return the notebook view: the first lines."""
        lines = str(self).splitlines()
        rest = [f"and {len(lines) - MAX_NOTEBOOK_LINES:,} more lines"] if len(lines) > MAX_NOTEBOOK_LINES else []
        return "<pre>" + escape("\n".join([*lines[:MAX_NOTEBOOK_LINES], *rest])) + "</pre>"

    # Building

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
        self.revision += 1
        return value

    def add_constant(self, data: Data | None, name: str, type: TensorType | None = None) -> Value:
        """Register a constant under its qualified name (made unique). Pass ``type`` if ``data`` is no tensor."""
        value = Value(type or _type_of(data() if callable(data) else data), self.fresh_name(name), data=data)
        self.constants[value.name] = value
        self.revision += 1
        return value

    def add_output(self, value: Value) -> None:
        """Append an output."""
        value._uses[Use(self, len(self.outputs))] = None
        self.outputs.append(value)
        self.revision += 1

    def set_output(self, position: int, value: Value) -> None:
        """Replace the output at ``position`` by ``value``."""
        del self.outputs[position]._uses[Use(self, position)]
        value._uses[Use(self, position)] = None
        self.outputs[position] = value
        self.revision += 1

    def set_state(self, name: str, value: Value) -> None:
        """Declare that a call overwrites the constant or input ``name`` with ``value``."""
        if name in self.state:
            del self.state[name]._uses[Use(self, name)]
        self.state[name] = value
        value._uses[Use(self, name)] = None
        self.revision += 1

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
        self._unlink(node)

    def replace(self, old: Value, new: Value) -> None:
        """Make every reader of ``old`` read ``new``, a value of the same type.

        Raises:
            PassError: the types differ.
        """
        if old.type != new.type:
            raise PassError(
                f"cannot replace {old!r} by {new!r}: their types differ. Replace a value by one of the same type."
            )
        if old is new:
            return
        for user, position in old._uses:
            new._uses[Use(user, position)] = None
            if isinstance(user, Node):
                inputs = list(user.inputs)
                inputs[int(position)] = new
                user.inputs = tuple(inputs)
            elif isinstance(position, int):
                self.outputs[position] = new
            else:
                self.state[position] = new
        old._uses.clear()
        self.revision += 1

    def set_input(self, node: Node, position: int, new: Any) -> None:
        """Set the operand at ``position`` of ``node`` to ``new``: a value, a number, or None."""
        old = node.inputs[position]
        if isinstance(old, Value):
            del old._uses[Use(node, position)]
        if isinstance(new, Value):
            new._uses[Use(node, position)] = None
        node.inputs = (*node.inputs[:position], new, *node.inputs[position + 1 :])
        self.revision += 1

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
        self.revision += 1

    def drop_unused_constants(self) -> None:
        """Remove constants that no node, output or state entry reads (on a clone that is being lowered)."""
        used = {n: value for n, value in self.constants.items() if value._uses or n in self.state}
        self.revision += len(self.constants) - len(used)
        self.constants = used

    def clone(self, outputs: Sequence[Value] | None = None) -> Graph:
        """Return an independent graph that shares the constant tensors, with all outputs or only ``outputs``.

        Unused names become free in the clone, so that later names do not depend on the history of the graph.
        """
        copy = Graph(self.name)
        copy.symbols, copy.guards, copy.aliases = dict(self.symbols), list(self.guards), dict(self.aliases)
        mapping = {value: copy.add_input(value.type, value.name) for value in self.inputs}
        for name, value in self.constants.items():
            mapping[value] = copy.constants[name] = Value(value.type, name, data=value._data)
        for node in self.nodes:
            inputs = [mapping[v] if isinstance(v, Value) else v for v in node.inputs]
            twin = Node(node.op, inputs, node.attrs, node.origin)
            copy.insert(twin, [v.type for v in node.outputs], None, [v.name for v in node.outputs])
            mapping.update(zip(node.outputs, twin.outputs, strict=True))
        copy._names = dict.fromkeys(copy._names | copy.constants, 0)
        for value in self.outputs if outputs is None else outputs:
            copy.add_output(mapping[value])
        for name, value in self.state.items():
            copy.set_state(name, mapping[value])
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
        self.revision += 1

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
        self.revision += 1
