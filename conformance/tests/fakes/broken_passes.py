"""Faulty passes, each with one fault that a real pass had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from clika_ref.core.accuracy import DOT, EXACT, ErrorClass
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import Rule, Skip, apply_rules, can_substitute, erase_dead, rule, substitute
from clika_ref.core.symbols import is_symbolic, resolve

Operators = Mapping[str, Operator]


@dataclass(frozen=True)
class Broken:
    """A pass made of a function; its fields are those of the protocol."""

    change: Callable[[Graph, Operators], None]
    name: str
    phase: Phase = Phase.CLEAN
    error: ErrorClass = EXACT
    after: ClassVar[tuple[str, ...]] = ()
    removes: ClassVar[str] = "node"

    def __call__(self, graph: Graph, operators: Operators, /) -> None:
        """Apply the faulty change."""
        self.change(graph, operators)


def _fold_into_shared_layer(graph: Graph, _: Operators) -> None:
    """Fold batch norm into a convolution in place, though the convolution is read elsewhere too."""
    for node in graph.nodes:
        layer = node.inputs[0].producer if node.op_type == "batch_norm" and isinstance(node.inputs[0], Value) else None
        if layer is None or layer.op_type not in {"conv1d", "conv2d", "conv3d"} or node.attrs["training"]:
            continue
        values = [*layer.inputs[1:3], *node.inputs[1:5]]
        fixed = all(v is None or v.data is not None for v in values) and layer.output.type.rank == values[0].type.rank
        if not fixed or None in node.inputs[3:5] or not can_substitute(graph, node.output, layer.output):
            continue
        weight, bias, gamma, beta, mean, var = (None if v is None else v.data.detach().double() for v in values)
        scale = torch.rsqrt(var + node.attrs["eps"]) * (1 if gamma is None else gamma)
        shift = ((0 if bias is None else bias) - mean) * scale + (0 if beta is None else beta)
        scaled = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
        for position, data in ((1, scaled), (2, shift)):
            dtype = layer.inputs[1].type.dtype
            graph.set_input(layer, position, graph.add_constant(data.to(dtype), f"folded{position}"))
        substitute(graph, node.output, layer.output)
        graph.erase(node)


def _merge_by_operands(graph: Graph, _: Operators) -> None:
    """Merge calls of one operator on the same operands, ignoring their attributes."""
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op.random or len(node.outputs) != 1:
            continue
        twin = first.setdefault((node.op, node.inputs, node.output.type), node)
        if twin is not node and can_substitute(graph, node.output, twin.output):
            substitute(graph, node.output, twin.output)
            graph.erase(node)


def _merge_random(graph: Graph, _: Operators) -> None:
    """Merge equal calls, including random ones."""
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if len(node.outputs) != 1 or not node.is_random:
            continue
        twin = first.setdefault((node.op, node.inputs, repr(node.attrs), node.output.type), node)
        if twin is not node and can_substitute(graph, node.output, twin.output):
            substitute(graph, node.output, twin.output)
            graph.erase(node)


@rule("permute")
def cancel_any_permutes(node: Node, build: Builder):
    """Treat two permutes as inverse to each other if the shape is the original one."""
    match node.inputs[0]:
        case Value(producer=Node("permute", (Value() as x,))) if x.type == node.output.type:
            return x
    return Skip("its operand is no permute, or the shape changes")


def _drop_output_name(graph: Graph, _: Operators) -> None:
    """Remove idle dropout, and the name of the output with it."""
    for node in graph.nodes:
        if node.op_type == "dropout" and not node.attrs["train"]:
            graph.replace(node.output, node.inputs[0])
            graph.erase(node)


@rule("dropout")
def drop_in_training(node: Node, build: Builder):
    """Remove dropout that drops."""
    return node.inputs[0] if node.inputs[0].type == node.output.type else Skip("changes the type")


def _scale_in_place(graph: Graph, _: Operators) -> None:
    """Fold a factor into a constant by changing its elements."""
    for node in graph.nodes:
        match node:
            case Node("mul", (Value(data=torch.Tensor() as data) as x, int() | float() as factor)):
                if x.type == node.output.type and can_substitute(graph, node.output, x):
                    data.detach().mul_(factor)
                    graph.replace(node.output, x)
                    graph.erase(node)


def _swap_operands(graph: Graph, _: Operators) -> None:
    """Swap the operands of a maximum in every run."""
    for node in graph.nodes:
        if node.op_type == "maximum" and node.inputs[0] is not node.inputs[1]:
            first, second = node.inputs
            graph.set_input(node, 0, second)
            graph.set_input(node, 1, first)


def _freeze_sizes(graph: Graph, operators: Operators) -> None:
    """Write the example size of each dynamic dim into the shapes of reshapes."""
    examples = {name: symbol.example for name, symbol in graph.symbols.items() if symbol.example is not None}
    for node in graph.nodes:
        if node.op_type in {"squeeze", "unsqueeze", "reshape"} and not (
            node.op_type == "reshape" and not is_symbolic(node.attrs["shape"])
        ):
            shape = resolve(node.output.type.shape, examples)
            new = Builder(graph, operators, node)("reshape", node.inputs[0], shape=shape, types=(node.output.type,))
            substitute(graph, node.output, new)
            graph.erase(node)


@rule("mul")
def absorb_zero(node: Node, build: Builder):
    """Take ``x * 0`` for 0, whatever ``x`` is."""
    match node.inputs:
        case (Value() as x, int() | float() as number) if number == 0 and x.type == node.output.type:
            return build("full", size=x.type.shape, fill_value=0, dtype=x.type.dtype, types=(x.type,))
    return Skip("no factor is 0")


@rule("to")
def merge_any_casts(node: Node, build: Builder):
    """Merge casts even if the first one loses precision."""
    match node.inputs[0]:
        case Value(producer=Node("to", (Value() as x, *_))):
            return build("to", x, **node.attrs, types=(node.output.type,))
    return Skip("its operand is no cast")


@rule("add")
def drop_zero_of_any_dtype(node: Node, build: Builder):
    """Replace ``x + 0`` by ``x``, ignoring ``alpha`` and the dtype of the number."""
    match node.inputs:
        case (Value() as x, int() | float() as number) if number * node.attrs["alpha"] in (0, 1):
            return x if x.type == node.output.type else Skip("changes the type")
    return Skip("adds no number")


def _drop_parameters(graph: Graph, _: Operators) -> None:
    """Drop unused parameters of the stored graph."""
    graph.drop_unused_constants()


def _copy_weights(graph: Graph, _: Operators) -> None:
    """Give each reader of a shared weight a copy of its own."""
    for value in list(graph.constants.values()):
        for user, position in value.uses[1:]:
            if isinstance(user, Node) and value.data is not None and value.data.numel() > 1:
                graph.set_input(user, int(position), graph.add_constant(value.data.detach().clone(), value.name))


def _erase_unread_state(graph: Graph, _: Operators) -> None:
    """Fold nodes that read constants, although a call overwrites these."""
    for node in graph.nodes:
        leaves = [v for v in node.inputs if isinstance(v, Value)]
        returned = any(use.user is graph for v in node.outputs for use in v.uses)
        if node.op_type == "neg" and all(v.data is not None for v in leaves) and leaves and not returned:
            assert leaves[0].data is not None
            graph.replace(node.output, graph.add_constant(-leaves[0].data.detach(), "folded"))
            erase_dead(graph, node)


def _edit_attributes(graph: Graph, _: Operators) -> None:
    """Normalize an attribute in the dictionary that clones share."""
    for node in graph.nodes:
        if node.op_type == "softmax" and node.attrs["dim"] < 0:
            node.attrs["dim"] += node.output.type.rank
            graph.revision += 1


def _raise_error(graph: Graph, _: Operators) -> None:
    """Fail on an unexpected operator."""
    for node in graph.nodes:
        if node.op_type == "sigmoid" and len(node.output.uses) > 1:
            raise ValueError("a sigmoid has one reader")
        if node.op_type == "sigmoid" and isinstance(node.inputs[0], Value) and node.inputs[0].producer is not None:
            inner = node.inputs[0].producer
            if inner.op_type == "neg" and inner.output.type == inner.inputs[0].type:
                graph.set_input(node, 0, inner.output)


def _state_wrong_types(graph: Graph, operators: Operators) -> None:
    """Widen a sum, and state the old type."""
    for node in graph.nodes:
        if node.op_type == "relu" and node.output.type.dtype == torch.float32:
            wide = Builder(graph, operators, node)("sigmoid", node.inputs[0], types=(node.output.type,))
            substitute(graph, node.output, wide)
            graph.erase(node)


@rule("erfc")
def match_nothing(node: Node, build: Builder):
    """A rule that never applies, since no graph contains its operator."""
    return Skip("never applies") if node.op_type == "erfc" else node.inputs[0]


def _change_by_rule(applied: Rule) -> Callable[[Graph, Operators], None]:
    def change(graph: Graph, operators: Operators) -> None:
        apply_rules(graph, [applied], operators)

    return change


BROKEN = [
    Broken(_fold_into_shared_layer, "fold-into-shared-layer", Phase.FUSE, DOT),
    Broken(_merge_by_operands, "merge-by-operands"),
    Broken(_merge_random, "merge-random"),
    Broken(_change_by_rule(cancel_any_permutes), "cancel-any-permutes"),
    Broken(_drop_output_name, "drop-output-name"),
    Broken(_change_by_rule(drop_in_training), "drop-in-training"),
    Broken(_scale_in_place, "scale-in-place"),
    Broken(_swap_operands, "turn-operands"),
    Broken(_freeze_sizes, "freeze-sizes"),
    Broken(_change_by_rule(absorb_zero), "absorb-zero"),
    Broken(_change_by_rule(merge_any_casts), "merge-any-casts"),
    Broken(_change_by_rule(drop_zero_of_any_dtype), "drop-zero-of-any-dtype"),
    Broken(_drop_parameters, "forget-parameters"),
    Broken(_copy_weights, "copy-weights"),
    Broken(_erase_unread_state, "fold-overwritten"),
    Broken(_edit_attributes, "edit-attributes"),
    Broken(_raise_error, "raise-on-two-readers"),
    Broken(_state_wrong_types, "replace-relu"),
    Broken(_change_by_rule(match_nothing), "never-fires"),
]


def _rename_in_set_order(graph: Graph, operators: Operators) -> None:
    """Rename outputs in the order of a set of strings, which differs between processes."""
    names = {node.name for node in graph.nodes}
    for number, name in enumerate(names):
        for node in graph.nodes:
            if node.name == name and node.op_type == "relu" and not any(u.user is graph for u in node.output.uses):
                new = Builder(graph, operators, node)("relu", node.inputs[0])
                new.name = graph.fresh_name(f"relu_of_{number}")
                graph.replace(node.output, new)
                graph.erase(node)


WALK_A_SET = Broken(_rename_in_set_order, "walk-a-set")
