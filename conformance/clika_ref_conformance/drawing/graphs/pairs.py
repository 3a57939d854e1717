"""Graphs of two calls: a chain, a chain with its inner value returned, and both calls on one operand."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import torch

from clika_ref.core.ir import Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, random_draw
from clika_ref_conformance.cases import Case
from clika_ref_conformance.drawing.graphs.drawing import GraphDrawing, PlacedSample
from clika_ref_conformance.drawing.graphs.growth import case_of

CHAIN, TAPPED, FORKED = "{}->{}", "{}->{}, tapped", "{}, {}"
ATTEMPTS = 24
"""Maximum number of draws for a pair of matching calls; most match at the first, 1 in 20 never does."""
STARTS = 12
"""Number of first calls to try, with different ranks and attributes."""
DTYPES = (torch.float32,)


class Pairing:
    """One operator, paired with those that may follow it."""

    def __init__(self, first: Operator, seed: int) -> None:
        self.first = first
        self.seed = seed
        self.starts = list(self._drawn_starts())

    def _drawn_starts(self) -> Iterator[tuple[int, Call]]:
        for index in range(STARTS):
            seed = zlib.crc32(f"{self.first.name}-{self.seed}-{index}".encode())
            drawing = GraphDrawing(random_draw(Random(seed)), dtypes=DTYPES, seed=seed)  # noqa: S311 - no secret
            call = drawing.drawn(self.first)
            if drawing.take(self.first, call) is not None:
                yield seed, call

    def cases(self, second: Operator, *, fork: bool) -> Iterator[Case]:
        """Yield the tapped chain and the chain of two operators, and with ``fork`` both calls on one operand.

        A pair is left out if no result of the first operator fits an operand of the second.
        """
        names = self.first.name, second.name
        found = self._joined(second, forked=False)
        if found is not None:
            drawing, one, two = found
            case = _returning(drawing, two.outputs, CHAIN.format(*names), self.seed)
            graph = case.graph.clone()
            for value in next(graph.nodes).outputs:
                graph.add_output(value)
            yield replace(case, name=TAPPED.format(*names), graph=graph)
            yield case
        found = self._joined(second, forked=True) if fork else None
        if found is not None:
            drawing, one, two = found
            yield _returning(drawing, (*one.outputs, *two.outputs), FORKED.format(*names), self.seed)

    def _joined(self, second: Operator, *, forked: bool) -> tuple[GraphDrawing, Node, Node] | None:
        """Draw calls until the second reads a result of the first, or, if ``forked``, one of its operands."""
        random = Random(f"{self.first.name}-{second.name}-{forked}-{self.seed}")  # noqa: S311 - draws keep no secret
        for attempt in range(ATTEMPTS if self.starts else 0):
            seed, start = self.starts[attempt % len(self.starts)]
            drawing = GraphDrawing(random_draw(random), dtypes=DTYPES, seed=seed)
            one = drawing.take(self.first, start)
            if one is None:
                return None
            for source in [v for v in (one.inputs if forked else one.outputs) if isinstance(v, Value)]:
                call = drawing.drawn(second, source)
                if any(isinstance(o, PlacedSample) and o.value is source for o in call.operands):
                    two = drawing.take(second, call)
                    if two is not None:
                        return drawing, one, two
        return None


def _returning(drawing: GraphDrawing, outputs: Iterable[Value], name: str, seed: int) -> Case:
    for value in outputs:
        drawing.growth.graph.add_output(value)
    return case_of(drawing, name, Random(seed))  # noqa: S311 - draws keep no secret
