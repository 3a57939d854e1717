"""What integers do to the products of attention, each of two computed values, which no target plans: latency and SQNR.

They are put into the file that a quantized module is exported to: from 0 on for what a softmax returns, signed ones
around 0 for what stands second, as both runtimes multiply them, and what each of them takes for queries.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.measuring import Names, measure_processor_seconds, median_ratio, run_in_fresh_process, run_in_turn
from benchmarks.ptq.judging import compare_outputs, outputs
from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.runtimes import RUNTIMES
from benchmarks.ptq.subjects import SUBJECTS, Batch, Prepared

# isort: split
import torch

from clika_ref.reporting.tables import print_table

SCORES, MIXTURES = "scores", "mixtures"
"""Products of queries with keys, and of what a softmax makes of them with values."""
VARIANTS: Mapping[str, Collection[str]] = {
    "as planned": (), SCORES: (SCORES,), MIXTURES: (MIXTURES,), "both": (SCORES, MIXTURES),
}  # fmt: skip
COLUMNS = ("model", "runtime", "products in integers", "ms", "of as planned", "SQNR", "mean cosine")
CALIBRATION_IMAGES = 5
"""Batches of the calibration data in which ranges are looked for."""
ROUNDS = 20


class Block(torch.nn.Module):
    """Attention between two linear layers, with as many heads as the width has parts: ``float32[b, tokens, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.mixed, self.out = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        query, key, value = self.mixed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


def _block(batch: int, tokens: int, width: int, heads: int) -> Callable[[], Prepared]:
    def made() -> Prepared:
        spread = torch.Generator().manual_seed(0)
        data = [{"x": torch.randn(size, tokens, width, generator=spread)} for size in (2 * batch, batch) * 2]
        return Prepared(Block(width, heads).eval(), data[:2], data[:1:-1], None, is_transformer=True)

    return made


def _subject(name: str) -> Callable[[], Prepared]:
    def made() -> Prepared:
        found = SUBJECTS[name]()
        first, *others = found.test()
        single, rest = ({name: tensor[part] for name, tensor in first.items()} for part in (slice(1), slice(1, None)))
        return Prepared(found.make(), found.calibration(), [single, rest, *others], None, is_transformer=True)

    return made


MODELS: Mapping[str, Callable[[], Prepared]] = {
    **{name: _subject(name) for name in ("encoder", "vit_b_16", "swin_t")},
    "block of vit_b_16": _block(1, 197, 768, 12),
    "first block of swin_t": _block(64, 49, 96, 3),
    "block of 1,024 tokens": _block(1, 1024, 768, 12),
}


def run(names: Names = None) -> None:
    """The products of attention in integers, in OpenVINO and ONNX Runtime: latency and SQNR; not part of all."""
    rows = [row for name in names or MODELS for row in run_in_fresh_process("benchmarks.attention", name)]
    print_table(COLUMNS, rows)


def main(name: str) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    prepared = MODELS[name]()
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).flatten(1).numpy() for batch in prepared.test])
    return [(name, *row) for runtime in ("openvino", "onnxruntime") for row in _rows(runtime, prepared, exact)]


def _rows(runtime: str, prepared: Prepared, exact: np.ndarray) -> Iterator[tuple[str, ...]]:
    opened = RUNTIMES[runtime].open
    with TemporaryDirectory() as position:
        path = Path(position) / "planned.onnx"
        compile_quantized(prepared.model, prepared.calibration, runtime).clika_export(path)
        attention = Attention(onnx.load(path), runtime)
        ranges = attention.ranges(prepared.calibration[:CALIBRATION_IMAGES])
        runs = {}
        for variant, kinds in VARIANTS.items():
            file = Path(position) / f"{variant}.onnx"
            onnx.save(attention.in_integers(kinds, ranges), file)
            runs[variant] = opened(file)
        feed = {name: tensor.numpy() for name, tensor in prepared.test[0].items()}
        calls = {name: lambda one=one: measure_processor_seconds(lambda: one(feed)) for name, one in runs.items()}
        seconds = run_in_turn(calls, ROUNDS)
        for variant, one in runs.items():
            found = compare_outputs(outputs(one, prepared.test).reshape(exact.shape), exact, prepared)
            slower = median_ratio(seconds[variant], seconds["as planned"])
            numbers = (f"{found['sqnr']:.1f} dB", f"{found['cosine']:.4f}")
            row = runtime, variant, f"{statistics.median(seconds[variant]) * 1e3:.2f}", f"{slower:.2f}", *numbers
            print(row, file=sys.stderr)
            yield row


