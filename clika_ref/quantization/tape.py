"""A run of a graph in float that remembers how its outputs follow from what layers returned: slopes at many places."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization.calibration import sample_count
from clika_ref.quantization.energy import energy
from clika_ref.quantization.products import ProductCounter
from clika_ref.quantization.running import run

UNKNOWN = 1e6
"""The sensitivity of what no slope leads to the outputs from."""

DRAWS = 16
"""Samples times random directions of the output in which their errors are measured; each direction costs one pass back.

On resnet18 16 draws rank layers as exact runs of one layer after another do, on other images, with Spearman 0.95, and
64 draws no better.
"""


@dataclass(frozen=True)
class Tape:
    """A run of a graph in float, from whose outputs slopes can be had of what layers returned."""

    outputs: Sequence[Tensor]
    """Those that depend on layers."""
    returned: Sequence[Tensor]
    """All outputs but integers."""
    held: Mapping[Value, Tensor]
    """What layers read and returned."""
    places: Mapping[Node | Value, Value]
    """Where the results of layers stand, and values."""
    inputs: Sequence[Tensor]
    products: Mapping[Node, int]
    """How many each layer adds up."""

    def weigh(self, errors: Mapping[Any, Tensor], *, probes: int | None = None) -> dict[Any, float]:
        """Return what errors at places do to the outputs, each alone, as shares of their energy: `sensitivities`.

        Of several outputs, the mean of what becomes of each. `UNKNOWN` where no slope says what becomes of an error, as
        behind an argmax or a comparison, or one that is infinite.
        """
        probes = probes or -(-DRAWS // sample_count(self.inputs))
        if not self.outputs:
            return {place: UNKNOWN * bool(error.any()) for place, error in errors.items()}
        found = dict.fromkeys(errors, 0.0)
        reached: set[Any] = set()

        def add(place: Any, slope: Tensor) -> None:
            reached.add(place)
            found[place] += self._square(slope, errors[place]) / probes

        for _ in self._backward([*errors], probes, add):
            pass
        behind_none = errors.keys() - reached if any(_weights_of(self.outputs)) else ()
        return found | {place: UNKNOWN * bool(errors[place].any()) for place in behind_none}

    def _square(self, slope: Tensor, error: Tensor) -> float:
        """Return the squares of what an error becomes along a slope, samples apart where there are some."""
        moved = slope.mul(error)
        square = self._sum_squared(moved)
        if not math.isfinite(square):  # nothing becomes of nothing, however steep it is
            square = self._sum_squared(moved.masked_fill_(error == 0, 0.0))
        return square if math.isfinite(square) else UNKNOWN

    def _sum_squared(self, moved: Tensor) -> float:
        sums = moved.flatten(1).sum(1) if _has_samples(moved, self.inputs) else moved.sum()
        return float(sums.double().square().sum())

    def slopes(self, places: Sequence[Any], probes: int) -> Iterator[Mapping[Any, Tensor]]:
        """Yield by places the slopes of a sum of all outputs, in so many random directions of these.

        Without those from which no way leads to the outputs; nothing at all where these are zeros.
        """
        found: dict[Any, Tensor] = {}
        for _ in self._backward(places, probes, found.__setitem__):
            yield found
            found.clear()

    def _backward(self, places: Sequence[Any], probes: int, visit: Callable[[Any, Tensor], None]) -> Iterator[None]:
        """Go backward in so many random directions, and visit each place as its slope is there, which is then let go.

        Slopes of all places at once would take as much memory as their values do.
        """
        weights, at = _weights_of(self.outputs), defaultdict[Value, list[Any]](list)
        for place in places:
            at[self.places[place]].append(place)

        def pass_on(value: Value, slope: Tensor | None) -> None:
            if slope is not None:
                for place in at.get(value, ()):
                    visit(place, slope)

        first = {v: x for v, x in self.held.items() if x.requires_grad and x.is_leaf}
        hooks = [self.held[v].register_hook(partial(pass_on, v)) for v in at if v not in first]
        try:
            for number in range(probes if any(weights) and places else 0):
                directions = self._directions(weights, number)
                ends = torch.autograd.grad(
                    self.outputs, [*first.values()], directions, retain_graph=True, allow_unused=True
                )
                for value, slope in zip(first, ends, strict=True):
                    pass_on(value, slope)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _directions(self, weights: Sequence[float], seed: int) -> list[Tensor]:
        """Return a random direction of each output."""
        spread = torch.Generator(self.outputs[0].device).manual_seed(seed)
        return [
            torch.randn(o.shape, generator=spread, dtype=o.dtype, device=o.device) * weight
            for o, weight in zip(self.outputs, weights, strict=True)
        ]


def _weights_of(outputs: Sequence[Tensor]) -> list[float]:
    """Return what to multiply outputs by so that the squares of errors become means of shares of their energies."""
    energies = [energy(o) for o in outputs]
    count = sum(map(bool, energies))
    return [1 / math.sqrt(whole * count) if whole else 0.0 for whole in energies]


def _has_samples(error: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether the first side is that of the batch, as far as shapes tell."""
    return error.ndim > 1 and all(x.ndim and x.shape[0] == error.shape[0] for x in inputs)


def taped(graph: Graph, places: Mapping[Any, Value], inputs: Sequence[Tensor]) -> Tape:
    """Run a graph so that slopes reach places: what layers, by which they are called, return, and values."""
    leaves = set(places.values())
    layers = [place for place in places if isinstance(place, Node)]
    wanted = {
        v for node in layers for v in (*node.inputs, node.output) if isinstance(v, Value) and not v.is_constant
    } | leaves
    given = [_with_slopes(x) if v in leaves else x for v, x in zip(graph.inputs, inputs, strict=True)]
    held = {v: x for v, x in zip(graph.inputs, given, strict=True) if v in wanted}

    counter = ProductCounter(graph, inputs)
    sloped = {v for v, x in zip(graph.inputs, given, strict=True) if x.requires_grad}

    def watch(node: Node, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        counter(node, results)
        if sloped.isdisjoint(v for v in node.inputs if isinstance(v, Value)):
            results = tuple(r.detach() for r in results)  # parameters may want gradients, and get none here
        for value, result in zip(node.outputs, results, strict=True):
            if value in leaves and not result.requires_grad:
                result.requires_grad_()
            if result.requires_grad:
                sloped.add(value)
            if value in wanted:
                held[value] = result
        return results

    with torch.enable_grad():
        outputs = run(graph, given, watch)
    returned = [o.detach() for o in outputs if o.is_floating_point()]
    return Tape([o for o in outputs if o.requires_grad], returned, held, places, inputs, counter.of)


def _with_slopes(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x
