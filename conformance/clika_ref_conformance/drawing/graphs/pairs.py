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
from clika_ref_conformance.cases import GraphCase
from clika_ref_conformance.drawing.graphs.graph_generator import GraphGenerator, ValueSample
from clika_ref_conformance.drawing.graphs.random_graphs import make_case

CHAIN_NAME, TAPPED_CHAIN_NAME, FORK_NAME = "{}->{}", "{}->{}, tapped", "{}, {}"
MAX_PAIR_DRAWS = 24
"""Maximum number of draws for a pair of matching calls; most match at the first, 1 in 20 never does."""
FIRST_CALL_COUNT = 12
"""Number of first calls to try, with different ranks and attributes."""
PAIR_DTYPES = (torch.float32,)


class OperatorPairs:
    """One operator, paired with those that may follow it."""

    def __init__(self, first: Operator, seed: int) -> None:
        self.first = first
        self.seed = seed
        self.first_calls = list(self._draw_first_calls())

    def _draw_first_calls(self) -> Iterator[tuple[int, Call]]:
        for index in range(FIRST_CALL_COUNT):
            seed = zlib.crc32(f"{self.first.name}-{self.seed}-{index}".encode())
            drawing = GraphGenerator(random_draw(Random(seed)), dtypes=PAIR_DTYPES, seed=seed)  # noqa: S311 - no secret
            call = drawing.draw_call(self.first)
            if drawing.take(self.first, call) is not None:
                yield seed, call

    def make_cases(self, second: Operator, *, fork: bool) -> Iterator[GraphCase]:
        """Yield the tapped chain and the chain of two operators, and with ``fork`` both calls on one operand.

        A pair is left out if no result of the first operator fits an operand of the second.
        """
        names = self.first.name, second.name
        found = self._draw_pair(second, forked=False)
        if found is not None:
            drawing, one, two = found
            case = _make_case(drawing, two.outputs, CHAIN_NAME.format(*names), self.seed)
            graph = case.graph.clone()
            for value in next(graph.nodes).outputs:
                graph.add_output(value)
            yield replace(case, name=TAPPED_CHAIN_NAME.format(*names), graph=graph)
            yield case
        found = self._draw_pair(second, forked=True) if fork else None
        if found is not None:
            drawing, one, two = found
            yield _make_case(drawing, (*one.outputs, *two.outputs), FORK_NAME.format(*names), self.seed)

    def _draw_pair(self, second: Operator, *, forked: bool) -> tuple[GraphGenerator, Node, Node] | None:
        """Draw calls until the second reads a result of the first, or, if ``forked``, one of its operands."""
        random = Random(f"{self.first.name}-{second.name}-{forked}-{self.seed}")  # noqa: S311 - draws keep no secret
        for attempt in range(MAX_PAIR_DRAWS if self.first_calls else 0):
            seed, start = self.first_calls[attempt % len(self.first_calls)]
            drawing = GraphGenerator(random_draw(random), dtypes=PAIR_DTYPES, seed=seed)
            one = drawing.take(self.first, start)
            if one is None:
                return None
            for source in [v for v in (one.inputs if forked else one.outputs) if isinstance(v, Value)]:
                call = drawing.draw_call(second, source)
                if any(isinstance(o, ValueSample) and o.value is source for o in call.operands):
                    two = drawing.take(second, call)
                    if two is not None:
                        return drawing, one, two
        return None


def _make_case(drawing: GraphGenerator, outputs: Iterable[Value], name: str, seed: int) -> GraphCase:
    for value in outputs:
        drawing.builder.graph.add_output(value)
    return make_case(drawing, name, Random(seed))  # noqa: S311 - draws keep no secret
