"""A short mark of a graph and of its weights, by which it is known again whether ranges and scales are of these."""

from __future__ import annotations

import hashlib

from clika_ref.core.ir import Graph
from clika_ref.quantization.layer_weights import numbers_of
from clika_ref.quantization.statistics import in_memory_order, sampled


def fingerprint(graph: Graph) -> str:
    """Return 32 hexadecimal digits, equal for graphs of the same nodes and weights.

    Of large weights some thousand elements are looked at, evenly spread: training changes nearly all of them. What
    calls write to, such as a cache, is no part of it.
    """
    mark = hashlib.blake2b(digest_size=16)
    for node in graph.nodes:
        mark.update(f"{node.kind} {[v.name for v in node.outputs]} {[str(v.type) for v in node.outputs]}".encode())
    for name, value in graph.constants.items():
        if name not in graph.state and value.data is not None:
            mark.update(f"{name} {value.type}".encode())
            mark.update(sampled(in_memory_order(numbers_of(value))).cpu().numpy().tobytes())
    return mark.hexdigest()
