"""Calibration: one pass over the data, batch by batch, that collects statistics of each value of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ClikaError, ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.quantization.calibration.fingerprint import batch_fingerprint
from clika_ref.quantization.calibration.range_table import RangeTable
from clika_ref.quantization.calibration.statistics import BatchStatistics, measure_tensor
from clika_ref.quantization.graph_runs import run_graph
from clika_ref.quantization.qdq.layer_weights import channel_means
from clika_ref.targets.size_statistics import SymbolSizes, symbol_sizes_of

MAX_FITTED_BATCHES = 8
"""Maximum number of batches that weights and biases are fitted to; others are held out for evaluation."""

MAX_RESERVOIR_BYTES = 64 * 2**20
"""Size limit of the calibration inputs that are kept; algorithms are compared on these."""


def sample_count(inputs: Sequence[Tensor]) -> int:
    """Return the number of samples in a batch: the largest length of dim 0 among the inputs."""
    return max((t.shape[0] for t in inputs if t.ndim), default=1)


def take_batches(batches: Iterable[Sequence[Tensor]], min_samples: int) -> list[Sequence[Tensor]]:
    """Return the first batches with ``min_samples`` samples along dim 0 in total, or all; no further ones are read."""
    chosen: list[Sequence[Tensor]] = []
    count = 0
    for inputs in batches:
        chosen.append(inputs)
        count += sample_count(inputs)
        if count >= min_samples:
            break
    return chosen


def batch_bytes(inputs: Sequence[Tensor]) -> int:
    """Return the size of a batch in bytes."""
    return sum(t.numel() * t.element_size() for t in inputs)


def move_inputs(inputs: Sequence[Tensor], before: torch.device, after: torch.device) -> list[Tensor]:
    """Return the inputs, one tensor for each, with those on device ``before`` moved to device ``after``."""
    return [x.to(after) if x.device == before else x for x in inputs]


@dataclass
class Reservoir:
    """The first calibration batches, as many as fit into ``limit_bytes``."""

    limit_bytes: int = MAX_RESERVOIR_BYTES
    batches: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    used_bytes: int = 0
    is_full: bool = False

    def offer(self, inputs: Sequence[Tensor]) -> None:
        """Keep a copy of a batch unless the reservoir is full; the first batch is always kept.

        Once a batch does not fit, no later batch is kept.
        """
        size = batch_bytes(inputs)
        self.is_full |= bool(self.batches) and self.used_bytes + size > self.limit_bytes
        if not self.is_full:
            self.batches.append([t.detach().clone() for t in inputs])
            self.used_bytes += size

    @property
    def evaluation_indices(self) -> list[int]:
        """Indices of the batches that candidates are evaluated on: every other one, or the only one."""
        count = len(self.batches)
        return [*range(1, count, 2 if count > 3 else 1)] or [*range(count)]

    @property
    def fitted_indices(self) -> list[int]:
        """Indices of the batches that weights and biases are fitted to; only a single batch is also held out."""
        return [0, *range(2, len(self.batches) if len(self.batches) > 3 else 0, 2)][:MAX_FITTED_BATCHES]


@dataclass
class Calibration:
    """State of a calibration pass: the statistics, kept batches and sizes so far.

    After an error or an interrupt, the pass can resume at the batch that it stopped at. A batch counts once it was
    processed completely.
    """

    graph: Graph
    """The lowered graph that is run."""
    table: RangeTable = field(default_factory=RangeTable)
    """Statistics of its values."""
    reservoir: Reservoir = field(default_factory=Reservoir)
    """The first batches; algorithms are evaluated on these."""
    sizes: Counter[SymbolSizes] = field(default_factory=Counter[SymbolSizes])
    """How often each combination of input sizes occurred, including batches that the reservoir did not keep."""
    model: str = ""
    """`fingerprint` of the original graph; ``graph`` is its lowered form."""
    detached_adapters: tuple[Any, ...] = ()
    """Adapters removed from the graph (`clika_ref.lora.lowering`); SmoothQuant adds them again."""
    _means: dict[int, dict[str, Tensor]] = field(default_factory=dict[int, dict[str, Tensor]])

    def add(self, inputs: Sequence[Tensor]) -> None:
        """Run the graph on a batch, one tensor for each of its inputs, and record the statistics of its values.

        Raises:
            ModelError: an input contains NaN or an infinity (attention masks excepted), a value contains NaN, or a node
                fails; the message names the place.
        """
        found: dict[str, list[BatchStatistics]] = {}
        means: dict[str, Tensor] = {}
        number, index = self.table.batches + 1, len(self.reservoir.batches)
        may_be_fitted = index in range(0, 2 * MAX_FITTED_BATCHES, 2)

        def observe(node: Node, results: tuple[Tensor, ...]) -> None:
            if may_be_fitted:
                _record_means(means, node, results)
            if is_move_of_observed_value(node):  # same elements as its operand
                return
            for value, result in zip(node.outputs, results, strict=True):
                _observe(found, value, result, f"{node.op.name} in {node.origin}", number)

        def observe_inputs(body: Graph, operands: Sequence[Tensor]) -> None:
            for value, x in zip(body.inputs, operands, strict=True):
                _observe(found, value, x, f"the operands of {body.name}", number)

        self.reject_infinite(inputs)
        for value, x in zip(self.graph.inputs, inputs, strict=True):
            _observe(found, value, x, "the caller", number)
        try:
            with torch.no_grad():
                run_graph(self.graph, inputs, observe, observe_inputs)
        except ModelError:
            raise
        except ClikaError as error:  # raised by a node that rejects its inputs, such as an out-of-range index
            raise ModelError(f"calibration batch {number}: {error}") from error
        self.table.first = self.table.first if self.table.batches else batch_fingerprint(inputs)
        self.table.add(found)
        self.keep(inputs)
        if may_be_fitted and index < len(self.reservoir.batches):
            self._means[index] = means

    def batch_means(self, index: int) -> Mapping[str, Tensor]:
        """Return the `channel_means` of a kept batch, ``float32[samples, channels]`` for each layer with a bias.

        The calibration pass stores them for the first batches, so that these need no second run.
        """
        if index not in self._means:
            found: dict[str, Tensor] = {}
            with torch.no_grad():
                run_graph(self.graph, self.reservoir.batches[index], partial(_record_means, found))
            self._means[index] = found
        return self._means[index]

    def of_bodies(self) -> list[Calibration]:
        """Return a calibration for each body of the graph's own nodes, with the inputs that it got on kept batches.

        Those that no batch entered have no batches.
        """
        parts = {body: Calibration(body, self.table) for node in self.graph.nodes for body in node.bodies}

        def keep_inputs(body: Graph, operands: Sequence[Tensor]) -> None:
            if body in parts:
                parts[body].keep(operands)

        for inputs in self.reservoir.batches if parts else ():
            with torch.no_grad():
                run_graph(self.graph, inputs, None, keep_inputs)
        return list(parts.values())

    def of(self, graph: Graph, model: str) -> Calibration:
        """Return a copy for another form of the ``graph``, or for other weights; ``model`` is their `fingerprint`."""
        return replace(self, graph=graph, model=model, _means={})

    def is_first_batch(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether a batch, one tensor for each input, is the first one counted; True if that is unknown."""
        return self.table.first in ("", batch_fingerprint(inputs))

    def restart(self, graph: Graph) -> None:
        """Discard all results, and restart with a ``graph`` without SmoothQuant."""
        self.reservoir, self.sizes = Reservoir(), Counter()
        self.restart_with_ranges(RangeTable(smoothing_purpose=self.table.smoothing_purpose, model=self.model), graph)

    def restart_with_ranges(self, table: RangeTable, graph: Graph) -> None:
        """Continue with the ranges of another ``table``, and with a ``graph`` without SmoothQuant."""
        self.table, self.graph, self._means = table, graph, {}

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Record the sizes of a batch, one tensor for each input, and keep the batch if there is room."""
        self.sizes[symbol_sizes_of(self.graph, inputs)] += 1
        self.reservoir.offer(inputs)

    def take(self, reservoir: Reservoir, sizes: Counter[SymbolSizes]) -> None:
        """Use the batches of another ``reservoir`` and their ``sizes``, such as those merged from several processes."""
        self.reservoir, self.sizes, self._means = reservoir, sizes, {}

    def move(self, before: torch.device, after: torch.device) -> Calibration:
        """Return a copy with the kept batches moved from device ``before`` to ``after``, where the model is now."""
        batches = [move_inputs(inputs, before, after) for inputs in self.reservoir.batches]
        return replace(self, reservoir=replace(self.reservoir, batches=batches), _means={})

    @property
    def devices(self) -> list[torch.device]:
        """Devices of the inputs of a batch, or of the weights if no batch is kept."""
        if self.reservoir.batches:
            return [x.device for x in self.reservoir.batches[0]]
        weight = next((v.data for v in self.graph.constants.values() if v.data is not None), torch.empty(0))
        return [weight.device for _ in self.graph.inputs]

    def reject_infinite(self, inputs: Sequence[Tensor]) -> None:
        """Reject a batch, one tensor for each input, that is empty or not finite.

        Infinities are accepted in a tensor that contains only 0 and -infinity, as additive attention masks do.

        Raises:
            ModelError: the batch has no samples, or an input contains NaN or an infinity and is no such mask.
        """
        if inputs and not any(x.numel() for x in inputs):
            raise ModelError(f"calibration batch {self.table.batches + 1} has no samples. Remove it.")
        for value, x in zip(self.graph.inputs, inputs, strict=True):
            if x.is_floating_point() and not torch.isfinite(x).all() and not _is_mask(x):
                kind = "NaN" if x.isnan().any() else "infinity"
                raise ModelError(
                    f"calibration batch {self.table.batches + 1}: the input {value.name!r} contains {kind}. Remove "
                    "the batch, or fix it."
                )


def _record_means(means: dict[str, Tensor], node: Node, results: tuple[Tensor, ...]) -> None:
    if node.op.trait.bias is not None:
        means[node.name] = channel_means(node, results[0])


def _is_mask(x: Tensor) -> bool:
    """Return whether a tensor contains only 0 and -infinity, as additive attention masks do."""
    is_zero = x == 0
    return bool(is_zero.any() and (is_zero | (x == -torch.inf)).all())


def is_move_of_observed_value(node: Node) -> bool:
    """Return whether a node only moves elements of a value that calibration observes already.

    A selection from a constant is observed itself.
    """
    return node.op.trait is SHARED_QPARAMS and not node.first_tensor.is_constant


def source_of_moves(value: Value) -> Value:
    """Return the observed value that a value is a move of; itself if it is observed."""
    while value.producer is not None and is_move_of_observed_value(value.producer):
        value = value.producer.first_tensor
    return value


def _observe(found: dict[str, list[BatchStatistics]], value: Value, x: Tensor, where: str, batch: int) -> None:
    """Measure a value; the body of a loop computes it several times in a batch."""
    if not x.is_floating_point():
        return
    try:
        found.setdefault(value.name, []).append(measure_tensor(x))
    except ValueError as error:
        source = _find_infinite_source(value, found)
        because = f", since {source.op.name} in {source.origin} returns infinity" if source else ""
        raise ModelError(
            f"calibration batch {batch}: %{value.name}, from {where}, contains NaN{because}. Remove or fix the batch; "
            "if every batch fails, look for infinity in the constants of the model."
        ) from error


def _find_infinite_source(value: Value, found: Mapping[str, Sequence[BatchStatistics]]) -> Node | None:
    """Return the first node upstream of a value with an infinite or comparably large output; None if there is none."""
    node, source = value.producer, None
    while node is not None:
        sources = (v for v in node.inputs if isinstance(v, Value) and _is_unbounded(v, found))
        node = next((v.producer for v in sources), None)
        source = node or source
    return source


def _is_unbounded(value: Value, found: Mapping[str, Sequence[BatchStatistics]]) -> bool:
    return any(part.is_unbounded for part in found.get(source_of_moves(value).name, ()))
