"""Push permutes through layout-agnostic operators, towards other permutes that cancel them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from clika_ref.core.accuracy import COMPOSE
from clika_ref.core.deferred_constants import DeferredConstant, is_deferred
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Skip, apply_rules, can_substitute, erase_dead, rule, substitute
from clika_ref.core.types import TensorType
from clika_ref_cleanup import push_transposes_motifs as regions
from clika_ref_cleanup.cleanup_pass import CleanupPass
from clika_ref_cleanup.layouts import (
    LAST_DIM_OPERATORS,
    REDUCTIONS,
    DimOrder,
    compose_orders,
    dims_of,
    invert_order,
    operands_to_permute,
    order_of,
    permute_attrs,
    permute_type,
)

MEBIBYTE = 2**20


@dataclass(frozen=True)
class PushTransposes(CleanupPass):
    """Compute whole regions in another dim order where that takes strictly fewer permutes.

    A region is a connected set of layout-agnostic nodes: elementwise ones, and those with explicit dims. It is computed
    on ``x`` instead of ``permute(x, order)``. This removes permutes by that order at its entries and by the inverse at
    its exits, and adds one at each other entry and exit. Constants up to ``limit_bytes`` are permuted ahead of time. A
    permute from the region back into it costs one in any order. Each rewrite reduces the number of permutes in the
    graph, so two never undo each other, and the pass terminates.

    Runs only on the lowered clone: permuted constants are new ones, and calibration, pruning and the user identify
    values of the stored graph by their dims. Kernels round depending on layout, so this is not exact.
    """

    limit_bytes: int = MEBIBYTE

    name = "push-transposes"
    phase = Phase.FUSE
    after = ("merge-chains", "fold-batch-norm", "merge-common-subexpressions")
    error = COMPOSE
    removes = "transpose"
    motifs: ClassVar[tuple[Callable[[Builder], Value | tuple[Value, ...]], ...]] = (
        regions.entries_of_two_orders,
        regions.entry_from_within,
        regions.overwritten_operand,
    )

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Process regions for all orders first, then the larger ones for orders that keep the last dim in place.

        Repeats until nothing changes: a permute between two regions is an exit of one and an entry of the other.
        """
        revision = -1
        while revision != graph.revision:
            revision = graph.revision
            apply_rules(graph, [reduce_before_permute], operators)
            kinds = {node.op_type for node in graph.nodes}
            if "permute" in kinds:
                for last_stays in (False, True) if kinds & LAST_DIM_OPERATORS else (False,):
                    pushing = _RegionRewriter(graph, operators, self.limit_bytes, last_stays)
                    for nodes in pushing.regions():
                        pushing.improve(nodes)


@rule(*sorted(REDUCTIONS))
def reduce_before_permute(node: Node, build: Builder):
    """``mean(permute(x), dim)`` is the mean of ``x`` over other dims, if the remaining ones keep their order."""
    x, dims = node.inputs[0], dims_of(node)
    order = order_of(x.producer)
    if order is None or dims is None or node.attrs["keepdim"]:
        return Skip("reduces no permuted operand, or keeps its dims")
    if len(x.uses) != 1:
        return Skip("the permute is needed elsewhere", 1)
    reduced = {order[d] for d in dims}
    rest = [d for d in order if d not in reduced]
    if rest != sorted(rest):
        return Skip("the remaining dims change their order", 2)
    return build(node.op, x.producer.inputs[0], types=(node.output.type,), **permute_attrs(node, order))


