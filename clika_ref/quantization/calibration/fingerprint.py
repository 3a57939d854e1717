"""Fingerprints of graphs, weights and data, to recognize those that ranges and scales belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from clika_ref.core.ir import Graph, walk
from clika_ref.quantization.calibration.statistics import flatten_in_memory_order, sample_evenly
from clika_ref.quantization.qdq.layer_weights import data_of


def fingerprint(graph: Graph) -> str:
    """Return 32 hexadecimal digits, equal for graphs of the same nodes and weights.

    Large weights are sampled at some thousand evenly spread elements, since training changes nearly all of them.
    Tensors that calls write to, such as a cache, are excluded.
    """
    mark = hashlib.blake2b(digest_size=16)
    for node in walk(graph):
        mark.update(f"{node.op_type} {[v.name for v in node.outputs]} {[str(v.type) for v in node.outputs]}".encode())
    for name, value in graph.constants.items():
        if name not in graph.state and value.data is not None:
            mark.update(f"{name} {value.type}".encode())
            mark.update(sample_evenly(flatten_in_memory_order(data_of(value))).cpu().numpy().tobytes())
    return mark.hexdigest()


def batch_fingerprint(inputs: Sequence[Tensor]) -> str:
    """Return 32 hexadecimal digits, equal for batches of the same shapes and (sampled) elements."""
    mark = hashlib.blake2b(digest_size=16)
    for x in inputs:
        mark.update(f"{x.dtype} {tuple(x.shape)}".encode())
        mark.update(sample_evenly(x.detach().reshape(-1)).cpu().numpy().tobytes())
    return mark.hexdigest()
