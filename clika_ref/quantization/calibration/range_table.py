"""``RangeTable``: the statistics of every value from one pass over the calibration data, independent of the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError
from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN, Histogram
from clika_ref.quantization.calibration.statistics import BatchStatistics, ExactSum, Statistics
from clika_ref.serialization.atomic_files import write_atomically

RANGE_TABLE_VERSION = 3
"""Version of the file format; raised when older files can no longer be read."""

METADATA_KEY = "clika_ranges"
"""Metadata entry that holds everything except the counts."""


SMOOTHING_PREFIX = "smoothing"
"""Prefix of the smoothing factors: ``smoothing.<value>``."""


@dataclass
class RangeTable:
    """Statistics by value name, and the number of batches that they cover.

    Tables of parts of the data, made in several processes, can be merged. The result is that of a single process.
    """

    values: dict[str, Statistics] = field(default_factory=dict[str, Statistics])
    """Statistics of each value, by name."""
    batches: int = 0
    """Number of counted batches."""
    smoothing: dict[str, torch.Tensor] | None = None
    """Factors that some values are divided by before quantization (SmoothQuant), by name.

    The statistics are those of the divided values. None if factors were not searched yet.
    """
    smoothing_purpose: str = ""
    """The quantization that the factors were searched for, in words; they are valid for it alone."""
    model: str = ""
    """Fingerprint of the model (`clika_ref.quantization.calibration.fingerprint`); empty if unknown."""
    first: str = ""
    """Fingerprint of the first batch, to recognize the data; empty if unknown."""

    def add(self, batch: Mapping[str, BatchStatistics]) -> None:
        """Add the statistics of one more batch; it counts once all its values are added."""
        for name, found in batch.items():
            self._statistics_of(name).add(found)
        self.batches += 1

    def merge(self, other: RangeTable) -> None:
        """Add a table of other data."""
        self.first = self.first if self.batches else other.first
        self.batches += other.batches
        for name, statistics in other.values.items():
            self._statistics_of(name).merge(statistics)

    def _statistics_of(self, name: str) -> Statistics:
        return self.values.setdefault(name, Statistics())

    def save(self, path: Path | str) -> None:
        """Write the table as safetensors: the counts as one tensor, the rest as JSON in the metadata.

        Raises:
            ModelError: the file cannot be written.
        """
        document, tensors = self.to_document()
        blob = safetensors.torch.save(tensors, {METADATA_KEY: json.dumps(document, separators=(",", ":"))})
        with write_atomically(path) as file:
            file.write(blob)

    def to_document(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return a JSON document and tensors for `read`: ``counts[values, bins]``, and factors ``[channels]``."""
        document = {
            "version": RANGE_TABLE_VERSION,
            "model": self.model,
            "batches": self.batches,
            "first": self.first,
            "smoothing": None if self.smoothing is None else [*self.smoothing],
            "smoothed for": self.smoothing_purpose,
            "values": {name: statistics_to_json(statistics) for name, statistics in self.values.items()},
        }
        counts = [statistics.histogram.counts for statistics in self.values.values()]
        tensors = {"counts": torch.stack(counts) if counts else torch.zeros(0, 2 * BINS_PER_SIGN, dtype=torch.int64)}
        tensors |= {f"{SMOOTHING_PREFIX}.{name}": factor.cpu() for name, factor in (self.smoothing or {}).items()}
        return document, tensors

    @classmethod
    def load(cls, path: Path | str) -> RangeTable:
        """Read a file that `save` wrote; executes nothing from it.

        Raises:
            ModelError: the file cannot be read, or is no range table.
        """
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                document = json.loads((file.metadata() or {})[METADATA_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return cls.read(document, tensors, str(path))
        except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
            msg = (
                f"{path} is not a range table: {type(error).__name__}: {error}. Calibrate again, and save the new one."
            )
            raise ModelError(msg) from error

    @classmethod
    def read(cls, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> RangeTable:
        """Return the table that `to_document` converted.

        Args:
            document: the JSON document.
            tensors: ``counts[values, bins]``, and factors ``[channels]`` of smoothed values.
            where: name of the file, for messages.

        Raises:
            ModelError: the data has another version, or is damaged.
        """
        try:
            if document["version"] != RANGE_TABLE_VERSION:
                msg = (
                    f"{where} has version {document['version']} of the range table format, but this clika-ref reads "
                    f"{RANGE_TABLE_VERSION}. Calibrate again, and save the new one."
                )
                raise ModelError(msg)
            names = document["smoothing"]
            smoothing = None if names is None else {name: tensors[f"{SMOOTHING_PREFIX}.{name}"] for name in names}
            found = zip(document["values"].items(), tensors["counts"], strict=True)
            values = {name: statistics_from_json(entry, of_value) for (name, entry), of_value in found}
            facts = str(document["smoothed for"]), str(document["model"]), str(document.get("first", ""))
            return cls(values, int(document["batches"]), smoothing, *facts)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            msg = (
                f"{where} is not a range table: {type(error).__name__}: {error}. Calibrate again, and save the new one."
            )
            raise ModelError(msg) from error


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """Return all but the counts; floats in their shortest exact form, without the min/max of an empty value."""
    bounds = {} if statistics.is_empty else {"low": statistics.low, "high": statistics.high}
    return {
        **bounds,
        "batches": statistics.batches,
        "lows": statistics.lows.partials,
        "highs": statistics.highs.partials,
        "exponent": statistics.histogram.exponent,
        "unbounded": statistics.is_unbounded,
    }


def statistics_from_json(entry: Mapping[str, Any], counts: torch.Tensor) -> Statistics:
    """Return the statistics that `statistics_to_json` converted, with their counts.

    Raises:
        ValueError: the counts have another dtype or shape.
    """
    if counts.dtype != torch.int64 or counts.shape != (2 * BINS_PER_SIGN,):
        msg = f"counts are {counts.dtype}{list(counts.shape)}, not torch.int64[{2 * BINS_PER_SIGN}]"
        raise ValueError(msg)
    found = Statistics(
        batches=int(entry["batches"]),
        lows=ExactSum([float(x) for x in entry["lows"]]),
        highs=ExactSum([float(x) for x in entry["highs"]]),
        histogram=Histogram(int(entry["exponent"]), counts, int(counts.sum())),
        is_unbounded=bool(entry["unbounded"]),
    )
    if not found.is_empty:
        found.low, found.high = float(entry["low"]), float(entry["high"])
    return found