@dataclass
class _RegionRewriter:
    graph: Graph
    operators: Mapping[str, Operator]
    limit_bytes: int
    last_stays: bool
    reordered: dict[Value, Value] = field(default_factory=dict)
    """For each value at an entry or inside the current region, its replacement in the new order."""

    def regions(self) -> list[list[Node]]:
        """Return the connected sets of layout-agnostic nodes, each in graph order.

        Nodes are connected by a value from one to the other, or by a permute that both read. Sets without an adjacent
        permute are omitted, since they have none to remove.
        """
        bound = {symbol.source.name for symbol in self.graph.symbols.values()}
        parent: dict[Node, Node] = {}
        reader: dict[Node, Node] = {}
        adjacent: list[Node] = []
        for node in self.graph.nodes:
            if node.op_type == "permute" and node.inputs[0].producer in parent:
                adjacent.append(node.inputs[0].producer)
            read = self._layout_operands(node)
            if read is None or any(v.name in bound for v in node.outputs):
                continue
            parent[node] = node
            for value in read:
                maker = value.producer
                if maker is not None and maker.op_type == "permute":
                    adjacent.append(node)
                    maker = reader.setdefault(maker, node)
                if maker in parent:
                    parent[_root(parent, node)] = _root(parent, maker)
        roots = {_root(parent, node) for node in adjacent}
        if self.last_stays:  # sets without such a node were processed for all orders
            roots &= {_root(parent, node) for node in parent if node.op_type in LAST_DIM_OPERATORS}
        found: dict[Node, list[Node]] = {}
        for node in parent:
            if (root := _root(parent, node)) in roots:
                found.setdefault(root, []).append(node)
        return list(found.values())

    def _layout_operands(self, node: Node) -> list[Value] | None:
        """Return the operands of a node that follow its dim order, or None if one of them cannot."""
        positions = None if node.op_type in LAST_DIM_OPERATORS and not self.last_stays else operands_to_permute(node)
        if positions is None:
            return None
        rank = node.outputs[0].type.rank
        values = [v for v in (node.inputs[i] for i in positions) if isinstance(v, Value) and v.type.shape != ()]
        return values if all(v.type.rank == rank or self._is_cheap(v) for v in values) else None

    def _is_cheap(self, value: Value) -> bool:
        """Whether a constant can be permuted ahead of time."""
        if is_deferred(value) or value.data is None or self.graph.is_overwritten(value.name):
            return False
        return value.data.nbytes <= self.limit_bytes or len(value.uses) == 1

    def improve(self, nodes: list[Node]) -> None:
        """Compute a region in the order that removes the most permutes, if any order removes some."""
        read = {node: self._layout_operands(node) or [] for node in nodes}
        saved, cost = self._count_permutes(read)
        orders = [order for order in saved if not self.last_stays or order[-1] == len(order) - 1]
        best = max(orders, key=saved.__getitem__, default=None)
        if best is not None and saved[best] > cost:
            self.reordered.clear()
            self._rewrite_in_order(best, read)

    def _count_permutes(self, inside: dict[Node, list[Value]]) -> tuple[dict[DimOrder, int], int]:
        """Return the number of permutes that each order removes, and the number that any order adds.

        The first is never too high, the second never too low: the pass terminates as the number of permutes falls.
        """
        saved: dict[DimOrder, int] = {}
        cost = 0
        entries = {v: None for read in inside.values() for v in read if v.producer not in inside}
        for value in entries:
            order = order_of(value.producer)
            if order is not None and value.producer is not None:
                if value.producer.inputs[0].producer not in inside:
                    saved[order] = saved.get(order, 0) + 1
                cost += any(use.user not in inside for use in value.uses)
            elif not self._is_cheap(value):
                cost += 1
        for node in inside:
            for value in node.outputs:
                vanishing, others = _find_exits(value, inside, self.graph)
                cost += others
                for order in vanishing:
                    saved[order] = saved.get(order, 0) + 1
        return saved, cost

    def _rewrite_in_order(self, order: DimOrder, inside: dict[Node, list[Value]]) -> None:
        for node, carried in inside.items():
            build = Builder(self.graph, self.operators, node, node.origin.with_rule(PushTransposes.name))
            follow = set(carried)
            operands = [self._operand(v, order, inside, build) if v in follow else v for v in node.inputs]
            types = [permute_type(value.type, invert_order(order)) for value in node.outputs]
            results = build(node.op, *operands, types=types, **permute_attrs(node, order))
            self.reordered.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
        for node in inside:
            for value in node.outputs:
                self._restore_outside_readers(value, order, inside)
        entries = [v.producer for node in inside for v in node.inputs if isinstance(v, Value) and v.producer]
        for node in reversed(inside):
            self.graph.erase(node)
        erase_dead(self.graph, *entries)

    def _operand(self, value: Value, order: DimOrder, inside: Container[object], build: Builder) -> Value:
        """Return the replacement of an operand in the new order, created on first use."""
        if value not in self.reordered:
            self.reordered[value] = self._entry(value, order, inside, build)
        return self.reordered[value]

    def _entry(self, value: Value, order: DimOrder, inside: Container[object], build: Builder) -> Value:
        back = invert_order(order)
        if self._is_cheap(value) and value.data is not None:
            shape = (1,) * (len(order) - value.type.rank) + tuple(value.data.shape)
            known = reshape_and_permute(value.data.detach(), shape=shape, dims=back)
            made = DeferredConstant(reshape_and_permute, (value,), (("shape", shape), ("dims", back)), known=known)
            return build.constant(made, value.name, TensorType(known.dtype, tuple(known.shape)))
        first = order_of(value.producer)
        if first is None or value.producer is None:
            return build("permute", value, dims=back, types=(permute_type(value.type, back),))
        source = value.producer.inputs[0]
        if source.producer in inside:
            return _add_permute(self.reordered[source], compose_orders(compose_orders(order, first), back), build)
        return _add_permute(source, compose_orders(first, back), build)

    def _restore_outside_readers(self, value: Value, order: DimOrder, inside: Container[object]) -> None:
        """Give readers outside the region their previous operands, through as few permutes as possible."""
        new = self.reordered[value]
        for user in [use.user for use in value.uses]:
            second = order_of(user) if isinstance(user, Node) and user not in inside else None
            if second is not None and isinstance(user, Node) and user in self.graph:
                build = Builder(self.graph, self.operators, user, user.origin.with_rule(PushTransposes.name))
                result = _add_permute(new, compose_orders(order, second), build)
                if result is not new or can_substitute(self.graph, user.output, new):
                    substitute(self.graph, user.output, result)
                    self.graph.erase(user)
        if any(use.user not in inside for use in value.uses):
            assert value.producer is not None
            build = Builder(self.graph, self.operators, value.producer, value.producer.origin)
            back = build("permute", new, dims=order, types=(value.type,))
            substitute(self.graph, value, back)


