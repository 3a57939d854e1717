"""Determine which nodes of a file OpenVINO runs in INT8, from the graph that the runtime executes."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from clika_ref.core.targets import FLOAT_PRECISION, FUSED_PRECISION, INT8_PRECISION
from clika_ref.settings.quantization import INT8_BITS
from clika_ref.targets import cpu

INT8_TYPES = frozenset({"u8", "i8"})

WEIGHT_TYPE_BITS = {"u8": 8, "i8": 8, "u4": 4, "i4": 4}
"""Weight types of products with float activations, with their bits."""

PAIR_PREFIXES = ("quantize", "dequantize")
"""Prefixes of quantize and dequantize nodes, which are no layers."""

NON_LAYER_TYPES = frozenset({"Const", "Input", "Output", "Reorder", "FakeQuantize"})
"""Node types that the runtime inserts, or that quantize."""

MATMUL_TYPE, FULLY_CONNECTED_TYPE = "MatMul", "FullyConnected"
"""The type of a matrix product in a file and after compilation, which may rename it."""

LAYER_TYPES = frozenset({"Convolution", "Deconvolution", FULLY_CONNECTED_TYPE, MATMUL_TYPE})
"""Executed node types that compute products. Their precision is that of their owner, whatever else belongs to it."""

SCALES_POSITION = 3
"""Position of the weight scales, ``float32[outputs, blocks]``, among the inputs of a fully connected layer."""

ROUNDING_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})
"""CPU flags of instructions with which the runtime rounds the inputs of layers with low-bit weights."""

GROUP_SIZE_FACTOR = 16
"""Number of elements in a vector, of which each group of an input is a multiple."""

ORIGINAL_SUFFIX = "_original"
"""Suffix that the runtime appends to an INT8 node if it adds a node that dequantizes its result."""


def read_precisions(executed: Any, read: Any, outputs: Iterable[str], *, group_size: int) -> dict[str, str]:
    """Return the precision of each graph node: ``int8``, ``int4 weights``, ``float`` with its type, or ``fused``.

    Args:
        executed: the runtime's own graph, from ``CompiledModel.get_runtime_model()``.
        read: the model of the file; its node names begin with those of the graph nodes.
        outputs: names of outputs; the nodes that produce them have these names alone.
        group_size: ``DYNAMIC_QUANTIZATION_GROUP_SIZE`` of the compiled model.
    """
    owners, found = _Owners(read, outputs), dict[str, tuple[int, str]]()
    quantized = _find_quantized_nodes(executed, owners)
    for node in executed.get_ordered_ops():
        facts = node.get_rt_info()
        owner = owners.of(facts)
        if owner is None:
            continue
        weight = 2 if _runtime_info(facts, "layerType") in LAYER_TYPES else int(not owners.is_exact(node))
        before = found.get(owner, (0, ""))
        if weight > before[0] or (weight == before[0] and before[1] != INT8_PRECISION):
            found[owner] = weight, _precision(node, facts, quantized, group_size)
    return {name: found.get(name, (0, FUSED_PRECISION))[1] for name in owners.names}


def seconds_of_nodes(
    executed: Any, read: Any, outputs: Iterable[str], counts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the seconds of each graph node in a call; ``""`` is the time that belongs to no node.

    Args:
        executed: as for `read_precisions`.
        read: as for `read_precisions`.
        outputs: as for `read_precisions`.
        counts: for each call, the seconds of executed nodes.
    """
    owners, found = _Owners(read, outputs), dict[str, float]()
    for node in executed.get_ordered_ops():
        taken = [seconds for of_call in counts if (seconds := of_call.get(node.get_friendly_name())) is not None]
        if taken:
            owner = owners.of(node.get_rt_info()) or ""
            found[owner] = found.get(owner, 0.0) + statistics.median(taken)
    return found


