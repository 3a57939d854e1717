"""``RangeTable``: the statistics of every value from one pass over the calibration data, whatever the target is."""

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
from clika_ref.quantization.histogram import BINS, Histogram
from clika_ref.quantization.statistics import ExactSum, Measured, Statistics
from clika_ref.storage import write_atomically

VERSION = 3
"""Of the form on disk; raised whenever files written before can no longer be read."""

DOCUMENT = "clika_ranges"
"""The entry of the metadata that holds everything but the counts."""


SMOOTHING = "smoothing"
"""What the other tensors are, of each value by its name: ``smoothing.<value>``."""


@dataclass
class RangeTable:
    """Statistics by the name of the value, and how many batches they are of.

    Tables of parts of the data, made in several processes, can be merged: the result is that of one process.
    """

    values: dict[str, Statistics] = field(default_factory=dict[str, Statistics])
    """The statistics of each value, by its name."""
    batches: int = 0
    """How many were counted."""
    smoothing: dict[str, torch.Tensor] | None = None
    """What some values are divided by before they are quantized (`clika_ref.quantization.smoothing`), by their names.

    The statistics are of the quotients, too. None where it was not looked for yet.
    """
    smoothed_for: str = ""
    """What that was looked for, in words; the quotients serve nothing else."""
    model: str = ""
    """Whose values they are (`clika_ref.quantization.fingerprint`); nothing where that is not known."""
    first: str = ""
    """The fingerprint of the first batch, by which the data is known again; nothing where that is not known."""

    def add(self, batch: Mapping[str, Measured]) -> None:
        """Take in what the values held in one more batch, which counts once all are in."""
        for name, found in batch.items():
            self._of(name).add(found)
        self.batches += 1

    def merge(self, other: RangeTable) -> None:
        """Take in a table of other data."""
        self.first = self.first if self.batches else other.first
        self.batches += other.batches
        for name, statistics in other.values.items():
            self._of(name).merge(statistics)

    def _of(self, name: str) -> Statistics:
        return self.values.setdefault(name, Statistics())

    def save(self, path: Path | str) -> None:
        """Write it as safetensors: the counts as one tensor, all else as JSON in the metadata.

        Raises:
            ModelError: no file can be written there.
        """
        document, tensors = self.saved()
        blob = safetensors.torch.save(tensors, {DOCUMENT: json.dumps(document, separators=(",", ":"))})
        with write_atomically(path) as file:
            file.write(blob)

    def saved(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return what `read` takes: a document, and tensors: ``counts[values, bins]``, and factors ``[channels]``."""
        document = {
            "version": VERSION,
            "model": self.model,
            "batches": self.batches,
            "first": self.first,
            "smoothing": None if self.smoothing is None else [*self.smoothing],
            "smoothed for": self.smoothed_for,
            "values": {name: statistics_to_json(statistics) for name, statistics in self.values.items()},
        }
        counts = [statistics.histogram.counts for statistics in self.values.values()]
        tensors = {"counts": torch.stack(counts) if counts else torch.zeros(0, 2 * BINS, dtype=torch.int64)}
        tensors |= {f"{SMOOTHING}.{name}": factor.cpu() for name, factor in (self.smoothing or {}).items()}
        return document, tensors

    @classmethod
    def load(cls, path: Path | str) -> RangeTable:
        """Read what `save` wrote; nothing of it is executed.

        Raises:
            ModelError: the file cannot be read, or holds something else.
        """
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                document = json.loads((file.metadata() or {})[DOCUMENT])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return cls.read(document, tensors, str(path))
        except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
            msg = f"{path} is no range table: {type(error).__name__}: {error}; calibrate again and save that"
            raise ModelError(msg) from error

    @classmethod
    def read(cls, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> RangeTable:
        """Return what `saved` was asked of.

        Args:
            document: as it was returned.
            tensors: likewise: ``counts[values, bins]``, and factors ``[channels]`` of what is smoothed.
            where: from which file they are, for messages.

        Raises:
            ModelError: it is of another version, or damaged.
        """
        try:
            if document["version"] != VERSION:
                msg = f"{where} has version {document['version']} of the form of range tables, this is {VERSION}"
                raise ModelError(msg)
            names = document["smoothing"]
            smoothing = None if names is None else {name: tensors[f"{SMOOTHING}.{name}"] for name in names}
            found = zip(document["values"].items(), tensors["counts"], strict=True)
            values = {name: statistics_from_json(entry, of_value) for (name, entry), of_value in found}
            told = str(document["smoothed for"]), str(document["model"]), str(document.get("first", ""))
            return cls(values, int(document["batches"]), smoothing, *told)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            msg = f"{where} is no range table: {type(error).__name__}: {error}; calibrate again and save that"
            raise ModelError(msg) from error


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """Return all but the counts; floats in their shortest exact form, those of an empty value left out."""
    ends = {} if statistics.is_empty else {"low": statistics.low, "high": statistics.high}
    return {
        **ends,
        "batches": statistics.batches,
        "lows": statistics.lows.partials,
        "highs": statistics.highs.partials,
        "exponent": statistics.histogram.exponent,
        "unbounded": statistics.is_unbounded,
    }


def statistics_from_json(entry: Mapping[str, Any], counts: torch.Tensor) -> Statistics:
    """Return what `statistics_to_json` was given, with its counts.

    Raises:
        ValueError: the counts are none.
    """
    if counts.dtype != torch.int64 or counts.shape != (2 * BINS,):
        msg = f"counts are {counts.dtype}{list(counts.shape)}, not torch.int64[{2 * BINS}]"
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
