"""``RangeTable``: the statistics of every value from one pass over the calibration data, independent of the target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Value
from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN, Histogram
from clika_ref.quantization.calibration.statistics import BatchStatistics, ExactSum, Statistics
from clika_ref.serialization.atomic_files import write_atomically
from clika_ref.serialization.container import check_format
from clika_ref.serialization.vocabulary import RangesKey, StatisticsKey

RANGE_TABLE_VERSION = 5
"""Version of the file format. Versions 1 to 4 were those of development versions, and are rejected."""


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

    def add(self, batch: Mapping[str, Sequence[BatchStatistics]]) -> None:
        """Add the statistics of one more batch, once for each time that it computed a value.

        The batch counts once all its values are added.
        """
        for name, runs in batch.items():
            for found in runs:
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

    def has_range(self, value: Value) -> bool:
        """Return whether bounded elements of a value were seen, and no others; masks have none."""
        statistics = self.values.get(value.name)
        return statistics is not None and not statistics.is_empty and not statistics.is_unbounded

    def find_constant(self, value: Value) -> float | None:
        """Return the one number that all elements of a value were, in all batches; None if they differed."""
        found = self.values.get(value.name)
        return found.low if found is not None and found.low == found.high else None

    def is_negative(self, value: Value) -> bool:
        """Return whether a value had, or may have, a negative element."""
        return value.name not in self.values or self.values[value.name].low < 0

    def save(self, path: Path | str) -> None:
        """Write the table as safetensors: the counts as one tensor, the rest as JSON in the metadata.

        Raises:
            ModelError: the file cannot be written.
        """
        document, tensors = self.to_document()
        blob = safetensors.torch.save(tensors, {RangesKey.FILE: json.dumps(document, separators=(",", ":"))})
        with write_atomically(path) as file:
            file.write(blob)

    def to_document(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return a JSON document and tensors for `read`: ``counts[values, bins]``, and factors ``[channels]``."""
        document: dict[str, Any] = {
            RangesKey.VERSION: RANGE_TABLE_VERSION,
            RangesKey.MODEL: self.model,
            RangesKey.BATCHES: self.batches,
            RangesKey.FIRST: self.first,
            RangesKey.SMOOTHING: None if self.smoothing is None else [*self.smoothing],
            RangesKey.SMOOTHING_PURPOSE: self.smoothing_purpose,
            RangesKey.ACTIVATIONS: {name: statistics_to_json(statistics) for name, statistics in self.values.items()},
        }
        counts = [statistics.histogram.counts for statistics in self.values.values()]
        tensors: dict[str, torch.Tensor] = {
            RangesKey.COUNTS: torch.stack(counts) if counts else torch.zeros(0, 2 * BINS_PER_SIGN, dtype=torch.int64)
        }
        tensors |= {f"{RangesKey.SMOOTHING}.{name}": factor.cpu() for name, factor in (self.smoothing or {}).items()}
        return document, tensors

    @classmethod
    def load(cls, path: Path | str) -> RangeTable:
        """Read a file that `save` wrote; executes nothing from it.

        Raises:
            ModelError: the file cannot be read, or is no range table.
        """
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                document = json.loads((file.metadata() or {})[RangesKey.FILE])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
            raise _damage_error(str(path), error) from error
        return cls.read(document, tensors, str(path))

    @classmethod
    def read(cls, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str) -> RangeTable:
        """Return the table that `to_document` converted.

        Args:
            document: the JSON document.
            tensors: ``counts[values, bins]``, and SmoothQuant factors ``[channels]``.
            where: name of the file, for messages.

        Raises:
            ModelError: the data has another version, or is damaged.
        """
        try:
            check_format(f"cannot load {where}: it", document[RangesKey.VERSION], RANGE_TABLE_VERSION)
            names = document[RangesKey.SMOOTHING]
            smoothing = None if names is None else {name: tensors[f"{RangesKey.SMOOTHING}.{name}"] for name in names}
            found = zip(document[RangesKey.ACTIVATIONS].items(), tensors[RangesKey.COUNTS], strict=True)
            values = {name: statistics_from_json(entry, of_value) for (name, entry), of_value in found}
            facts = (str(document[key]) for key in (RangesKey.SMOOTHING_PURPOSE, RangesKey.MODEL, RangesKey.FIRST))
            return cls(values, int(document[RangesKey.BATCHES]), smoothing, *facts)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise _damage_error(where, error) from error


def _damage_error(where: str, error: Exception) -> ModelError:
    return ModelError(
        f"{where} is not a range table: {type(error).__name__}: {error}. Calibrate again, and save the new one."
    )


def statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    """Return all but the counts; floats in their shortest exact form, without the min/max of an empty value."""
    ends = {} if statistics.is_empty else {StatisticsKey.LOW: statistics.low, StatisticsKey.HIGH: statistics.high}
    return {
        **ends,
        StatisticsKey.BATCHES: statistics.batches,
        StatisticsKey.LOWS: statistics.lows.partials,
        StatisticsKey.HIGHS: statistics.highs.partials,
        StatisticsKey.EXPONENT: statistics.histogram.exponent,
        StatisticsKey.UNBOUNDED: statistics.is_unbounded,
    }


def statistics_from_json(entry: Mapping[str, Any], counts: torch.Tensor) -> Statistics:
    """Return the statistics that `statistics_to_json` converted, with their counts.

    Raises:
        ValueError: the counts have another dtype or shape.
    """
    if counts.dtype != torch.int64 or counts.shape != (2 * BINS_PER_SIGN,):
        raise ValueError(f"counts are {counts.dtype}{list(counts.shape)}, not torch.int64[{2 * BINS_PER_SIGN}]")
    found = Statistics(
        batches=int(entry[StatisticsKey.BATCHES]),
        lows=ExactSum([float(x) for x in entry[StatisticsKey.LOWS]]),
        highs=ExactSum([float(x) for x in entry[StatisticsKey.HIGHS]]),
        histogram=Histogram(int(entry[StatisticsKey.EXPONENT]), counts, int(counts.sum())),
        is_unbounded=bool(entry[StatisticsKey.UNBOUNDED]),
    )
    if not found.is_empty:
        found.low, found.high = float(entry[StatisticsKey.LOW]), float(entry[StatisticsKey.HIGH])
    return found
