"""Growth: whole graphs from the samples of operators, in which descriptions are answered by values that exist."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import infer
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.samples import (
    Call,
    Choice,
    Descriptions,
    Draw,
    Integers,
    TensorDescription,
    TensorSample,
    random_draw,
    realize,
)
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.drawing.eager_values import (
    eager_values,
    has_undefined,
    is_undefined,
    reads_signs_of_zeros,
    type_of,
)
from clika_ref_conformance.drawing.graphs.steering import Again, Steered, changes_for, plain

MOST_ELEMENTS = 4096
"""Of any tensor: larger ones cost time and find nothing more."""
SHORTEST, LONGEST = 6, 30
"""Nodes of a graph."""
PATIENCE = 3
"""Calls of one operator that may fail in a graph, such as those whose sizes depend on the data."""
LARGEST = 1e6
"""Values beyond are not built upon: products of them overflow, and everything behind is infinite."""
DTYPES = (torch.float32, torch.int64, torch.bool)
"""Of new tensors, where a description leaves the choice."""
USUAL_RANGE = (-3.0, 3.0)
"""Elements of a description that does not say which; integers that say so are indices or sizes."""
STRUCTURAL = frozenset({"as_strided", "as_strided_scatter", "searchsorted"})
"""Left out: they read the memory of a tensor, or demand what no description says (sorted elements)."""


def growable(operators: Mapping[str, Operator]) -> list[Operator]:
    """Return the operators that graphs are grown from: with samples, not always random."""
    return [o for o in operators.values() if o.sampler and o.random is not True and o.name not in STRUCTURAL]


def accept_all(_: Node) -> None:
    """Refuse nothing: what `Growth` asks where no target is meant."""
    return


@dataclass(frozen=True, slots=True)
class PlacedSample(TensorSample):
    """A tensor that a sampler was given: a value of the graph, or one to be made if the call is taken."""

    value: Value | None = None
    constant: bool = False


@dataclass
class Growth:
    """A graph that grows by one call at a time, and what eager computes in it.

    Args:
        draw: decides all that is to be decided; the descriptions of tensors too, where a new one is needed.
        refusal: says why the target cannot run a node, or returns None; such nodes are not taken.

    """

    draw: Draw
    refusal: Callable[[Node], str | None] = accept_all
    dtypes: Sequence[torch.dtype] = DTYPES
    graph: Graph = field(default_factory=lambda: Graph("grown"))
    values: dict[Value, torch.Tensor] = field(default_factory=dict[Value, torch.Tensor])
    samples: list[TensorSample] = field(default_factory=list[TensorSample])
    """Of each input of the graph, in order."""
    seed: int = 0
    tried: int = 0
    rejected: list[str] = field(default_factory=list[str])
    """Why calls were not taken."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """How often a call of each operator was not taken."""
    _wanted: Value | None = None
    _was_steered: bool = False

    def add(self, op: Operator, first: Value | None = None) -> Node | None:
        """Draw one call and append it, or return None where it is none.

        Args:
            op: the operator.
            first: the value that should answer the first description that it fits.

        """
        return self.take(op, self.drawn(op, first))

    def drawn(self, op: Operator, first: Value | None = None) -> Call:
        """Draw one call, without taking it; its tensors are `PlacedSample`s."""
        assert op.sampler is not None
        self._wanted, self._was_steered = first, first is None
        steered = Steered(self.draw, self._answer)
        while True:
            try:
                call = op.sampler(steered, Descriptions())
            except Again as again:
                steered.repeat(again.changes)
            else:
                operands = tuple(map(plain, call.operands))
                return op.call(*operands, **{k: plain(v) for k, v in call.attrs.items()})

    def take(self, op: Operator, call: Call) -> Node | None:
        """Append a drawn call, or return None where eager or the target refuses it."""
        self.tried += 1
        if any(isinstance(o, TensorSample) and math.prod(o.shape) > MOST_ELEMENTS for o in call.operands):
            return self._reject(op, "too large")
        tensors = {id(o): self._tensor(o) for o in call.operands if isinstance(o, TensorSample | torch.Tensor)}
        operands = [tensors.get(id(o), o) for o in call.operands]
        problem, results = self._evaluate(op, operands, call.attrs)
        return self._append(op, call, tensors, results) if problem is None else self._reject(op, problem)

    def _reject(self, op: Operator, problem: str) -> None:
        self.rejected.append(f"{op.name}: {problem}")
        self.refused[op.name] += 1

    def _answer(self, description: Any, /) -> Any:
        if not isinstance(description, TensorDescription):
            return self.draw(description)
        value = self._existing(description)
        if value is not None:
            t = self.values[value]
            return PlacedSample(t.dtype, tuple(t.shape), description.low, description.high, value=value)
        known = tuple(d for d in description.dtypes if d in self.dtypes) or description.dtypes[:1]
        new: TensorSample = self.draw(replace(description, dtypes=known))
        constant = bool(self.samples) and self.draw(Choice((False, True)))
        return PlacedSample(new.dtype, plain(new.shape), new.low, new.high, new.domain, new.unique, constant=constant)

    def _steer(self, d: TensorDescription) -> None:
        """Ask for the call anew where the value that is wanted would fit if other lengths had been drawn.

        It is tried once for a call; what eager then refuses is rejected like any other call.
        """
        value = self._wanted
        if value is None or self._was_steered or d.shape is None or value.type.rank != len(d.shape):
            return
        there = tuple(self.values[value].shape)
        changes = changes_for(d.shape, there) if fits(replace(d, shape=there), self.values[value]) else None
        if changes is not None and 0 not in there:
            self._was_steered = True
            raise Again(changes)

    def _existing(self, d: TensorDescription) -> Value | None:
        if self._wanted is not None and fits(d, self.values[self._wanted]):
            value, self._wanted = self._wanted, None
            return value
        self._steer(d)
        found = [v for v, t in self.values.items() if fits(d, t) and _is_tame(t)]
        usual = (d.low, d.high) == USUAL_RANGE
        if not found or self.draw(Integers(0, 9)) >= (7 if usual else 2):
            return None
        back = min(self.draw(Integers(0, 7)), self.draw(Integers(0, 7)), len(found) - 1)  # rather what is new
        return found[-1 - back]

    def _tensor(self, sample: TensorSample | torch.Tensor) -> torch.Tensor:
        if isinstance(sample, torch.Tensor):
            return sample
        if isinstance(sample, PlacedSample) and sample.value is not None:
            return self.values[sample.value]
        self.seed += 1
        return realize(sample, torch.Generator().manual_seed(self.seed))

    def _evaluate(self, op: Operator, operands: list[Any], attrs: dict[str, Any]) -> tuple[str | None, Any]:
        try:
            with torch.no_grad():
                results = op(*operands, **attrs)
        except Exception as error:  # noqa: BLE001 - whatever eager raises, it refuses the call
            return str(error).splitlines()[0], None
        results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        if any(r.numel() > MOST_ELEMENTS for r in results):
            return "too large", None
        return ("undefined" if is_undefined(operands, attrs, results) else None), results

    def _append(self, op: Operator, call: Call, tensors: dict[int, torch.Tensor], results: Any) -> Node | None:
        types = [type_of(tensors[id(o)]) if id(o) in tensors else o for o in call.operands]
        try:
            inferred = infer(op, types, call.attrs)
        except ClikaError as error:
            return self._reject(op, str(error))
        problem = self._refusal(Node(op, types, call.attrs), inferred)
        if problem is not None:
            return self._reject(op, problem)
        placed = {i: self._place(o, tensors[i]) for o in call.operands if (i := id(o)) in tensors}
        node = self.graph.insert(Node(op, [placed.get(id(o), o) for o in call.operands], call.attrs), inferred)
        self.values.update(zip(node.outputs, results, strict=True))
        return node

    def _refusal(self, node: Node, results: Sequence[TensorType]) -> str | None:
        """Ask the target about a node on inputs of its own, so that a refusal leaves no trace in the graph."""
        if node.is_random:
            return "random"
        trial = Graph()
        inputs = [trial.add_input(t, "x") if isinstance(t, TensorType) else t for t in node.inputs]
        return self.refusal(trial.insert(Node(node.op, inputs, node.attrs), results))

    def _place(self, sample: TensorSample | torch.Tensor, tensor: torch.Tensor) -> Value:
        placed = sample if isinstance(sample, PlacedSample) else None
        if placed is not None and placed.value is not None:
            return placed.value
        if isinstance(sample, torch.Tensor) or (placed is not None and placed.constant):
            value = self.graph.add_constant(tensor, "w")
        else:
            value = self.graph.add_input(type_of(tensor), f"x{len(self.graph.inputs)}")
            self.samples.append(sample)
        self.values[value] = tensor
        return value


def fits(d: TensorDescription, tensor: torch.Tensor) -> bool:
    """Whether a tensor that exists may stand where a description asks for one.

    Floats outside the domain are legal and give NaN; indices must lie in theirs, and elements without ties are made.
    """
    if tensor.dtype not in d.dtypes or d.unique or tensor.numel() > MOST_ELEMENTS:
        return False
    is_index = not tensor.is_floating_point() and tensor.dtype != torch.bool
    if is_index and (d.domain is not None or (d.low, d.high) != USUAL_RANGE):
        return False
    if d.shape is not None:
        return tuple(tensor.shape) == d.shape
    low, high = d.side
    return d.rank[0] <= tensor.ndim <= d.rank[1] and all(low <= n <= max(high, 8) for n in tensor.shape)


def _is_tame(tensor: torch.Tensor) -> bool:
    """Whether what is computed from a tensor still says something: most of it finite, none of it huge."""
    if not tensor.is_floating_point():
        return True
    finite = tensor.isfinite()
    return 2 * int(finite.sum()) >= tensor.numel() and not bool((tensor[finite].abs() > LARGEST).any())


def grow(operators: Sequence[Operator], growth: Growth) -> Growth:
    """Grow a graph of 6 to 30 nodes from a swarm of 3 to 6 of the operators, and give it outputs.

    With probability 0.3 an earlier operator meets its operand again, with other attributes: two clamps of one tensor,
    two casts. Whether to go on is drawn before the content of a node, so that a node can be deleted as one span.
    """
    draw = growth.draw
    swarm = [operators[draw(Integers(0, len(operators) - 1))] for _ in range(draw(Integers(3, 6)))]
    motifs: list[tuple[Operator, Value]] = []
    attempts = 0
    while attempts < 2 * LONGEST and len(growth.graph) < LONGEST:
        attempts += 1
        if len(growth.graph) >= SHORTEST and draw(Integers(0, 19)) == 0:
            break
        op, first = swarm[draw(Integers(0, len(swarm) - 1))], None
        if motifs and draw(Integers(0, 9)) >= 7:
            op, first = motifs[draw(Integers(0, len(motifs) - 1))]
        if growth.refused[op.name] >= PATIENCE:
            swarm = [o for o in swarm if o is not op] or [operators[draw(Integers(0, len(operators) - 1))]]
            continue
        node = growth.add(op, first)
        operands = [v for v in node.inputs if isinstance(v, Value)] if node is not None else []
        if operands:
            motifs.append((op, operands[0]))
    add_outputs(growth)
    return growth


def add_outputs(growth: Growth) -> None:
    """Return what nobody reads; at times also an inner value, an input, a constant, or one value twice."""
    graph, draw = growth.graph, growth.draw
    results = [v for n in graph.nodes for v in n.outputs]
    sinks = [v for v in results if not v.uses and (v.index == 0 or draw(Choice((True, False))))]
    for value in sinks:
        if len(sinks) == 1 or draw(Integers(0, 7)) < 7:  # the others are dead code
            graph.add_output(value)
    for group in (results, graph.inputs, list(graph.constants.values()), list(graph.outputs)):
        if group and draw(Integers(0, 6)) == 6:
            graph.add_output(group[draw(Integers(0, len(group) - 1))])
    if draw(Integers(0, 6)) == 6 or not graph.inputs:
        unused = TensorSample(torch.float32, (2, 3), *USUAL_RANGE)
        value = graph.add_input(type_of(torch.empty(2, 3)), "unused")
        growth.samples.append(unused)
        growth.values[value] = realize(unused, torch.Generator().manual_seed(growth.seed))
    if not graph.outputs and results:
        graph.add_output(results[-1])


def graph_cases(
    operators: Sequence[Operator], refusal: Callable[[Node], str | None] = accept_all
) -> st.SearchStrategy[Case]:
    """Return the strategy of whole graphs with their inputs, each drawn from a seed of its own.

    Graphs whose every decision Hypothesis draws are mostly mutations of one another: 200 of them had 51 different sets
    of operators, where seeds give 200. What Hypothesis would gain by that is shrinking, which the reducer does better.
    """

    def grown(seed: int) -> Case:
        random = Random(seed)  # noqa: S311 - draws keep no secret
        growth = grow(operators, Growth(random_draw(random), refusal, seed=seed % 2**32))
        return case_of(growth, f"grown-{seed}", random)

    return st.integers(0, 2**62).map(grown)


SPECIALS = (math.nan, math.inf, -math.inf, -0.0)


def case_of(growth: Growth, name: str, random: Random) -> Case:
    """Return the case of a grown graph: the inputs that it grew on, other ones, and some with a special element."""
    graph = growth.graph
    typical = Run("typical", tuple(growth.values[v] for v in graph.inputs))
    runs = [typical]
    for kind in ("drawn", "special"):
        inputs = [realize(s, torch.Generator().manual_seed(random.getrandbits(31))) for s in growth.samples]
        if kind == "special":
            _place_special(inputs, random)
        runs.append(Run(kind, tuple(inputs)))
    runs = [run for run in runs if _is_legal(graph, run.inputs)] or [typical]
    used = sorted({n.kind for n in graph.nodes})
    return Case(name, graph, runs, {"operators": used, "nodes": len(graph)})


def _place_special(inputs: list[torch.Tensor], random: Random) -> None:
    """Put one NaN, infinity or negative zero into the first or last lane of one floating input."""
    floats = [t for t in inputs if t.is_floating_point() and t.numel()]
    if floats:
        flat = random.choice(floats).reshape(-1)
        flat[random.choice((0, -1))] = random.choice(SPECIALS)


def _is_legal(graph: Graph, inputs: Sequence[torch.Tensor]) -> bool:
    try:
        values = eager_values(graph, inputs)
        return not has_undefined(graph, values) and not reads_signs_of_zeros(graph, values)
    except ClikaError:
        return False
