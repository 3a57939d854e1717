"""Measure INT8 for the matrix products of attention, which no target quantizes: latency and SQNR.

Both operands of these products are activations. The benchmark inserts Q/DQ pairs for them into the file of a quantized
module, in the form that the runtimes support. Softmax outputs are unsigned, from 0. Second operands are signed and
symmetric. Queries are signed and symmetric in OpenVINO, and unsigned with a zero point in ONNX Runtime.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.measuring import Names, measure_processor_seconds, median_ratio, run_in_fresh_process, run_in_turn
from benchmarks.ptq.evaluation import compare_outputs, compute_outputs
from benchmarks.ptq.prepared_subjects import Batch, PreparedSubject
from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.runtimes import RUNTIMES, Run
from benchmarks.ptq.subjects import SUBJECTS

# isort: split
import torch

from clika_ref.reporting.tables import print_table

QUERIES_KEYS, SOFTMAX_VALUES = "queries x keys", "softmax x values"
"""The two types of products: attention scores, and the mixture of values by their softmax."""
AS_PLANNED = "as planned"
VARIANTS: Mapping[str, Collection[str]] = {
    AS_PLANNED: (),
    QUERIES_KEYS: (QUERIES_KEYS,),
    SOFTMAX_VALUES: (SOFTMAX_VALUES,),
    "both": (QUERIES_KEYS, SOFTMAX_VALUES),
}
COLUMNS = ("model", "runtime", "products in INT8", "ms", "relative to planned", "SQNR", "mean cosine")
RANGE_BATCHES = 5
"""Batches of the calibration data that determine the ranges of operands."""
ROUNDS = 20


class AttentionBlock(torch.nn.Module):
    """Multi-head attention between two linear layers, on ``float32[b, tokens, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.projection, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[b, tokens, width]`` for ``x[b, tokens, width]``."""
        query, key, value = self.projection(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


def _prepare_block(batch: int, tokens: int, width: int, heads: int) -> PreparedSubject:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(size, tokens, width, generator=generator)} for size in (2 * batch, batch) * 2]
    return PreparedSubject(AttentionBlock(width, heads).eval(), data[:2], data[:1:-1], is_transformer=True)


def _prepare_subject(name: str) -> PreparedSubject:
    """Build a subject. Its first test batch is split, so that latency is measured on one sample."""
    subject = SUBJECTS[name]()
    first, *others = subject.test()
    single, rest = ({name: tensor[part] for name, tensor in first.items()} for part in (slice(1), slice(1, None)))
    return PreparedSubject(subject.make(), subject.calibration(), [single, rest, *others], is_transformer=True)


MODELS: Mapping[str, Callable[[], PreparedSubject]] = {
    **{name: partial(_prepare_subject, name) for name in ("encoder", "vit_b_16", "swin_t")},
    "block of vit_b_16": partial(_prepare_block, 1, 197, 768, 12),
    "first block of swin_t": partial(_prepare_block, 64, 49, 96, 3),
    "block of 1,024 tokens": partial(_prepare_block, 1, 1024, 768, 12),
}


def run(names: Names = None) -> None:
    """Measure INT8 for the matrix products of attention in both runtimes: latency and SQNR."""
    rows = [row for name in names or MODELS for row in run_in_fresh_process("benchmarks.attention", name)]
    print_table(COLUMNS, rows)


def main(name: str) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    prepared = MODELS[name]()
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).flatten(1).numpy() for batch in prepared.test])
    return [(name, *row) for runtime in ("openvino", "onnxruntime") for row in _measure_rows(runtime, prepared, exact)]


def _measure_rows(runtime: str, prepared: PreparedSubject, exact: np.ndarray) -> Iterator[tuple[str, ...]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "planned.onnx"
        compile_quantized(prepared.model, prepared.calibration, runtime).clika_export(path)
        products = AttentionMatMuls(onnx.load(path), runtime)
        ranges = products.measure_ranges(prepared.calibration[:RANGE_BATCHES])
        runs: dict[str, Run] = {}
        for variant, types in VARIANTS.items():
            file = Path(folder) / f"{variant}.onnx"
            onnx.save(products.quantize(types, ranges), file)
            runs[variant] = RUNTIMES[runtime].open(file, 1)
        feed = {name: tensor.numpy() for name, tensor in prepared.test[0].items()}
        calls = {name: lambda run=run: measure_processor_seconds(lambda: run(feed)) for name, run in runs.items()}
        seconds = run_in_turn(calls, ROUNDS)
        for variant, run in runs.items():
            found = compare_outputs([compute_outputs(run, prepared.test)[0].reshape(exact.shape)], [exact], prepared)
            ratio = median_ratio(seconds[variant], seconds[AS_PLANNED])
            accuracy = (f"{found['sqnr']:.1f} dB", f"{found['cosine']:.4f}")
            row = runtime, variant, f"{statistics.median(seconds[variant]) * 1e3:.2f}", f"{ratio:.2f}", *accuracy
            print(row, file=sys.stderr)
            yield row


@dataclass(frozen=True)
class AttentionMatMuls:
    """The matrix products of two activations in a file."""

    model: onnx.ModelProto
    runtime: str

    @property
    def types(self) -> dict[str, str]:
        """The type of each product, by the name of its output."""
        constants, found, softmax = {i.name for i in self.model.graph.initializer}, dict[str, str](), set[str]()
        for node in self.model.graph.node:
            if all(name in constants for name in node.input):
                constants.update(node.output)
            elif node.op_type == "Softmax":
                softmax.update(node.output)
            elif node.op_type == "MatMul" and not constants & {*node.input}:
                found[node.output[0]] = SOFTMAX_VALUES if node.input[0] in softmax else QUERIES_KEYS
        return found

    def measure_ranges(self, batches: Sequence[Batch]) -> dict[str, tuple[float, float]]:
        """Return the minimum and maximum of each operand of these products."""
        import onnxruntime  # noqa: PLC0415 - printing the table does not need it

        model, types = onnx.ModelProto(), self.types
        model.CopyFrom(self.model)
        operands = dict.fromkeys(name for node in model.graph.node if node.output[0] in types for name in node.input)
        model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in operands)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found = dict.fromkeys(operands, (0.0, 0.0))
        for batch in batches:
            results: Any = session.run([*operands], {name: tensor.numpy() for name, tensor in batch.items()})
            for name, result in zip(operands, results, strict=True):
                low, high = found[name]
                found[name] = min(low, float(result.min())), max(high, float(result.max()))
        return found

    def quantize(self, chosen: Collection[str], ranges: Mapping[str, tuple[float, float]]) -> onnx.ModelProto:
        """Return the model with Q/DQ pairs at the operands of the products of the chosen types."""
        model, types = onnx.ModelProto(), self.types
        model.CopyFrom(self.model)
        nodes: list[onnx.NodeProto] = []
        for node in model.graph.node:
            product_type = types.get(node.output[0], "")
            for position, name in enumerate([*node.input] if product_type in chosen else ()):
                scale, zero_point = self._compute_qparams(product_type, position, *ranges[name])
                operand = f"{node.output[0]}_operand_{position}"
                qparams = {f"{operand}_scale": np.float32(scale), f"{operand}_zero_point": zero_point}
                model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in qparams.items())
                quantize = helper.make_node("QuantizeLinear", [name, *qparams], [f"{operand}_q"], f"{operand}_q")
                dequantize = helper.make_node("DequantizeLinear", [f"{operand}_q", *qparams], [operand], operand)
                nodes += [quantize, dequantize]
                node.input[position] = operand
            nodes.append(node)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        onnx.checker.check_model(model)
        return model

    def _compute_qparams(self, product_type: str, position: int, low: float, high: float) -> tuple[float, Any]:
        """Return the scale and the zero point of an operand."""
        if product_type == SOFTMAX_VALUES and position == 0:  # softmax outputs are at least 0
            return high / 255, np.uint8(0)
        if position == 0 and self.runtime == "onnxruntime":  # it multiplies unsigned with signed operands
            scale = (high - low) / 255
            return scale, np.uint8(round(-low / scale))
        return max(-low, high) / 127, np.int8(0)
