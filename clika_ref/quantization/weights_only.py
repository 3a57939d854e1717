"""Weight-only quantization: find the smallest bit width and block size of each layer that is accurate enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.quantization.calibration import Calibration
from clika_ref.quantization.clipping import clipped_scales
from clika_ref.quantization.compressing import Compressed, rows_of
from clika_ref.quantization.error_feedback import rounded_with_feedback
from clika_ref.quantization.layer_weights import is_own, numbers_of, position_of, weight_of
from clika_ref.quantization.layers import Choice
from clika_ref.quantization.placement import COMPUTE
from clika_ref.quantization.running import run
from clika_ref.quantization.scales import weight_scales
from clika_ref.quantization.sensitivity import too_sensitive, varying_share
from clika_ref.quantization.tape import Tape, taped
from clika_ref.quantization_scheme import WeightsOnly
from clika_ref.quantization_settings import QuantizationSettings
from clika_ref.settings import ClikaCompileOptions, Switch

HELD = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights that can be quantized; dequantized weights keep the dtype."""

FITTED = 4
"""Maximum number of batches that rounding is fitted to; the last batch is for evaluation."""


@dataclass(frozen=True)
class Ways:
    """Options for the quantization of a layer's weight to low bits."""

    clips: bool = True
    """Whether scales may clip the largest elements if that lowers the error of the whole."""
    feedback: Switch = "auto"
    """GPTQ: used if it lowers the error on data, always, or never."""

    @classmethod
    def of(cls, options: ClikaCompileOptions, *, is_late: bool = False) -> Ways:
        """Return the options that the user chose; when late, those on ``"auto"`` are off."""
        is_left = is_late and options.weight_rounding == "auto"
        return cls(options.weight_clipping != "off", "off" if is_left else options.weight_rounding)


@dataclass
class Found:
    """The result for each layer."""

    held: dict[Node, Compressed] = field(default_factory=dict[Node, Compressed])
    floats: dict[Node, str] = field(default_factory=dict[Node, str])
    """Layers that keep their weights, with the reason."""
    weighed: dict[Node, float] = field(default_factory=dict[Node, float])
    """Sensitivity of each layer in its chosen form, or in its best one if it keeps its weight."""
    tried: dict[Node, Compressed] = field(default_factory=dict[Node, Compressed])
    """The form that has this sensitivity."""
    varying: float = 0.0
    """See `varying_share`."""


WHOLE = "the target computes {} with whole weights"


def compressed_weights(
    calibration: Calibration,
    kind: WeightsOnly,
    chosen: Mapping[Node, Choice],
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
    *,
    forced: Collection[Node] = (),
    ways: Callable[[], Ways] = Ways,
) -> Found:
    """Quantize the weight of each layer to the fewest bytes at which it is not too sensitive.

    Args:
        calibration: of the lowered graph.
        kind: weight-only support of the target.
        chosen: settings with the widths that each node can take.
        settings: those of the model.
        skipped: nodes that stay unchanged, with the reason.
        forced: nodes that are quantized regardless of their sensitivity.
        ways: returns the options; called for each layer, since there may be a time limit.

    Raises:
        ModelError: a width or block size is requested that the target does not support.
    """
    graph, found = calibration.graph, Found()
    waiting: dict[Node, Iterator[tuple[int, int]]] = {}
    for node, options in options_of(graph, kind, chosen, settings, skipped).items():
        if isinstance(options, str):
            found.floats[node] = options
        else:
            waiting[node] = iter(options)
    if waiting:
        _Trying(calibration, settings, found, waiting, forced=forced, ways=ways).run()
    return found


def options_of(
    graph: Graph,
    kind: WeightsOnly,
    chosen: Mapping[Node, Choice],
    settings: QuantizationSettings,
    skipped: Mapping[Node, str],
) -> dict[Node, str | list[tuple[int, int]]]:
    """Return the widths and block sizes that each layer can take, fewest bytes first, or the reason that it cannot.

    Raises:
        ModelError: a width or block size is requested that the target does not support.
    """
    found: dict[Node, str | list[tuple[int, int]]] = {}
    blocks = as_list(settings.weights_only_quantization_block_size)
    for node in graph.nodes:
        if node.op.trait.matrices is not None:
            found[node] = skipped.get(node, WHOLE.format(node.kind))
        elif node.op.trait.kind == COMPUTE:
            _refuse_widths(node, chosen[node].weights_num_bits, kind)
            reason = skipped.get(node) or _refusal(graph, node, kind)
            found[node] = reason or _options(node, chosen[node].weights_num_bits, blocks, kind)
    return found


