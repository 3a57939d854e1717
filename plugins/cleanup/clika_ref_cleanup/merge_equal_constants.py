"""Merge constants with equal elements."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from typing import ClassVar

import torch

from clika_ref.core.deferred_constants import is_deferred
from clika_ref.core.ir import Graph, Value
from clika_ref.core.operators import Operator
from clika_ref.core.passes import Phase
from clika_ref.core.rewriter import can_substitute, substitute
from clika_ref_cleanup.cleanup_pass import CleanupPass

SAMPLE_BYTES = 256
"""Bytes compared before all others."""

CHUNK_BYTES = 1 << 20
"""Bytes read at a time."""


class MergeEqualConstants(CleanupPass):
    """Merge constants with equal dtype, shape, device and bits.

    Runs only on the lowered clone: two parameters of the stored graph that start out equal are trained separately.
    """

    name = "merge-equal-constants"
    phase = Phase.FUSE
    after = ("fold-batch-norm", "fold-constants")
    removes = "repeated constant"
    for_any_weights: ClassVar[bool] = False

    def __call__(self, graph: Graph, _: Mapping[str, Operator], /) -> None:
        """Compare elements only within groups of one dtype and shape, and deferred constants by their functions."""
        used = [v for name, v in graph.constants.items() if v.uses and not graph.is_overwritten(name)]
        for same in _group_equal([v for v in used if is_deferred(v)], lambda v: v.deferred_data):
            _merge(graph, same)
        there = [v for v in used if not is_deferred(v) and v.data is not None and v.data.device.type != "meta"]
        for group in _group_equal(there, _type_and_device):
            for equal in _group_equal(group, _read_sample):
                for same in _group_equal(equal, _compute_digest):
                    _merge(graph, same)


def _merge(graph: Graph, same: list[Value]) -> None:
    for value in same[1:]:
        if can_substitute(graph, value, same[0]):
            substitute(graph, value, same[0])


def _group_equal(values: list[Value], key: Callable[[Value], Hashable]) -> list[list[Value]]:
    """Group values by a key, and return groups of two or more. The key of a single value is not computed."""
    found: dict[Hashable, list[Value]] = {}
    for value in values if len(values) > 1 else ():
        found.setdefault(key(value), []).append(value)
    return [part for part in found.values() if len(part) > 1]


def _type_and_device(value: Value) -> Hashable:
    assert value.data is not None
    return value.type, value.data.device


def _as_bytes(value: Value) -> torch.Tensor:
    assert value.data is not None
    flat = value.data.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # view rejects a single element with another stride


def _read_sample(value: Value) -> bytes:
    """Return a sample of bytes, which distinguishes most constants: reading all bytes takes seconds for a gigabyte."""
    bits = _as_bytes(value)
    return _copy_to_bytes(bits[:: len(bits) // SAMPLE_BYTES | 1])  # odd steps sample each byte of an element


def _compute_digest(value: Value) -> bytes:
    mark = hashlib.sha256()
    for part in _as_bytes(value).split(CHUNK_BYTES):
        mark.update(_copy_to_bytes(part))
    return mark.digest()


def _copy_to_bytes(bits: torch.Tensor) -> bytes:
    """Return copied bytes: memory exported to NumPy can never be released, as FSDP does with full weights."""
    return bits.to("cpu", copy=True).numpy().tobytes()
