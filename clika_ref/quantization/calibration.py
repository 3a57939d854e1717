"""Calibration: one pass over the data, a batch at a time, that remembers what each value of a graph held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ClikaError, ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.traits import SAME_SCALE
from clika_ref.quantization.channels import channel_means
from clika_ref.quantization.fingerprint import batch_fingerprint
from clika_ref.quantization.ranges import RangeTable
from clika_ref.quantization.running import run
from clika_ref.quantization.statistics import Measured, measured
from clika_ref.sizes_seen import Sizes, sizes_of

FITTED = 8
"""Batches that weights and biases are fitted to at most, beside the one that judges."""

RESERVOIR_BYTES = 64 * 2**20
"""Of calibration inputs that are kept, on which algorithms compare what they tried."""


def sample_count(inputs: Sequence[Tensor]) -> int:
    """Return how many samples a batch has: the length of side 0, of the longest input."""
    return max((t.shape[0] for t in inputs if t.ndim), default=1)


def batch_bytes(inputs: Sequence[Tensor]) -> int:
    """Return how many bytes a batch takes."""
    return sum(t.numel() * t.element_size() for t in inputs)


def moved(inputs: Sequence[Tensor], before: torch.device, after: torch.device) -> list[Tensor]:
    """Return inputs, one tensor for each, with those that lie on one device on another one."""
    return [x.to(after) if x.device == before else x for x in inputs]


@dataclass
class Reservoir:
    """The first batches of the calibration inputs, as many as fit."""

    limit_bytes: int = RESERVOIR_BYTES
    batches: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    held_bytes: int = 0
    is_full: bool = False

    def samples(self, fewest: int) -> list[list[Tensor]]:
        """Return the first batches that together have so many samples, along side 0 of their inputs, or all."""
        chosen: list[list[Tensor]] = []
        count = 0
        for inputs in self.batches:
            if count >= fewest:
                break
            chosen.append(inputs)
            count += sample_count(inputs)
        return chosen

    def offer(self, inputs: Sequence[Tensor]) -> None:
        """Keep copies of a batch, unless it or one before it was too much; the very first is always kept."""
        size = batch_bytes(inputs)
        self.is_full |= bool(self.batches) and self.held_bytes + size > self.limit_bytes
        if not self.is_full:
            self.batches.append([t.detach().clone() for t in inputs])
            self.held_bytes += size


@dataclass
class Calibration:
    """What a pass over the data has found so far.

    After an error or an interrupt, the pass can go on with the batch that it came to: it counts once it is whole.
    """

    graph: Graph
    """What is run: the model as it is going to be written."""
    table: RangeTable = field(default_factory=RangeTable)
    """What its values held."""
    reservoir: Reservoir = field(default_factory=Reservoir)
    """The first batches, on which algorithms are tried."""
    sizes: Counter[Sizes] = field(default_factory=Counter[Sizes])
    """Which sizes the batches had, and how many, those included that the reservoir has no room for."""
    model: str = ""
    """The `fingerprint` of the graph that it began with, of which ``graph`` is what is going to be written."""
    aside: tuple[Any, ...] = ()
    """Adapters that are to stand beside layers of the graph (`clika_ref.lora.lowering`), and do once it is smoothed."""
    _means: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])

    def add(self, inputs: Sequence[Tensor]) -> None:
        """Run the graph on a batch, one tensor for each of its inputs, and remember what its values held.

        Raises:
            ModelError: NaN or an infinity is among the inputs, masks left aside, or NaN among the values, or a node
                fails; the message says where.
        """
        found: dict[str, Measured] = {}
        means: dict[str, Tensor] = {}
        number, place = self.table.batches + 1, len(self.reservoir.batches)

        def observe(node: Node, results: tuple[Tensor, ...]) -> None:
            if place <= FITTED:
                _note_means(means, node, results)
            if moves_what_was_seen(node):  # it has what its operand has
                return
            for value, result in zip(node.outputs, results, strict=True):
                _observe(found, value, result, f"{node.op.name} in {node.origin}", number)

        self.refuse_infinite(inputs)
        for value, x in zip(self.graph.inputs, inputs, strict=True):
            _observe(found, value, x, "the caller", number)
        try:
            with torch.no_grad():
                run(self.graph, inputs, observe)
        except ModelError:
            raise
        except ClikaError as error:  # of a node that refuses what it reads, as an index that is none
            msg = f"calibration batch {number}: {error}"
            raise ModelError(msg) from error
        self.table.first = self.table.first if self.table.batches else batch_fingerprint(inputs)
        self.table.add(found)
        self.keep(inputs)
        if place <= FITTED and place < len(self.reservoir.batches):
            self._means[place] = means

    def means(self, place: int) -> Mapping[str, Tensor]:
        """Return the `channel_means`, ``float32[channels]``, of layers with a bias, by their names, in a batch kept.

        The first batches are run for that once only, in the pass over the data.
        """
        if place not in self._means:
            found: dict[str, Tensor] = {}
            with torch.no_grad():
                run(self.graph, self.reservoir.batches[place], partial(_note_means, found))
            self._means[place] = found
        return self._means[place]

    def of(self, graph: Graph, model: str) -> Calibration:
        """Return the same for another form of the graph, or for other weights, whose `fingerprint` is ``model``."""
        return replace(self, graph=graph, model=model, _means={})

    def begins_with(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a batch, one tensor for each input, is the first of those counted, as far as that is known."""
        return self.table.first in ("", batch_fingerprint(inputs))

    def begin_anew(self, graph: Graph) -> None:
        """Forget what was found, and begin with a graph that nothing is smoothed in yet."""
        self.reservoir, self.sizes = Reservoir(), Counter()
        self.begin_with(RangeTable(smoothed_for=self.table.smoothed_for, model=self.model), graph)

    def begin_with(self, table: RangeTable, graph: Graph) -> None:
        """Begin with the ranges of another table, and with a graph that nothing is smoothed in yet."""
        self.table, self.graph, self._means = table, graph, {}

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Remember the sizes of a batch, one tensor for each input, and the batch itself where there is room."""
        self.sizes[sizes_of(self.graph, inputs)] += 1
        self.reservoir.offer(inputs)

    def take(self, reservoir: Reservoir, sizes: Counter[Sizes]) -> None:
        """Have the batches of another reservoir at hand, and their sizes, as of several processes."""
        self.reservoir, self.sizes, self._means = reservoir, sizes, {}

    def moved(self, before: torch.device, after: torch.device) -> Calibration:
        """Return the same with the batches that lie on a device ``before`` on ``after``, where the model is now."""
        batches = [moved(inputs, before, after) for inputs in self.reservoir.batches]
        return replace(self, reservoir=replace(self.reservoir, batches=batches), _means={})

    @property
    def devices(self) -> list[torch.device]:
        """Where the inputs of a batch lie, or the weights, where there is no batch."""
        if self.reservoir.batches:
            return [x.device for x in self.reservoir.batches[0]]
        weight = next((v.data for v in self.graph.constants.values() if v.data is not None), torch.empty(0))
        return [weight.device for _ in self.graph.inputs]

    def refuse_infinite(self, inputs: Sequence[Tensor]) -> None:
        """Refuse a next batch, one tensor for each input, that is no data; infinities may be those of a mask.

        Raises:
            ModelError: NaN or an infinity is among the inputs, but for one of nothing else than 0 and -infinity.
        """
        if inputs and not any(x.numel() for x in inputs):
            msg = f"calibration batch {self.table.batches + 1} has no samples; leave it out"
            raise ModelError(msg)
        for value, x in zip(self.graph.inputs, inputs, strict=True):
            if x.is_floating_point() and not torch.isfinite(x).all() and not _is_mask(x):
                kind = "NaN" if x.isnan().any() else "an infinite number"
                msg = (
                    f"calibration batch {self.table.batches + 1}: the input {value.name!r} holds {kind}; "
                    "leave the batch out, or mend it"
                )
                raise ModelError(msg)


def _note_means(means: dict[str, Tensor], node: Node, results: tuple[Tensor, ...]) -> None:
    if node.op.trait.bias is not None:
        means[node.name] = channel_means(node, results[0])


def _is_mask(x: Tensor) -> bool:
    """Whether a tensor holds nothing but 0 and -infinity, which added to scores takes some of them out."""
    kept = x == 0
    return bool(kept.any() and (kept | (x == -torch.inf)).all())


def moves_what_was_seen(node: Node) -> bool:
    """Whether a node only moves elements of a value that calibration looks at; what it picks of a constant is new."""
    if node.op.trait is not SAME_SCALE:
        return False
    return not next(v for v in node.inputs if isinstance(v, Value)).is_constant


def _observe(found: dict[str, Measured], value: Value, x: Tensor, where: str, batch: int) -> None:
    if not x.is_floating_point():
        return
    try:
        found[value.name] = measured(x)
    except ValueError as error:
        source = _infinite_behind(value, found)
        because = f", as {source.op.name} in {source.origin} makes an infinite number" if source else ""
        msg = (
            f"calibration batch {batch}: %{value.name}, made by {where}, holds NaN{because}; leave the batch out, or "
            "mend it; where no batch does better, look for infinite numbers among the constants of the model"
        )
        raise ModelError(msg) from error


def _infinite_behind(value: Value, found: Mapping[str, Measured]) -> Node | None:
    """Return the node that made the first number behind a value that is infinite, or as large; None where none is."""
    node, source = value.producer, None
    while node is not None:
        behind = (v for v in node.inputs if isinstance(v, Value) and _is_unbounded(v, found))
        node = next((v.producer for v in behind), None)
        source = node or source
    return source


def _is_unbounded(value: Value, found: Mapping[str, Measured]) -> bool:
    while value.producer is not None and moves_what_was_seen(value.producer):
        value = next(v for v in value.producer.inputs if isinstance(v, Value))
    return value.name in found and found[value.name].is_unbounded