def _options(
    node: Node, widths: Sequence[int], blocks: Sequence[int], kind: WeightsOnly
) -> str | list[tuple[int, int]]:
    taken, inputs = _taken(node, widths, blocks, kind), _inputs(node)
    options = sorted(((bits, block) for bits, block in taken if not block or inputs % block == 0), key=_bytes_of)
    return options or f"no block of {sorted({block for _, block in taken})} divides its {inputs} inputs"


def as_list(given: int | list[int]) -> list[int]:
    """Return a single choice as a list."""
    return [given] if isinstance(given, int) else [*given]


def _refuse_widths(node: Node, widths: Sequence[int], kind: WeightsOnly) -> None:
    lacking = [bits for bits in widths if bits not in kind.bits]
    if len(lacking) == len(widths):
        has = " or ".join(map(str, sorted(kind.bits)))
        msg = (
            f"weights of {lacking[0]} bits are asked for {node.name} in {node.origin}; the target has {has}: name one "
            "in weights_num_bits as well, of which each target takes what it has"
        )
        raise ModelError(msg)


def _refusal(graph: Graph, node: Node, kind: WeightsOnly) -> str:
    """Return the reason to keep the weight of a layer unchanged, empty if there is none."""
    if node.kind not in kind.layers:
        return WHOLE.format(node.kind)
    weight = node.inputs[position_of(node)]
    if not is_own(graph, weight):
        return "both operands are computed"
    if weight.type.dtype not in HELD or weight.type.rank != 2:
        return f"its weight is {weight.type}"
    return ""


def _taken(node: Node, widths: Sequence[int], blocks: Sequence[int], kind: WeightsOnly) -> list[tuple[int, int]]:
    """Return the widths and block sizes of the settings that the target supports.

    Raises:
        ModelError: there are none.
    """
    held = [bits for bits in widths if bits in kind.bits]
    taken = [(bits, block) for bits in held for block in blocks if block in kind.blocks.get(bits, [block])]
    if not taken:
        has = " or ".join(map(str, sorted(kind.blocks[held[0]])))
        msg = (
            f"weights of {held[0]} bits in blocks of {' or '.join(map(str, blocks))} are asked for {node.name} in "
            f"{node.origin}; the target has blocks of {has}, where 0 is a whole row: name one in "
            "weights_only_quantization_block_size as well"
        )
        raise ModelError(msg)
    return taken


def _bytes_of(option: tuple[int, int]) -> float:
    """Return the bits of an element, its part of a scale included."""
    bits, block = option
    return bits + (32 / block if block else 0)


def _inputs(node: Node) -> int:
    return int(weight_of(node).type.shape[1 if (node.op.trait.axis or 0) == 0 else 0])


