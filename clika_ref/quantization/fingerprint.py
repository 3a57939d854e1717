"""Short marks of a graph and its weights, and of data, by which it is known again what ranges and scales are of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

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


def batch_fingerprint(inputs: Sequence[Tensor]) -> str:
    """Return 32 hexadecimal digits, equal for batches of the same sides and elements, as far as these are looked at."""
    mark = hashlib.blake2b(digest_size=16)
    for x in inputs:
        mark.update(f"{x.dtype} {tuple(x.shape)}".encode())
        mark.update(sampled(x.detach().reshape(-1)).cpu().numpy().tobytes())
    return mark.hexdigest()