class _Owners:
    """Maps executed nodes to the graph nodes that they belong to."""

    def __init__(self, read: Any, outputs: Iterable[str]) -> None:
        self._originals = {node.get_friendly_name(): node for node in read.get_ops()}
        self.names = {name.partition("/")[0] for name in self._originals if "/" in name} | {*outputs}

    def of(self, facts: Any) -> str | None:
        """Return the name of the graph node that an executed node computes, or None."""
        if _runtime_info(facts, "layerType") in NON_LAYER_TYPES:
            return None
        firsts = [name.partition("/")[0] for name in _original_names(facts, self._originals)]
        known = (name if name in self.names else name.removesuffix(ORIGINAL_SUFFIX) for name in firsts)
        return next((name for name in known if name in self.names and not name.startswith(PAIR_PREFIXES)), None)

    def is_exact(self, node: Any) -> bool:
        """Return whether the result of an executed node is boolean or integer in the file, rather than quantized."""
        original = self._originals.get(node.get_friendly_name())
        made = original.outputs()[0].get_element_type() if original is not None and original.outputs() else None
        return made is not None and not made.is_real() and made.get_type_name() not in INT8_TYPES


def _find_quantized_nodes(executed: Any, owners: _Owners) -> set[str]:
    """Return the names of executed nodes with quantized results. Booleans are u8, too, but not quantized."""
    found = set[str]()
    for node in executed.get_ordered_ops():
        types = [output.get_element_type().get_type_name() for output in node.outputs()]
        if INT8_TYPES.isdisjoint(types) or owners.is_exact(node):
            continue
        operands = [operand.get_source_output() for operand in node.inputs()]
        is_weight = _runtime_info(node.get_rt_info(), "layerType") == "Const" and "i8" in types
        if is_weight or any(o.get_element_type().is_real() or _producer_name(o) in found for o in operands):
            found.add(node.get_friendly_name())
    return found


def _producer_name(output: Any) -> str:
    return output.get_node().get_friendly_name()


def _precision(node: Any, facts: Any, quantized: Collection[str], group_size: int) -> str:
    kind, precision = _runtime_info(facts, "layerType"), _runtime_info(facts, "runtimePrecision")
    operands = [operand.get_source_output() for operand in node.inputs()]
    if kind == FULLY_CONNECTED_TYPE and operands[0].get_element_type().get_type_name() not in INT8_TYPES:
        bits = WEIGHT_TYPE_BITS.get(operands[1].get_element_type().get_type_name())
        if bits == INT8_BITS and _rounds_input(operands, group_size):
            return INT8_PRECISION
        if bits is not None:
            return f"int{bits} weights"
    if precision in INT8_TYPES:
        if kind in LAYER_TYPES or any(_producer_name(operand) in quantized for operand in operands):
            return INT8_PRECISION
        precision = node.outputs()[0].get_element_type().get_type_name()  # a reader of a mask also has precision u8
    return f"{FLOAT_PRECISION}: OpenVINO runs it as {kind} in {precision}"


def _rounds_input(operands: Sequence[Any], group_size: int) -> bool:
    """Return whether a layer with low-bit weights rounds its input to 8 bits, which the executed graph does not show.

    Source: ``useDynamicQuantizationImpl`` of OpenVINO's ``dnnl_fullyconnected_primitive.cpp``; the lengths of rows and
    blocks are measured with openvino 2026.4.
    """
    if not group_size or group_size % GROUP_SIZE_FACTOR or not cpu.cpu_flags() & ROUNDING_FLAGS:
        return False
    if operands[0].get_element_type().get_type_name() != "f32":
        return False
    given, scales = (operands[i].get_partial_shape() for i in (0, SCALES_POSITION))
    length, blocks = given[-1].get_length(), scales[1].get_length() if len(scales) > 1 else 1
    return length >= group_size if blocks == 1 else length // blocks % group_size == 0


def _original_names(facts: Any, originals: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the nodes that an executed node was fused from, the computed one first."""
    names = _runtime_info(facts, "originalLayersNames").split(",")
    if _runtime_info(facts, "layerType") == FULLY_CONNECTED_TYPE:
        added = originals.get(names[0])
        for operand in added.input_values() if added is not None else ():
            if operand.get_node().get_type_name() == MATMUL_TYPE:
                yield operand.get_node().get_friendly_name()
    yield from names


def _runtime_info(facts: Any, key: str) -> str:
    """Return an entry of a node's runtime information as text; empty if absent."""
    return str(facts[key].astype(str)) if key in facts else ""
