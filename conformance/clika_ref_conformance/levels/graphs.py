"""L3: random whole graphs, unchanged, after the passes of an export, and in equivalent variants."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from clika_ref_conformance.cases import Check, Task
from clika_ref_conformance.drawing.generation import collect
from clika_ref_conformance.drawing.graphs.growth import graph_cases, growable
from clika_ref_conformance.drawing.graphs.variants import VARIANTS, variant_of
from clika_ref_conformance.execution.batches import Batch
from clika_ref_conformance.suite import Suite

LEVEL = "graphs"

BATCH = 25
"""Graphs per task: enough for Hypothesis to vary them, few enough that two workers end together."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each 25 graphs."""
    return [Task(LEVEL, f"{LEVEL}-{i // BATCH:03}") for i in range(0, suite.profile.graphs, BATCH)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a batch: each graph with the passes, every second unchanged, every fourth in a variant."""
    index = int(task.subject.rpartition("-")[2])
    count = min(BATCH, suite.profile.graphs - index * BATCH)
    operators = growable(suite.registry.operators)
    seed = zlib.crc32(f"{task}/{suite.profile.seed}".encode()) % 2**24
    batch = Batch(suite)
    kinds = list(VARIANTS)
    found: list[Check] = []
    for i, drawn in enumerate(collect(graph_cases(operators, suite.target.refusal), count, seed)):
        case = replace(drawn, name=f"graph-{i:02}")
        found.append(batch.check(replace(case, name=f"{case.name}, passes", passes=True)))
        if i % 2 == 0:
            found.append(batch.check(case))
        if i % 4 == 1:
            random = Random(seed + i)  # noqa: S311 - test data, not cryptography
            variants = (
                variant_of(case, kinds[(i // 4 + k) % len(kinds)], suite.registry.operators, random) for k in range(3)
            )
            found += [batch.check(variant) for variant in variants if variant is not None][:1]
    return found