class _Trying:
    """Evaluates one option of each layer at a time, all layers in one backward pass, until each is decided."""

    def __init__(
        self,
        calibration: Calibration,
        settings: QuantizationSettings,
        found: Found,
        waiting: dict[Node, Iterator[tuple[int, int]]],
        *,
        forced: Collection[Node],
        ways: Callable[[], Ways],
    ) -> None:
        self.settings, self.found, self.waiting, self.forced, self.ways = settings, found, waiting, forced, ways
        batches = calibration.reservoir.batches
        fitted, judged = (batches[:-1][:FITTED], batches[-1:]) if len(batches) > 1 else (batches, batches)
        read = {_operand(node) for node in waiting}
        self.fitted, self.judged = (_grams(calibration.graph, read, some) for some in (fitted, judged))
        self.tape: Tape = taped(calibration.graph, {node: node.output for node in waiting}, batches[0])

    def run(self) -> None:
        while self.waiting:
            tried: dict[Node, Compressed] = {}
            for node, options in [*self.waiting.items()]:
                option = next(options, None)
                if option is None:
                    del self.waiting[node]
                    self._give_up(node)
                else:
                    tried[node] = self._compressed(node, *option)
            self._weigh(tried)

    def _weigh(self, tried: Mapping[Node, Compressed]) -> None:
        weighed = self.tape.weigh({node: self._error(node, held) for node, held in tried.items()})
        self.found.varying = self.found.varying or varying_share(self.tape.returned)
        limit = self.settings.quantization_sensitivity_threshold if self.settings.automatic_skip_quantization else None
        for node, sensitivity in weighed.items():
            if sensitivity <= self.found.weighed.get(node, float("inf")):
                self.found.weighed[node], self.found.tried[node] = sensitivity, tried[node]
            if limit and sensitivity <= limit:
                self.found.held[node] = tried[node]
                del self.waiting[node]

    def _give_up(self, node: Node) -> None:
        """Keep the weight, or take the least sensitive option if the user quantizes all layers."""
        limit = self.settings.quantization_sensitivity_threshold
        if not self.settings.automatic_skip_quantization or node in self.forced:
            self.found.held[node] = self.found.tried[node]
        elif not limit:
            self.found.floats[node] = "quantization_sensitivity_threshold=0: it would change the numbers"
        else:
            self.found.floats[node] = too_sensitive(self.found.weighed[node], limit)

    @torch.no_grad()
    def _error(self, node: Node, held: Compressed) -> Tensor:
        """Return the change of a layer's output."""
        rows = _rows(node)
        missed = self.tape.held[_operand(node)].float() @ (held.held(rows) - rows).T
        return missed.to(self.tape.held[node.output].dtype)

    def _compressed(self, node: Node, bits: int, block_size: int) -> Compressed:
        read = _operand(node)
        return nearest_to_products(_rows(node), bits, block_size, self.fitted[read], self.judged[read], self.ways())


@torch.no_grad()
def nearest_to_products(  # noqa: PLR0917 - these arguments describe one weight
    rows: Tensor, bits: int, block_size: int, fitted: Tensor, judged: Tensor, ways: Ways
) -> Compressed:
    """Quantize a weight to low bits, with rounding to nearest or GPTQ, whichever has the lower error.

    Args:
        rows: ``float32[outputs, inputs]``.
        bits: of its integers.
        block_size: number of neighbors that share a scale, 0 for a whole row.
        fitted: ``x.T @ x`` of the data to fit, ``float32[inputs, inputs]``.
        judged: the same of the data for evaluation.
        ways: options of the rounding.
    """
    blocks = rows.shape[1] // block_size if block_size else 1
    kind = Compressed(bits, block_size, rows.new_empty(0)).integers
    weighs = fitted.diagonal().expand_as(rows).reshape(len(rows) * blocks, -1)
    parts = rows.reshape(len(rows) * blocks, -1)
    scales = clipped_scales(parts, 0, kind, weighs) if ways.clips else weight_scales(parts, 0, kind)
    nearest = Compressed(bits, block_size, scales.reshape(len(rows), blocks))
    steps = None if ways.feedback == "off" else rounded_with_feedback(rows, nearest.scales, kind, fitted)
    if steps is None:
        return nearest
    fed_back = replace(nearest, moved=steps - nearest.steps(rows))
    if ways.feedback == "on":
        return fed_back
    return min((nearest, fed_back), key=lambda held: missed_of(rows, held, judged))


def missed_of(rows: Tensor, held: Compressed, gram: Tensor) -> float:
    """Return the squared error of products with the data of a Gram matrix, summed."""
    missed = held.held(rows) - rows
    return float(((missed @ gram) * missed).sum())


def _operand(node: Node) -> Value:
    return next(v for v in node.inputs if isinstance(v, Value))


def _rows(node: Node) -> Tensor:
    return rows_of(node, numbers_of(weight_of(node)))


@torch.no_grad()
def _grams(graph: Graph, values: set[Value], batches: Sequence[Sequence[Tensor]]) -> dict[Value, Tensor]:
    """Return ``x.T @ x`` of some values over batches, ``float32[inputs, inputs]``; not finite for infinite data."""
    found: dict[Value, Tensor] = {}

    def look(value: Value, x: Tensor) -> None:
        if value in values:
            rows = x.reshape(-1, x.shape[-1]).float()
            found[value] = found.get(value, 0) + rows.T @ rows

    def observe(node: Node, results: tuple[Tensor, ...]) -> None:
        for value, result in zip(node.outputs, results, strict=True):
            look(value, result)

    for inputs in batches:
        for value, x in zip(graph.inputs, inputs, strict=True):
            look(value, x)
        run(graph, inputs, observe)
    return found