def reshape_and_permute(x: torch.Tensor, *, shape: tuple[int, ...], dims: DimOrder) -> torch.Tensor:
    """Return a constant reshaped and permuted."""
    return x.reshape(shape).permute(dims).contiguous()


def _root(parent: dict[Node, Node], node: Node) -> Node:
    while parent[node] is not node:
        parent[node] = node = parent[parent[node]]
    return node


def _add_permute(value: Value, order: DimOrder, build: Builder) -> Value:
    if order == tuple(range(len(order))):
        return value
    return build("permute", value, dims=order, types=(permute_type(value.type, order),))


def _find_exits(value: Value, inside: Container[object], graph: Graph) -> tuple[list[DimOrder], bool]:
    """Return the orders that make a permute outside redundant, and whether anything else reads the value.

    A permute that leads only back into the region is redundant in no order. Of redundant ones that the graph returns,
    only one can be removed, since a value has one name.
    """
    orders: list[DimOrder] = []
    others = returned = False
    for user in [use.user for use in value.uses if use.user not in inside]:
        if not isinstance(user, Node) or (order := order_of(user)) is None:
            others = True
            continue
        readers = [use.user for use in user.output.uses]
        if readers and all(reader in inside for reader in readers):
            continue
        named = graph in readers
        if named and returned:
            others = True
        else:
            orders.append(invert_order(order))
        returned = returned or named
    return orders, others
