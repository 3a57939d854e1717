"""L3: random whole graphs, unchanged, after the passes of an export, and in equivalent variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from clika_ref_conformance.cases import Check, Task
from clika_ref_conformance.drawing.graphs.random_graphs import compute_graph_seed, draw_graph_cases
from clika_ref_conformance.drawing.graphs.variants import VARIANTS, make_variant
from clika_ref_conformance.execution.case_reduction import CaseBatch
from clika_ref_conformance.suite import Suite

LEVEL = "graphs"

GRAPHS_PER_TASK = 25
"""Graphs per task: enough for Hypothesis to vary them, few enough that two workers end together."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each 25 graphs."""
    return [Task(LEVEL, f"{LEVEL}-{i // GRAPHS_PER_TASK:03}") for i in range(0, suite.profile.graphs, GRAPHS_PER_TASK)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a batch: each graph with the passes, every second unchanged, every fourth in a variant."""
    index = int(task.subject.rpartition("-")[2])
    count = min(GRAPHS_PER_TASK, suite.profile.graphs - index * GRAPHS_PER_TASK)
    seed = compute_graph_seed(str(task), suite)
    batch = CaseBatch(suite)
    kinds = list(VARIANTS)
    found: list[Check] = []
    for i, drawn in enumerate(draw_graph_cases(suite, count, seed)):
        case = replace(drawn, name=f"graph-{i:02}")
        found.append(batch.check(replace(case, name=f"{case.name}, passes", passes=True)))
        if i % 2 == 0:
            found.append(batch.check(case))
        if i % 4 == 1:
            random = Random(seed + i)  # noqa: S311 - test data, not cryptography
            variants = (
                make_variant(case, kinds[(i // 4 + k) % len(kinds)], suite.registry.operators, random) for k in range(3)
            )
            found += [batch.check(variant) for variant in variants if variant is not None][:1]
    return found
