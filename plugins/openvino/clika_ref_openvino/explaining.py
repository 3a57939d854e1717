"""What OpenVINO makes of a file: which of its nodes run in integers, read from the graph that the runtime executes."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from clika_ref.precisions import FLOAT, FUSED, INTEGERS

BYTES = frozenset({"u8", "i8"})

FEW_BITS = {"u8": 8, "i8": 8, "u4": 4, "i4": 4}
"""Types of weights that are multiplied with floats, and their bits."""

BORDERS = ("quantize", "dequantize")
"""Nodes between floats and integers, which stand for no layer."""

NO_LAYERS = frozenset({"Const", "Input", "Output", "Reorder", "FakeQuantize"})
"""Kinds of nodes that the runtime adds, or that make integers of floats."""

PRODUCT, OF_PRODUCTS = "MatMul", "FullyConnected"
"""What a product with a weight is called in a file, and when it is executed: by then it may have lost its name."""

LAYERS = frozenset({"Convolution", "Deconvolution", OF_PRODUCTS, PRODUCT})
"""Kinds of executed nodes that compute products: what these run in, their owners do, whatever else belongs to them."""

MOVED = "_original"
"""What the runtime appends to the name of a node that it computes in integers, and makes floats of in one more node."""


def precisions(executed: Any, read: Any, outputs: Iterable[str]) -> dict[str, str]:
    """Return what each node of a graph runs in: `INTEGERS`, ``int4 weights``, `FLOAT` and as what, or `FUSED`.

    Args:
        executed: the runtime's own graph, from ``CompiledModel.get_runtime_model()``.
        read: the model as it is in the file, names of whose nodes begin with that of a node of the graph.
        outputs: names of outputs, which nodes that make them bear alone.
    """
    owners, found = _Owners(read, outputs), dict[str, tuple[int, str]]()
    quantized = _quantized(executed, owners)
    for node in executed.get_ordered_ops():
        facts = node.get_rt_info()
        owner = owners.of(facts)
        if owner is None:
            continue
        weight = 2 if _said(facts, "layerType") in LAYERS else int(not owners.is_exact(node))
        before = found.get(owner, (0, ""))
        if weight > before[0] or (weight == before[0] and before[1] != INTEGERS):
            found[owner] = weight, _precision(node, facts, quantized)
    return {name: found.get(name, (0, FUSED))[1] for name in owners.names}


def seconds_of_nodes(
    executed: Any, read: Any, outputs: Iterable[str], counts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the seconds of a call that each node of a graph takes, and under ``""`` what belongs to none of them.

    Args:
        executed: as for `precisions`.
        read: likewise.
        outputs: likewise.
        counts: of each call, the seconds of executed nodes.
    """
    owners, found = _Owners(read, outputs), dict[str, float]()
    for node in executed.get_ordered_ops():
        taken = [seconds for of_call in counts if (seconds := of_call.get(node.get_friendly_name())) is not None]
        if taken:
            owner = owners.of(node.get_rt_info()) or ""
            found[owner] = found.get(owner, 0.0) + statistics.median(taken)
    return found


class _Owners:
    """The nodes of a graph, and to which of them nodes belong that the runtime executes."""

    def __init__(self, read: Any, outputs: Iterable[str]) -> None:
        self._originals = {node.get_friendly_name(): node for node in read.get_ops()}
        self.names = {name.partition("/")[0] for name in self._originals if "/" in name} | {*outputs}

    def of(self, facts: Any) -> str | None:
        """Return the name of the node of the graph that an executed one computes; None where it computes none."""
        if _said(facts, "layerType") in NO_LAYERS:
            return None
        firsts = [name.partition("/")[0] for name in _names(facts, self._originals)]
        known = (name if name in self.names else name.removesuffix(MOVED) for name in firsts)
        return next((name for name in known if name in self.names and not name.startswith(BORDERS)), None)

    def is_exact(self, node: Any) -> bool:
        """Return whether an executed node makes what are booleans or integers in the file, and stand for no floats."""
        original = self._originals.get(node.get_friendly_name())
        made = original.outputs()[0].get_element_type() if original is not None and original.outputs() else None
        return made is not None and not made.is_real() and made.get_type_name() not in BYTES


def _quantized(executed: Any, owners: _Owners) -> set[str]:
    """Return the names of executed nodes that make bytes which stand for floats: those of booleans, too, are u8."""
    found = set[str]()
    for node in executed.get_ordered_ops():
        types = [output.get_element_type().get_type_name() for output in node.outputs()]
        if BYTES.isdisjoint(types) or owners.is_exact(node):
            continue
        operands = [operand.get_source_output() for operand in node.inputs()]
        is_weight = _said(node.get_rt_info(), "layerType") == "Const" and "i8" in types
        if is_weight or any(o.get_element_type().is_real() or _maker(o) in found for o in operands):
            found.add(node.get_friendly_name())
    return found


def _maker(output: Any) -> str:
    return output.get_node().get_friendly_name()


def _precision(node: Any, facts: Any, quantized: Collection[str]) -> str:
    kind, precision = _said(facts, "layerType"), _said(facts, "runtimePrecision")
    operands = [operand.get_source_output() for operand in node.inputs()]
    if kind == OF_PRODUCTS and operands[0].get_element_type().get_type_name() not in BYTES:
        bits = FEW_BITS.get(operands[1].get_element_type().get_type_name())
        if bits is not None:
            return f"int{bits} weights"
    if precision in BYTES:
        if kind in LAYERS or any(_maker(operand) in quantized for operand in operands):
            return INTEGERS
        precision = node.outputs()[0].get_element_type().get_type_name()  # as that of one that reads a mask, too, is u8
    return f"{FLOAT}: OpenVINO runs it as {kind} in {precision}"


def _names(facts: Any, originals: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what a node was made of, the one that it computes first."""
    names = _said(facts, "originalLayersNames").split(",")
    if _said(facts, "layerType") == OF_PRODUCTS:
        added = originals.get(names[0])
        for operand in added.input_values() if added is not None else ():
            if operand.get_node().get_type_name() == PRODUCT:
                yield operand.get_node().get_friendly_name()
    yield from names


def _said(facts: Any, key: str) -> str:
    """Return an entry of a node's runtime information, which is text, or nothing."""
    return str(facts[key].astype(str)) if key in facts else ""
