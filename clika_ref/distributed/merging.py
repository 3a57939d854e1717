"""Merge the calibrations of several processes into the one that a single process would compute, bit for bit.

The data is distributed round-robin: of ``n`` ranks, rank ``r`` has the elements ``r``, ``r + n``, ``r + 2 n`` and so on
of a single process. Counts, min/max and sums are exact, so their order does not matter. The kept first batches depend
on the order, so they are sorted by turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.distributed.ranks import Message, Ranks
from clika_ref.quantization.calibration.calibrator import Calibration, Reservoir, batch_bytes
from clika_ref.quantization.calibration.histogram import BINS_PER_SIGN, Histogram
from clika_ref.quantization.calibration.range_table import statistics_from_json, statistics_to_json
from clika_ref.quantization.calibration.statistics import Statistics

BatchTurn = tuple[int, int]
"""The index of a batch on its rank, and the rank."""


def merge_calibrations(calibration: Calibration, ranks: Ranks) -> list[int]:
    """Replace the calibration of each rank by that of all; return the number of batches of each rank.

    The transfer grows with the number of tensors, 32 KB each, and with the size of the reservoir, but not with the
    data. Counts are summed by all-reduce, so that no rank holds those of all others.

    Raises:
        ModelError: another rank failed, has ended, or does not answer.
    """
    table = calibration.table
    if not ranks.is_distributed:
        return [table.batches]
    messages = [document for document, _ in ranks.gather_messages((_summary(calibration), {}))]
    table.values = _merge_values(calibration, [document["values"] for document in messages], ranks)
    table.first = next((document["first"] for document in messages if document["first"]), "")
    counts = [int(document["batches"]) for document in messages]
    table.batches = sum(counts)
    sizes = [{tuple((name, size) for name, size in of): n for of, n in document["sizes"]} for document in messages]
    calibration.take(_merge_reservoir(calibration, messages, ranks), sum(map(Counter, sizes), Counter()))
    return counts


def _summary(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration without histogram counts and batches."""
    table, reservoir = calibration.table, calibration.reservoir
    return {
        "batches": table.batches,
        "first": table.first,
        "values": {name: statistics_to_json(statistics) for name, statistics in table.values.items()},
        "sizes": sorted(calibration.sizes.items()),
        "kept": [batch_bytes(inputs) for inputs in reservoir.batches],
    }


def _merge_values(
    calibration: Calibration, messages: Sequence[Mapping[str, Any]], ranks: Ranks
) -> dict[str, Statistics]:
    own, none = calibration.table.values, torch.zeros(2 * BINS_PER_SIGN, dtype=torch.int64)
    merged: dict[str, Statistics] = {}
    for of_rank in messages:
        for name, entry in of_rank.items():
            found = merged.setdefault(name, Statistics())
            found.merge(statistics_from_json(entry, none))
    counted: list[Histogram] = []
    for name, statistics in merged.items():
        histogram = Histogram(statistics.histogram.exponent)
        histogram.merge(own[name].histogram if name in own else Histogram())
        counted.append(histogram)
    sums = ranks.sum_counts(torch.stack([h.counts for h in counted]) if counted else torch.zeros(0, dtype=torch.int64))
    for statistics, histogram, counts in zip(merged.values(), counted, sums, strict=True):
        statistics.histogram = Histogram(histogram.exponent, counts.clone(), int(counts.sum()))
    return merged


def _merge_reservoir(calibration: Calibration, messages: Sequence[Mapping[str, Any]], ranks: Ranks) -> Reservoir:
    """Return the batches that one process would have kept; each rank sends its own share of them."""
    own = calibration.reservoir
    turns = interleave_turns([document["batches"] for document in messages])
    chosen = _select_turns(turns, [document["kept"] for document in messages], own.limit_bytes)
    mine = {position: own.batches[position] for position, rank in chosen if rank == ranks.rank}
    tensors = {f"{position}.{i}": x for position, inputs in mine.items() for i, x in enumerate(inputs)}
    heard = ranks.gather_messages(({}, tensors))
    merged, devices = Reservoir(own.limit_bytes), calibration.devices
    for turn in chosen:
        merged.offer(_read_batch(turn, heard, devices))
    merged.is_full = len(chosen) < len(turns)
    return merged


def gather_batches(ranks: Ranks, batches: Sequence[Sequence[Tensor]], *, is_per_rank: bool) -> list[Sequence[Tensor]]:
    """Return the batches that a single process would have, on the devices of this rank; all ranks call it.

    Args:
        ranks: the processes.
        batches: the batches of this rank, each with the inputs of a graph.
        is_per_rank: whether each rank has different batches, to be taken in turns; otherwise those of rank 0 are used.
    """
    if not ranks.is_distributed:
        return [*batches]
    own = [*batches] if is_per_rank or ranks.is_first else []
    named = {f"{position}.{i}": x.clone() for position, inputs in enumerate(own) for i, x in enumerate(inputs)}
    heard = ranks.gather_messages(({"inputs": [len(inputs) for inputs in own]}, named))
    counts = [document["inputs"] for document, _ in heard]
    known = [x.device for x in batches[0]] if batches else None
    return [
        _read_batch((position, rank), heard, known or [torch.device("cpu")] * counts[rank][position])
        for position, rank in interleave_turns([len(of_rank) for of_rank in counts])
    ]


def interleave_turns(counts: Sequence[int]) -> list[BatchTurn]:
    """Return the turns of batches, given the number of batches of each rank.

    >>> interleave_turns([2, 3])
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    """
    return sorted((position, rank) for rank, count in enumerate(counts) for position in range(count))


def _select_turns(turns: Sequence[BatchTurn], sizes: Sequence[Sequence[int]], limit_bytes: int) -> list[BatchTurn]:
    """Return the turns of the batches within the limit; a batch beyond the limit of its rank is left out as well."""
    chosen_turns: list[BatchTurn] = []
    total_bytes = 0
    for position, rank in turns:
        size = sizes[rank][position] if position < len(sizes[rank]) else limit_bytes + 1
        if chosen_turns and total_bytes + size > limit_bytes:
            break
        chosen_turns.append((position, rank))
        total_bytes += size
    return chosen_turns


def _read_batch(turn: BatchTurn, heard: Sequence[Message], devices: Sequence[torch.device]) -> list[Tensor]:
    position, rank = turn
    tensors = heard[rank][1]
    return [tensors[f"{position}.{i}"].to(device) for i, device in enumerate(devices)]
