"""Serialization of a calibration as JSON and tensors: compact ranges and, optionally, the kept inputs."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.quantization.calibration.calibrator import Calibration, Reservoir
from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.serialization.container import deflate, inflate

COUNTS_TENSOR, BYTE_PLANES_TENSOR, INPUTS_PREFIX = "counts", "planes of counts", "inputs"
"""Names of tensors: counts of all values before file format 2 and since then, and ``inputs.<batch>.<input>``."""


def calibration_to_json(
    calibration: Calibration, *, is_whole: bool, keeps_inputs: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a calibration as a JSON document and tensors.

    Args:
        calibration: its kept inputs are part of the state.
        is_whole: whether it has processed all of the data.
        keeps_inputs: whether to save the kept inputs as well, which are needed to quantize for other targets.
    """
    ranges, tensors = calibration.table.to_document()
    tensors[BYTE_PLANES_TENSOR] = _compress_counts(tensors.pop(COUNTS_TENSOR))
    document = {"model": calibration.model, "ranges": ranges, "inputs": None}
    if keeps_inputs:
        reservoir = calibration.reservoir
        document |= {"inputs": len(reservoir.batches), "is full": reservoir.is_full, "is whole": is_whole}
        document["sizes"] = sorted(calibration.sizes.items())
        for number, batch in enumerate(reservoir.batches):
            tensors |= {f"{INPUTS_PREFIX}.{number}.{position}": x for position, x in enumerate(batch)}
    return document, tensors


def calibration_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor], graph: Graph) -> Calibration:
    """Return the calibration that `calibration_to_json` converted; without saved inputs it has none.

    Args:
        document: the JSON document.
        tensors: the tensors of `calibration_to_json`.
        graph: of the module, before lowering; `Calibration.of` takes the lowered one.

    Raises:
        ModelError: the data is damaged.
    """
    try:
        counts = _decompress_counts(tensors, len(document["ranges"]["values"]))
        table = RangeTable.read(document["ranges"], {**tensors, COUNTS_TENSOR: counts}, "the saved calibration")
        found = Calibration(graph, table, model=str(document["model"]))
        if document["inputs"] is not None:
            batches = [_read_batch(tensors, number, len(graph.inputs)) for number in range(document["inputs"])]
            total_bytes = sum(x.nbytes for batch in batches for x in batch)
            found.reservoir = Reservoir(batches=batches, used_bytes=total_bytes, is_full=bool(document["is full"]))
            found.sizes = Counter({tuple((str(s), int(n)) for s, n in sizes): int(k) for sizes, k in document["sizes"]})
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        msg = f"the saved calibration is damaged: {type(error).__name__}: {error}. Calibrate again."
        raise ModelError(msg) from error
    return found


def _read_batch(tensors: Mapping[str, Tensor], number: int, count: int) -> list[Tensor]:
    return [tensors[f"{INPUTS_PREFIX}.{number}.{position}"] for position in range(count)]


def _compress_counts(counts: Tensor) -> Tensor:
    """Compress counts ``int64[values, bins]`` to ``uint8[bytes]``.

    The lowest bytes of all counts come first; the other byte planes are mostly 0.
    """
    return deflate(_byte_view(counts).T.contiguous().numpy().tobytes())


def _decompress_counts(tensors: Mapping[str, Tensor], values: int) -> Tensor:
    """Decompress the counts of this many values; never allocates more than they take."""
    size, squeezed = (
        values * 2 * BINS_PER_SIGN * torch.int64.itemsize,
        tensors[BYTE_PLANES_TENSOR if BYTE_PLANES_TENSOR in tensors else COUNTS_TENSOR],
    )
    found = inflate(squeezed, size)
    if len(found) != size:
        msg = f"the number of counts does not match {values} activations"
        raise ValueError(msg)
    counts = torch.zeros(values, 2 * BINS_PER_SIGN, dtype=torch.int64, device="cpu")
    if found:
        total_bytes, seen = torch.frombuffer(bytearray(found), dtype=torch.uint8), _byte_view(counts)
        if BYTE_PLANES_TENSOR in tensors:
            for position, plane in enumerate(total_bytes.reshape(seen.T.shape)):
                if plane.any():
                    seen[:, position] = plane
        else:
            seen.copy_(total_bytes.reshape(seen.shape))
    return counts


def _byte_view(counts: Tensor) -> Tensor:
    """Return a view of the bytes of counts, ``uint8[counts, 8]``."""
    return counts.view(-1).view(torch.uint8).reshape(-1, torch.int64.itemsize)
