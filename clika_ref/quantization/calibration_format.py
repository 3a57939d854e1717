"""A calibration as JSON and tensors, and back: ranges in little space, and the inputs that it keeps where wanted."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.quantization.calibration import Calibration, Reservoir
from clika_ref.quantization.histogram import BINS
from clika_ref.quantization.ranges import RangeTable

COUNTS, INPUTS = "counts", "inputs"
"""What tensors are: counts of all values, and ``inputs.<batch>.<input>``."""

THOROUGH = 9
"""The level of compression, of which the highest is quick enough: most counts are 0."""


def calibration_to_json(
    calibration: Calibration, *, is_whole: bool, keeps_inputs: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a calibration: a document, and tensors.

    Args:
        calibration: whose inputs are a part of what it has found.
        is_whole: whether it came to the end of the data.
        keeps_inputs: whether inputs are kept as well, by which other targets are decided for.
    """
    ranges, tensors = calibration.table.saved()
    tensors[COUNTS] = _squeezed(tensors[COUNTS])
    document = {"model": calibration.model, "ranges": ranges, "inputs": None}
    if keeps_inputs:
        kept = calibration.reservoir
        document |= {"inputs": len(kept.batches), "is full": kept.is_full, "is whole": is_whole}
        document["sizes"] = sorted(calibration.sizes.items())
        for number, batch in enumerate(kept.batches):
            tensors |= {f"{INPUTS}.{number}.{place}": x for place, x in enumerate(batch)}
    return document, tensors


def calibration_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor], graph: Graph) -> Calibration:
    """Return what `calibration_to_json` was given; one whose inputs were not kept holds none.

    Args:
        document: as it was returned.
        tensors: likewise.
        graph: of the module, in place of that which is going to be written: `Calibration.of` takes another one.

    Raises:
        ModelError: it is damaged.
    """
    try:
        counts = _unsqueezed(tensors[COUNTS], len(document["ranges"]["values"]))
        table = RangeTable.read(document["ranges"], {**tensors, COUNTS: counts}, "the saved calibration")
        found = Calibration(graph, table, model=str(document["model"]))
        if document["inputs"] is not None:
            batches = [_batch(tensors, number, len(graph.inputs)) for number in range(document["inputs"])]
            held = sum(x.nbytes for batch in batches for x in batch)
            found.reservoir = Reservoir(batches=batches, held_bytes=held, is_full=bool(document["is full"]))
            found.sizes = Counter({tuple((str(s), int(n)) for s, n in sizes): int(k) for sizes, k in document["sizes"]})
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        msg = f"the saved calibration is damaged: {type(error).__name__}: {error}; calibrate anew"
        raise ModelError(msg) from error
    return found


def _batch(tensors: Mapping[str, Tensor], number: int, count: int) -> list[Tensor]:
    return [tensors[f"{INPUTS}.{number}.{place}"] for place in range(count)]


def _squeezed(counts: Tensor) -> Tensor:
    """Return ``int64[values, bins]`` as ``uint8[bytes]``: where few elements were seen, most of its bytes are 0."""
    return torch.frombuffer(bytearray(zlib.compress(counts.numpy().tobytes(), THOROUGH)), dtype=torch.uint8)


def _unsqueezed(squeezed: Tensor, values: int) -> Tensor:
    """Return what `_squeezed` was given, and never more than so many values take."""
    size = values * 2 * BINS * torch.int64.itemsize
    found = zlib.decompressobj().decompress(squeezed.numpy().tobytes(), size + 1)
    if len(found) != size:
        msg = f"counts are not those of {values} values"
        raise ValueError(msg)
    counts = torch.zeros(values, 2 * BINS, dtype=torch.int64, device="cpu")
    return (
        counts.copy_(torch.frombuffer(bytearray(found), dtype=torch.int64).reshape(counts.shape)) if found else counts
    )
