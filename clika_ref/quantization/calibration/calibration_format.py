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
from clika_ref.serialization.vocabulary import CalibrationKey, RangesKey


def calibration_to_json(
    calibration: Calibration, *, is_complete: bool, keeps_inputs: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a calibration as a JSON document and tensors.

    Args:
        calibration: its kept inputs are part of the state.
        is_complete: whether it has processed all of the data.
        keeps_inputs: whether to save the kept inputs as well, which are needed to quantize for other targets.
    """
    ranges, tensors = calibration.table.to_document()
    tensors[CalibrationKey.COUNT_BYTE_PLANES] = _compress_counts(tensors.pop(RangesKey.COUNTS))
    document: dict[str, Any] = {
        CalibrationKey.MODEL: calibration.model,
        CalibrationKey.RANGES: ranges,
        CalibrationKey.INPUTS: None,
    }
    if keeps_inputs:
        kept = calibration.reservoir
        document |= {
            CalibrationKey.INPUTS: len(kept.batches),
            CalibrationKey.IS_FULL: kept.is_full,
            CalibrationKey.IS_COMPLETE: is_complete,
            CalibrationKey.SIZES: sorted(calibration.sizes.items()),
        }
        for number, batch in enumerate(kept.batches):
            tensors |= {f"{CalibrationKey.INPUTS}.{number}.{index}": x for index, x in enumerate(batch)}
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
        counts = _decompress_counts(tensors, len(document[CalibrationKey.RANGES][RangesKey.ACTIVATIONS]))
        table = RangeTable.read(
            document[CalibrationKey.RANGES], {**tensors, RangesKey.COUNTS: counts}, "the saved calibration"
        )
        found = Calibration(graph, table, model=str(document[CalibrationKey.MODEL]))
        if document[CalibrationKey.INPUTS] is not None:
            batches = [
                [tensors[f"{CalibrationKey.INPUTS}.{number}.{index}"] for index in range(len(graph.inputs))]
                for number in range(document[CalibrationKey.INPUTS])
            ]
            size_bytes = sum(x.nbytes for batch in batches for x in batch)
            found.reservoir = Reservoir(
                batches=batches, used_bytes=size_bytes, is_full=bool(document[CalibrationKey.IS_FULL])
            )
            found.sizes = Counter(
                {tuple((str(s), int(n)) for s, n in sizes): int(k) for sizes, k in document[CalibrationKey.SIZES]}
            )
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise ModelError(
            f"the saved calibration is damaged: {type(error).__name__}: {error}. Calibrate again."
        ) from error
    return found


def _compress_counts(counts: Tensor) -> Tensor:
    """Compress counts ``int64[values, bins]`` to ``uint8[bytes]``.

    The lowest bytes of all counts come first; the other byte planes are mostly 0.
    """
    return deflate(_byte_view(counts).T.contiguous().numpy().tobytes())


def _decompress_counts(tensors: Mapping[str, Tensor], activations: int) -> Tensor:
    """Decompress the counts of this many activations; never allocates more than they take."""
    size = activations * 2 * BINS_PER_SIGN * torch.int64.itemsize
    planes = inflate(tensors[CalibrationKey.COUNT_BYTE_PLANES], size)
    if len(planes) != size:
        raise ValueError(f"the number of counts does not match {activations} activations")
    counts = torch.zeros(activations, 2 * BINS_PER_SIGN, dtype=torch.int64, device="cpu")
    if planes:
        count_bytes = _byte_view(counts)
        for index, plane in enumerate(
            torch.frombuffer(bytearray(planes), dtype=torch.uint8).reshape(count_bytes.T.shape)
        ):
            if plane.any():
                count_bytes[:, index] = plane
    return counts


def _byte_view(counts: Tensor) -> Tensor:
    """Return a view of the bytes of counts, ``uint8[counts, 8]``."""
    return counts.view(-1).view(torch.uint8).reshape(-1, torch.int64.itemsize)