@dataclass(frozen=True)
class Attention:
    """A file, and the products of two computed values in it."""

    model: onnx.ModelProto
    runtime: str

    @property
    def products(self) -> dict[str, str]:
        """Of each such product, by the name of what it makes, which of the two it is."""
        fixed, found, softmax = {i.name for i in self.model.graph.initializer}, dict[str, str](), set[str]()
        for node in self.model.graph.node:
            if all(name in fixed for name in node.input):
                fixed.update(node.output)
            elif node.op_type == "Softmax":
                softmax.update(node.output)
            elif node.op_type == "MatMul" and not fixed & {*node.input}:
                found[node.output[0]] = MIXTURES if node.input[0] in softmax else SCORES
        return found

    def ranges(self, batches: Sequence[Batch]) -> dict[str, tuple[float, float]]:
        """Return the least and the greatest element of what these products read."""
        import onnxruntime  # noqa: PLC0415 - the table needs none of it

        shown, matrix_products = onnx.ModelProto(), self.products
        shown.CopyFrom(self.model)
        read = dict.fromkeys(n for node in shown.graph.node if node.output[0] in matrix_products for n in node.input)
        shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in read)
        session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
        found = dict.fromkeys(read, (0.0, 0.0))
        for batch in batches:
            results = session.run([*read], {name: tensor.numpy() for name, tensor in batch.items()})
            for name, result in zip(read, results, strict=True):
                low, high = found[name]
                found[name] = min(low, float(result.min())), max(high, float(result.max()))
        return found

    def in_integers(self, kinds: Collection[str], ranges: Mapping[str, tuple[float, float]]) -> onnx.ModelProto:
        """Return the model with pairs before the products of some kinds."""
        made, matrix_products = onnx.ModelProto(), self.products
        made.CopyFrom(self.model)
        nodes: list[onnx.NodeProto] = []
        for node in made.graph.node:
            kind = matrix_products.get(node.output[0], "")
            for position, name in enumerate([*node.input] if kind in kinds else ()):
                scale, zero = self._scale(kind, position, *ranges[name])
                values = f"{node.output[0]}_operand_{position}"
                numbers = {f"{values}_scale": np.float32(scale), f"{values}_zero": zero}
                made.graph.initializer.extend(numpy_helper.from_array(n, key) for key, n in numbers.items())
                quantize = helper.make_node("QuantizeLinear", [name, *numbers], [f"{values}_q"], f"{values}_q")
                nodes += [quantize, helper.make_node("DequantizeLinear", [f"{values}_q", *numbers], [values], values)]
                node.input[position] = values
            nodes.append(node)
        del made.graph.node[:]
        made.graph.node.extend(nodes)
        onnx.checker.check_model(made)
        return made

    def _scale(self, kind: str, position: int, low: float, high: float) -> tuple[float, Any]:
        """Return the scale and the zero point of an operand."""
        if kind == MIXTURES and position == 0:  # of which nothing lies below 0
            return high / 255, np.uint8(0)
        if position == 0 and self.runtime == "onnxruntime":  # which multiplies unsigned ones with signed ones
            scale = (high - low) / 255
            return scale, np.uint8(round(-low / scale))
        return max(-low, high) / 127, np.int8(0)
